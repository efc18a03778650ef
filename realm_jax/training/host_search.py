"""Finds candidates on the host, while the devices run the previous update.

The search for update n + 1 begins before update n does and embeds its queries with the
parameters of that moment, which are one update old when the candidates are read. The
results are saved in checkpoints, so that a resumed run reads the same candidates.
"""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.embed import query_embedder
from realm_jax.index.own_blocks import own_candidates
from realm_jax.index.searchers import DeviceSearcher, Searcher
from realm_jax.index.source import LoadedIndex
from realm_jax.training.initialization import Lengths
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.training.partitioning import local_rows, place_batch
from realm_jax.training.step_timing import Part, Stopwatch
from realm_jax.types import Neighbours, PretrainBatch

FOUND_AHEAD = "found_ahead"
"""In a checkpoint's details: the search results for the update after it."""

BatchAt = Callable[[int], PretrainBatch]
"""Maps the number of updates done to this process's batch of the next update."""

_Found = tuple[PretrainInputs, Neighbours]
"""Inputs of an update, and the neighbours from which they were made."""


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """A search that is running for a later update.

    Attributes:
      step: number of updates done before that update.
      index_step: version of the index that is searched.
      found: the result.
      queries: the embeddings that the search waits for; None if it needs none.
    """

    step: int
    index_step: int
    found: Future[_Found]
    queries: jax.Array | None = None


class HostSearch:
    """Searches before the step and gathers documents from the block store.

    Attributes:
      loss: `PretrainLoss`.
    """

    def __init__(
        self,
        loss: PretrainLoss,
        corpus: BlockStore,
        lengths: Lengths,
        num_candidates: int,
        mesh: Mesh,
        batch_size: int,
        ahead: bool = True,
        stopwatch: Stopwatch | None = None,
        own_block: bool = False,
    ):
        """Prepares to search, and starts a thread if it searches ahead.

        Args:
          loss: the loss of the candidates.
          corpus: the blocks.
          lengths: lengths of documents and joined inputs.
          num_candidates: documents per example, the null document and the own block
            included.
          mesh: mesh over which a batch is split.
          batch_size: number of examples over all devices.
          ahead: whether to search for the next update while one is running.
          stopwatch: stopwatch of the training thread; it records waiting for a search.
          own_block: whether the own block is a candidate; see `own_blocks.py`.
        """
        self.loss = loss
        self._stopwatch = stopwatch or Stopwatch()
        self._mesh = mesh
        self._corpus = corpus
        self._lengths = lengths
        self._num_candidates = num_candidates
        self._own_block = own_block
        self._embed_queries = query_embedder(loss.retriever.config, mesh)
        self._threads = ThreadPoolExecutor(1, "search") if ahead else None
        self._rows = local_rows(mesh, batch_size)
        self._ahead: _Ahead | None = None

    def __call__(
        self, step: int, retriever: PyTree, index: LoadedIndex, batch_at: BatchAt
    ) -> PretrainInputs:
        """See `StepInputs`."""
        inputs = self._found_for(step, index)
        if inputs is None:
            batch = batch_at(step)
            queries = self._queries(retriever, batch)
            self._stopwatch.wait_for(queries)
            with self._stopwatch.part(Part.SEARCH):
                inputs, _ = self._search(index.searcher, queries, batch)
        if self._threads is not None:
            batch = batch_at(step + 1)
            # Dispatched in this thread, so that all processes embed in the same order.
            queries = self._queries(retriever, batch)
            found = self._threads.submit(self._search, index.searcher, queries, batch)
            self._ahead = _Ahead(step + 1, index.manifest.step, found, queries)
        return inputs

    def details(self) -> Mapping[str, Any]:
        """See `StepInputs`; waits for the running search."""
        if self._ahead is None:
            return {}
        _, neighbours = self._wait_for(self._ahead)
        parts = multihost.gather((self._rows, np.asarray(neighbours.ids)))
        rows = np.concatenate([rows for rows, _ in parts])
        ids = np.concatenate([ids for _, ids in parts])
        # Processes that share rows have the same results for them.
        _, first = np.unique(rows, return_index=True)
        ahead = {
            "step": self._ahead.step,
            "index_step": self._ahead.index_step,
            "ids": ids[first].tolist(),
        }
        return {FOUND_AHEAD: ahead}

    def resume(self, details: Mapping[str, Any], batch_at: BatchAt) -> None:
        """See `StepInputs`."""
        ahead = details.get(FOUND_AHEAD)
        if ahead is None or self._threads is None:
            return
        step, ids = ahead["step"], np.array(ahead["ids"], np.int32)[self._rows]
        # Documents are chosen by rank; their scores are not saved.
        neighbours = Neighbours(ids, np.where(ids < 0, -np.inf, 0.0))
        found = self._threads.submit(self._gather, neighbours, batch_at(step))
        self._ahead = _Ahead(step, ahead["index_step"], found)

    def _found_for(self, step: int, index: LoadedIndex) -> PretrainInputs | None:
        """Returns the inputs found for this update, unless the index has changed."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.step != step:
            return None
        if ahead.index_step != index.manifest.step:
            return None
        inputs, _ = self._wait_for(ahead)
        return inputs

    def _wait_for(self, ahead: _Ahead) -> _Found:
        # A search begins when the devices have finished the update before.
        self._stopwatch.wait_for(ahead.queries)
        with self._stopwatch.part(Part.SEARCH):
            return ahead.found.result()

    def _queries(self, retriever: PyTree, batch: PretrainBatch) -> jax.Array:
        return self._embed_queries(retriever, place_batch(self._mesh, batch.query_ids))

    def _search(
        self, searcher: Searcher, queries: jax.Array, batch: PretrainBatch
    ) -> _Found:
        wanted = num_neighbours(self._num_candidates)
        return self._gather(search_local(searcher, queries, wanted, self._mesh), batch)

    def _gather(self, neighbours: Neighbours, batch: PretrainBatch) -> _Found:
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
        return PretrainInputs(batch, candidates), neighbours


def search_local(
    searcher: Searcher,
    queries: Float[jax.Array, "batch projection"],
    k: int,
    mesh: Mesh,
) -> Neighbours:
    """Returns the neighbours of this process's rows of a batch, on the host.

    Args:
      searcher: the index; with "scann" each process searches its own.
      queries: query embeddings, split over the mesh.
      k: number of neighbours.
      mesh: mesh of the queries.
    """
    if isinstance(searcher, DeviceSearcher):
        rows = local_rows(mesh, len(queries))
        found = jax.device_get(searcher.search(queries, k))
        return jax.tree.map(lambda array: array[rows], found)
    return searcher.search(multihost.local_rows(queries), k)
