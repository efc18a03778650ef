"""Provides the candidates of a pre-training step, by a search within it or before it.

A search within the step involves no host: one program embeds the queries, searches the
embeddings on the devices, drops trivial candidates, assembles the documents from the
wordpieces on the devices, and then scores, reads and marginalises. `HostSearch`
searches on the host before the step. For the same queries both give the same
candidates.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.index import device_search, device_tokens
from realm_jax.index.candidates import (
    num_neighbours,
    own_candidates,
    pretrain_candidates,
)
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.index.device_tokens import DocumentLayout, TokenTable, place_tokens
from realm_jax.index.source import LoadedIndex
from realm_jax.metrics.means import Means
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import flops
from realm_jax.training.pretrain_loss import PretrainInputs, PretrainLoss
from realm_jax.training.search_ahead import SearchAhead
from realm_jax.training.state import TrainState
from realm_jax.training.step import Loss
from realm_jax.training.step_timing import Stopwatch
from realm_jax.types import (
    NULL_BLOCK,
    Array,
    Candidates,
    Lengths,
    Neighbours,
    PretrainBatch,
)

BatchAt = Callable[[int], PretrainBatch]
"""Maps the number of updates done to this process's batch of the next update."""


@flax.struct.dataclass
class RetrievingInputs:
    """A step's masked sentences, and the corpus to search for them.

    Attributes:
      embeddings: the index; None where it is part of the state (`rolling_refresh.py`).
      tokens: the wordpieces of the same blocks.
      own: the sentences' own blocks, where they are candidates (`candidates.py`).
    """

    batch: PretrainBatch
    embeddings: EmbeddingTable | None
    tokens: TokenTable
    own: Candidates | None = None


@dataclasses.dataclass(frozen=True)
class RetrievingLoss(Loss):
    """`PretrainLoss` over the candidates of a search in the same program.

    Attributes:
      num_candidates: documents per example, the null document and the own block
        included.
      approximate: see `device_search.search`.
      embeddings_from_index: whether the candidates' embeddings are taken from the index
        instead of being computed; for a frozen document tower.
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
        """Returns the loss of `PretrainLoss`, with no gradient through the search."""
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
        """See `Loss`; the search has no backward pass, so it is counted once."""
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
        """Returns rows of the index, and the live embedding of the null document."""
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


class DeviceSearch:
    """Has the step itself search, in the place of `HostSearch`."""

    def __init__(
        self,
        corpus: BlockStore,
        layout: DocumentLayout,
        mesh: Mesh,
        own_block: bool = False,
    ):
        self._own = None
        if own_block:
            self._own = functools.partial(
                own_candidates,
                corpus,
                document_length=layout.document,
                joined_length=layout.joined,
            )
        self._tokens = place_tokens(corpus, layout, mesh)

    def __call__(
        self, step: int, retriever: PyTree, index: LoadedIndex, batch_at: BatchAt
    ) -> RetrievingInputs:
        """Returns the sentences of the update after `step` updates, and the corpus."""
        batch = batch_at(step)
        own = None if self._own is None else self._own(batch)
        return RetrievingInputs(batch, index.searcher.table, self._tokens, own)

    def details(self) -> Mapping[str, Any]:
        """Returns nothing for a checkpoint: the step repeats the same search."""
        return {}

    def resume(self, details: Mapping[str, Any], batch_at: BatchAt) -> None:
        """Restores nothing."""


class HostSearch(SearchAhead[PretrainBatch, PretrainInputs]):
    """Searches before the step and gathers documents from the block store.

    `num_candidates` include the null document and, if it is one (`candidates.py`), the
    own block. With `ahead` it searches for the next update while one is running.
    """

    def __init__(
        self,
        retriever: RetrieverConfig,
        corpus: BlockStore,
        lengths: Lengths,
        num_candidates: int,
        mesh: Mesh,
        batch_size: int,
        ahead: bool = True,
        stopwatch: Stopwatch | None = None,
        own_block: bool = False,
    ):
        super().__init__(
            retriever,
            lambda batch: batch.query_ids,
            self._candidates,
            num_neighbours=num_neighbours(num_candidates),
            mesh=mesh,
            batch_size=batch_size,
            ahead=ahead,
            stopwatch=stopwatch or Stopwatch(),
        )
        self._corpus = corpus
        self._lengths = lengths
        self._num_candidates = num_candidates
        self._own_block = own_block

    def _candidates(
        self, batch: PretrainBatch, neighbours: Neighbours
    ) -> PretrainInputs:
        document, joined = self._lengths.document, self._lengths.joined
        candidates = pretrain_candidates(
            self._corpus,
            neighbours,
            batch,
            num_candidates=self._num_candidates - self._own_block,
            document_length=document,
            joined_length=joined,
        )
        if self._own_block:
            own = own_candidates(
                self._corpus, batch, document_length=document, joined_length=joined
            )
            candidates = jax.tree.map(
                lambda *parts: np.concatenate(parts, axis=1), candidates, own
            )
        return PretrainInputs(batch, candidates)
