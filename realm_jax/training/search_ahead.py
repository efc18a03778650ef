"""Searches outside of the step, and makes its inputs of what was found.

While the devices run an update, a thread makes the inputs of the next one. The search
for update n + 1 begins before update n does and embeds its queries with the parameters
of that moment, which are one update old when the results are used. These are saved in
checkpoints, so that a resumed run goes on with the same ones.
"""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import DeviceSearcher, Searcher
from realm_jax.index.source import LoadedIndex
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.placement import local_rows, place_batch
from realm_jax.training.step_timing import Part, Stopwatch
from realm_jax.types import Array, Neighbours

FOUND_AHEAD = "found_ahead"
"""In a checkpoint's details: the search results for the update after it."""

BatchT = TypeVar("BatchT")
InputsT = TypeVar("InputsT")


@dataclasses.dataclass(frozen=True)
class _Ahead(Generic[InputsT]):
    """A search for the update after `step` updates, which waits for `queries`."""

    step: int
    index_step: int
    found: Future[tuple[InputsT, Neighbours]]
    queries: jax.Array | None = None


class SearchAhead(Generic[BatchT, InputsT]):
    """Makes the inputs of updates by a search, one update ahead if it may.

    `gather` makes the inputs of a batch and its neighbours, on the host; searching
    `ahead`, in a thread, one call at a time.
    """

    def __init__(
        self,
        retriever: RetrieverConfig,
        query_ids: Callable[[BatchT], Int[Array, "batch query"]],
        gather: Callable[[BatchT, Neighbours], InputsT],
        *,
        num_neighbours: int,
        mesh: Mesh,
        batch_size: int,
        ahead: bool,
        stopwatch: Stopwatch,
    ):
        self._embed_queries = query_embedder(retriever, mesh)
        self._query_ids = query_ids
        self._gather = gather
        self._num_neighbours = num_neighbours
        self._mesh = mesh
        self._rows = local_rows(mesh, batch_size)
        self._stopwatch = stopwatch
        self._threads = ThreadPoolExecutor(1, "search") if ahead else None
        self._ahead: _Ahead[InputsT] | None = None

    def __call__(
        self,
        step: int,
        retriever: PyTree,
        index: LoadedIndex,
        batch_at: Callable[[int], BatchT],
    ) -> InputsT:
        """Returns the next update's inputs, and begins those of the one after it."""
        inputs = self._found_for(step, index)
        if inputs is None:
            batch = batch_at(step)
            queries = self._queries(retriever, batch)
            self._stopwatch.wait_for(queries)
            with self._stopwatch.part(Part.SEARCH):
                search = self._start(index.searcher, queries)
                inputs, _ = self._finish(search, batch)
        if self._threads is not None:
            batch = batch_at(step + 1)
            # Dispatched in this thread, so that all processes embed, and search on
            # their devices, in the same order.
            queries = self._queries(retriever, batch)
            search = self._start(index.searcher, queries)
            found = self._threads.submit(self._finish, search, batch)
            self._ahead = _Ahead(step + 1, index.manifest.step, found, queries)
        return inputs

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold; waits for the running search."""
        if self._ahead is None:
            return {}
        _, neighbours = self._wait_for(self._ahead)
        own = self._rows.tolist(), np.asarray(neighbours.ids).tolist()
        parts = multihost.gather(own)
        rows = np.concatenate([rows for rows, _ in parts])
        ids = np.concatenate([np.array(ids, np.int32) for _, ids in parts])
        # Processes that share rows have the same results for them.
        _, first = np.unique(rows, return_index=True)
        ahead = {
            "step": self._ahead.step,
            "index_step": self._ahead.index_step,
            "ids": ids[first].tolist(),
        }
        return {FOUND_AHEAD: ahead}

    def resume(
        self, details: Mapping[str, Any], batch_at: Callable[[int], BatchT]
    ) -> None:
        """Continues with what `details` returned, as far as the settings allow it."""
        ahead = details.get(FOUND_AHEAD)
        if ahead is None or self._threads is None:
            return
        step, ids = ahead["step"], np.array(ahead["ids"], np.int32)[self._rows]
        if ids.shape[1] != self._num_neighbours:
            return  # Another number is asked for now.
        # Blocks are chosen by rank; their scores are not saved.
        neighbours = Neighbours(ids, np.where(ids < 0, -np.inf, 0.0))
        found = self._threads.submit(self._finish, lambda: neighbours, batch_at(step))
        self._ahead = _Ahead(step, ahead["index_step"], found)

    def _found_for(self, step: int, index: LoadedIndex) -> InputsT | None:
        """Returns the inputs found for this update, unless the index has changed."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.step != step:
            return None
        if ahead.index_step != index.manifest.step:
            return None
        inputs, _ = self._wait_for(ahead)
        return inputs

    def _wait_for(self, ahead: _Ahead[InputsT]) -> tuple[InputsT, Neighbours]:
        # A search begins when the devices have finished the update before.
        self._stopwatch.wait_for(ahead.queries)
        with self._stopwatch.part(Part.SEARCH):
            return ahead.found.result()

    def _queries(self, retriever: PyTree, batch: BatchT) -> jax.Array:
        ids = place_batch(self._mesh, self._query_ids(batch))
        return self._embed_queries(retriever, ids)

    def _start(
        self, searcher: Searcher, queries: jax.Array
    ) -> Callable[[], Neighbours]:
        return start_search(searcher, queries, self._num_neighbours, self._mesh)

    def _finish(
        self, search: Callable[[], Neighbours], batch: BatchT
    ) -> tuple[InputsT, Neighbours]:
        neighbours = search()
        return self._gather(batch, neighbours), neighbours


def start_search(
    searcher: Searcher,
    queries: Float[jax.Array, "batch projection"],
    k: int,
    mesh: Mesh,
) -> Callable[[], Neighbours]:
    """Returns a function that waits for neighbours of this process's rows, on the host.

    What the devices search is dispatched before it returns; what the host searches is
    searched when the function is called, in any thread.
    """
    if isinstance(searcher, DeviceSearcher):
        found, rows = searcher.search(queries, k), local_rows(mesh, len(queries))
        return lambda: jax.tree.map(lambda array: array[rows], jax.device_get(found))
    return lambda: searcher.search(multihost.local_rows(queries), k)
