"""Predicts held-out masked spans, to measure how much retrieval helps.

Used in pre-training, whenever an index comes into use (`index_metrics.py`), and by the
evaluation of a finished run (`evaluation/stage_results.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.answering.masks import read_masks
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import Searcher
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.placement import place_share, whole_batches
from realm_jax.types import Array, Candidates, Lengths, PretrainBatch

_BATCH = 8


@dataclasses.dataclass(frozen=True)
class MaskedSpans:
    """A model's predictions of masked spans, row by row.

    Attributes:
      block_ids: the documents that were read; -1 is the null document.
      correct: 1.0 where every masked wordpiece is predicted right, over all documents.
      null_correct: the same given the null document alone.
      log_retrieval: log p(z|x).
      log_candidates: log p(y|z,x) of the whole span.
      log_marginal: log p(y|x).
      log_null: log p(y|null,x).
    """

    batch: PretrainBatch
    block_ids: Int[np.ndarray, "example candidate"]
    correct: Float[np.ndarray, " example"]
    null_correct: Float[np.ndarray, " example"]
    log_retrieval: Float[np.ndarray, "example candidate"]
    log_candidates: Float[np.ndarray, "example candidate"]
    log_marginal: Float[np.ndarray, " example"]
    log_null: Float[np.ndarray, " example"]

    @property
    def utility(self) -> Float[np.ndarray, " example"]:
        """Retrieval utility, log p(y|x) - log p(y|null,x), in nats."""
        return self.log_marginal - self.log_null

    @property
    def retrieval_entropy(self) -> Float[np.ndarray, " example"]:
        """Entropy of p(z|x) over the candidates, in nats."""
        # An empty slot has probability 0, and 0 times -inf is NaN.
        logs = np.where(np.isfinite(self.log_retrieval), self.log_retrieval, 0.0)
        return -(np.exp(self.log_retrieval) * logs).sum(axis=-1)

    def means(self) -> Mapping[str, float]:
        """Returns means over all spans, by the names in `metrics/metrics_file.py`."""
        values = {
            "utility": self.utility,
            "likelihood": np.exp(self.log_marginal),
            "null_likelihood": np.exp(self.log_null),
            "accuracy": self.correct,
            "null_accuracy": self.null_correct,
            "null_retrieval": np.exp(self.log_retrieval[:, 0]),
            "retrieval_entropy": self.retrieval_entropy,
        }
        return {
            f"held_out_{name}": float(array.mean(dtype=np.float64))
            for name, array in values.items()
        }


class HeldOutSpans:
    """A fixed set of masked sentences, evenly spread, predicted repeatedly.

    `num_candidates` includes the null document. Batches are split over the
    mesh; None is for one device.
    """

    def __init__(
        self,
        retriever: Retriever,
        reader: KnowledgeEncoder,
        *,
        corpus: BlockStore,
        examples: Examples,
        num_candidates: int,
        lengths: Lengths,
        max_examples: int,
        mesh: Mesh | None = None,
    ):
        self._mesh = mesh
        self._corpus = corpus
        self._examples = examples
        self._num_candidates = num_candidates
        self._lengths = lengths
        self._count = min(max_examples, len(examples))
        self._embed = query_embedder(retriever.config, mesh)
        self._fill = _filler(retriever.config, reader.config)
        self._batch_size = whole_batches(mesh, _BATCH)

    def fill_in(self, params: PyTree, searcher: Searcher) -> MaskedSpans:
        """Predicts the spans; all processes take part and get the same results.

        The prediction of a wordpiece is argmax_v sum_z p(z|x) p(v|z,x), the mixture
        that the model is trained on; given the null document, argmax_v p(v|null,x).
        """
        rows = [self._fill_batch(params, searcher, batch) for batch in self._batches()]
        parts = jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
        return MaskedSpans(*jax.tree.map(lambda array: array[: self._count], parts))

    def _fill_batch(
        self, params: PyTree, searcher: Searcher, batch: PretrainBatch
    ) -> tuple[Any, ...]:
        queries = multihost.fetch(
            self._embed(params["retriever"], place_share(self._mesh, batch.query_ids))
        )
        neighbours = searcher.search(queries, num_neighbours(self._num_candidates))
        candidates = pretrain_candidates(
            self._corpus,
            jax.device_get(neighbours),
            batch,
            num_candidates=self._num_candidates,
            document_length=self._lengths.document,
            joined_length=self._lengths.joined,
        )
        inputs = place_share(self._mesh, (batch, candidates))
        filled = multihost.fetch(self._fill(params, *inputs))
        return (batch, candidates.block_ids, *filled)

    def _batches(self) -> Iterator[PretrainBatch]:
        """Yields evenly spread rows in batches of one shape; the last is padded."""
        rows = np.linspace(0, len(self._examples) - 1, self._count).astype(int)
        rows = np.pad(rows, (0, -self._count % self._batch_size), mode="edge")
        for some in rows.reshape(-1, self._batch_size):
            yield PretrainBatch(**self._examples.batch(some))


@functools.cache
def _filler(
    config: RetrieverConfig, bert: BertConfig
) -> Callable[[PyTree, PretrainBatch, Candidates], tuple[Array, ...]]:
    """Returns one jitted function per model, so that a process compiles it once."""
    retriever, reader = Retriever(config.rolled()), KnowledgeEncoder(bert.rolled())

    # Parameters are an argument: if closed over, they would be compiled as constants.
    @jax.jit
    def fill(
        params: PyTree, batch: PretrainBatch, candidates: Candidates
    ) -> tuple[Array, ...]:
        read = read_masks(retriever, reader, params, batch, candidates)
        likelihood = read.likelihood(batch.mask_ids, batch.mask_weights)
        return (
            _all_correct(read.log_mixture.argmax(axis=-1), batch),
            _all_correct(read.log_probs[:, 0].argmax(axis=-1), batch),
            read.log_retrieval,
            likelihood.log_candidates,
            likelihood.log_marginal,
            likelihood.log_null,
        )

    return fill


def _all_correct(guessed: Array, batch: PretrainBatch) -> Array:
    unscored = batch.mask_weights == 0
    return ((guessed == batch.mask_ids) | unscored).all(axis=-1).astype(jnp.float32)
