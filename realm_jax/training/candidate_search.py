"""How a pre-training step gets its candidates: within it, or on the host before it.

Within it there is no way over the host: embed the queries, search the embeddings on the
devices, take out what is trivial, lay the documents out from the wordpieces there, and
then score, read and marginalise, in one program. `host_search.py` is the other way; of
the same queries both give the same candidates.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.index import device_search, device_tokens
from realm_jax.index.candidates import num_neighbours
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.index.device_tokens import DocumentLayout, TokenTable, place_tokens
from realm_jax.index.own_blocks import own_candidates
from realm_jax.index.source import LoadedIndex
from realm_jax.metrics.means import Means
from realm_jax.models.retriever import Retriever
from realm_jax.training import flops
from realm_jax.training.host_search import BatchAt
from realm_jax.training.initialization import Lengths
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.training.state import TrainState
from realm_jax.training.step import Loss
from realm_jax.types import NULL_BLOCK, Array, Candidates, PretrainBatch


@flax.struct.dataclass
class RetrievingInputs:
    """A step's masked sentences, and the corpus to search for them.

    Attributes:
      batch: the masked sentences.
      embeddings: the index; None where it is part of the state (`rolling_refresh.py`).
      tokens: the wordpieces of the same blocks.
      own: the sentences' own blocks, where they are candidates (`own_blocks.py`).
    """

    batch: PretrainBatch
    embeddings: EmbeddingTable | None
    tokens: TokenTable
    own: Candidates | None = None


@dataclasses.dataclass(frozen=True)
class RetrievingLoss(Loss):
    """`PretrainLoss` over what a search in the same program finds.

    Attributes:
      loss: of the candidates.
      num_candidates: documents per example, the null document and the own block
        included.
      layout: lengths and special wordpieces of the documents.
      mesh: the devices that hold the corpus.
      approximate: see `device_search.search`.
      embeddings_from_index: whether the candidates' embeddings are taken from the index
        instead of being computed; for a document tower that is frozen.
    """

    loss: PretrainLoss
    num_candidates: int
    layout: DocumentLayout
    mesh: Mesh
    approximate: bool = False
    embeddings_from_index: bool = False

    def __call__(
        self, params: PyTree, inputs: RetrievingInputs, key: jax.Array
    ) -> tuple[Array, Means]:
        """See `PretrainLoss`; no gradient flows through the choice of candidates."""
        candidates = self.candidates(params["retriever"], inputs)
        embeddings = None
        if self.embeddings_from_index:
            embeddings = self._indexed(params["retriever"], inputs, candidates)
        return self.loss(
            params, PretrainInputs(inputs.batch, candidates, embeddings), key
        )

    def with_embeddings(
        self, params: PyTree, inputs: RetrievingInputs, key: jax.Array
    ) -> tuple[Array, tuple[Means, Candidates, Array]]:
        """Returns loss, metrics, the candidates, and their live embeddings."""
        candidates = self.candidates(params["retriever"], inputs)
        loss, metrics, embeddings = self.loss.with_embeddings(
            params, PretrainInputs(inputs.batch, candidates), key
        )
        return loss, (metrics, candidates, embeddings)

    def update_flops(self, state: TrainState, inputs: RetrievingInputs) -> int:
        """See `Loss`; no gradient flows through the search, which counts once."""
        params, inputs, key = self.arguments(state, inputs)
        search = flops.count(self.candidates, params["retriever"], inputs)
        return 3 * (flops.count(self, params, inputs, key) - search) + search

    def candidates(self, retriever: PyTree, inputs: RetrievingInputs) -> Candidates:
        """Searches with the live query tower, without dropout."""
        queries = self.loss.retriever.apply(
            {"params": jax.lax.stop_gradient(retriever)},
            inputs.batch.query_ids,
            method=Retriever.embed_queries,
        )
        neighbours = device_search.search(
            inputs.embeddings,
            queries,  # pyright: ignore[reportArgumentType]
            num_neighbours(self.num_candidates),
            mesh=self.mesh,
            approximate=self.approximate,
        )
        found = device_tokens.pretrain_candidates(
            inputs.tokens,
            neighbours,
            inputs.batch,
            num_candidates=self.num_candidates - (inputs.own is not None),
            layout=self.layout,
            mesh=self.mesh,
        )
        if inputs.own is None:
            return found
        return jax.tree.map(
            lambda *parts: jnp.concatenate(parts, axis=1), found, inputs.own
        )

    def _indexed(
        self, retriever: PyTree, inputs: RetrievingInputs, candidates: Candidates
    ) -> Float[Array, "batch candidate projection"]:
        """Returns rows of the index; the null document, which it lacks, is embedded."""
        assert inputs.embeddings is not None
        rows = device_search.gather_rows(
            inputs.embeddings.rows, candidates.block_ids, self.mesh
        )
        null = self.loss.retriever.apply(
            {"params": retriever},
            candidates.document_ids[:1, 0],
            candidates.document_segment_ids[:1, 0],
            method=Retriever.embed_documents,
        )
        is_block = (candidates.block_ids != NULL_BLOCK)[..., None]
        embeddings = jnp.where(is_block, rows, null)  # pyright: ignore[reportArgumentType]
        return jax.lax.stop_gradient(embeddings)


class StepInputs(Protocol):
    """What a step is given, and the loss that can take it.

    Attributes:
      loss: of the inputs.
    """

    loss: Loss

    def __call__(
        self, step: int, retriever: PyTree, index: LoadedIndex, batch_at: BatchAt
    ) -> PretrainInputs | RetrievingInputs:
        """Returns the inputs of the next update.

        Args:
          step: updates done.
          retriever: its parameters of this moment.
          index: to search.
          batch_at: this process's masked sentences.
        """
        ...

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint must hold so that a resumed run goes on alike."""
        ...

    def resume(self, details: Mapping[str, Any], batch_at: BatchAt) -> None:
        """Goes on from the details of a checkpoint."""
        ...


class DeviceSearch:
    """Leaves all of it to the step; places the corpus's wordpieces once.

    Attributes:
      loss: `RetrievingLoss`.
    """

    def __init__(
        self,
        loss: PretrainLoss,
        corpus: BlockStore,
        lengths: Lengths,
        num_candidates: int,
        mesh: Mesh,
        approximate: bool,
        own_block: bool = False,
        embeddings_from_index: bool = False,
    ):
        """Places the wordpieces of the corpus on the devices."""
        self._own = None
        if own_block:
            self._own = functools.partial(
                own_candidates,
                corpus,
                document_length=lengths.document,
                joined_length=lengths.joined,
            )
        vocabulary = corpus.vocabulary
        layout = DocumentLayout(
            lengths.document, lengths.joined, vocabulary.cls, vocabulary.sep
        )
        self.loss = RetrievingLoss(
            loss, num_candidates, layout, mesh, approximate, embeddings_from_index
        )
        self._tokens = place_tokens(corpus, layout, mesh)

    def __call__(
        self, step: int, retriever: PyTree, index: LoadedIndex, batch_at: BatchAt
    ) -> RetrievingInputs:
        """See `StepInputs`."""
        batch = batch_at(step)
        own = None if self._own is None else self._own(batch)
        return RetrievingInputs(batch, index.searcher.table, self._tokens, own)

    def details(self) -> Mapping[str, Any]:
        """See `StepInputs`: the step finds the same again."""
        return {}

    def resume(self, details: Mapping[str, Any], batch_at: BatchAt) -> None:
        """See `StepInputs`."""
