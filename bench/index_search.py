"""Measures search time, memory and recall, with one process per searcher.

Separate processes separate the searchers' memory. They are built one after the other;
then each searches once, in turns and never two at a time, so that a machine that is
busy for a while slows all of them down alike.
"""

import dataclasses
import gc
import math
import multiprocessing
import pathlib
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from bench.index_embeddings import EmbeddingFiles

K = 8
DEVICE_SEARCHERS = ("device float32", "device bfloat16", "device int8")
# ScaNN first: the inexact searchers of FAISS are tuned to its recall.
SEARCHERS = (
    "scann",
    *DEVICE_SEARCHERS,
    "faiss flat",
    "faiss ivf",
    "faiss ivf-pq",
    "faiss hnsw",
)

# FAISS's flat index, its tree (with rows, or with codes that are rescored as in ScaNN),
# and its graph. {leaves} is the number of leaves in ScaNN's tree.
_FACTORIES = {
    "faiss flat": "Flat",
    "faiss ivf": "IVF{leaves},Flat",
    "faiss ivf-pq": "IVF{leaves},PQ{half}x4fs,RFlat",
    "faiss hnsw": "HNSW32",
}
_TRAINED_ON = 250_000
# Codes that are rescored per neighbour; ScaNN rescores 200 for the 8 best.
_RESCORED = 25
_MOST_RESCORED = 400
_MOST_LINKS_FOLLOWED = 4096
_LARGEST_GRAPH = 100_000
# A repetition of a short search consists of many searches.
_SHORTEST_SECONDS = 0.1
_EXACT_CHUNK = 1 << 16


class Measured(Protocol):
    """Interface of a searcher that is measured."""

    setting: str
    device_mib: float

    def search(self, queries: Float[np.ndarray, "query projection"]) -> np.ndarray:
        """Returns the ids of the `K` best blocks of each query."""
        ...

    def tune(self, queries: np.ndarray, exact: np.ndarray, recall: float) -> None:
        """Sets the cheapest search with this recall, if the searcher can be tuned."""
        ...


class _Ours:
    """A searcher of this package, as used by a trainer."""

    def __init__(self, name: str, embeddings: Float[np.ndarray, "block projection"]):
        import jax

        from realm_jax.index.searchers import DeviceConfig, make_searcher

        kind, _, precision = name.partition(" ")
        device = DeviceConfig(precision or "float32")
        self._searcher: Any = make_searcher(kind, embeddings, device=device)
        arrays = jax.tree.leaves(getattr(self._searcher, "table", ()))
        self.device_mib = sum(array.nbytes for array in arrays) / (1 << 20)
        self.setting = ""

    def search(self, queries: Float[np.ndarray, "query projection"]) -> np.ndarray:
        return np.asarray(self._searcher.search(queries, K).ids)

    def tune(self, queries: np.ndarray, exact: np.ndarray, recall: float) -> None:
        """Does nothing: the searcher is measured as configured."""


class _Faiss:
    """An index of FAISS."""

    device_mib = 0.0

    def __init__(self, name: str, embeddings: Float[np.ndarray, "block projection"]):
        import faiss

        num_blocks, dimension = embeddings.shape
        leaves = max(1, math.isqrt(num_blocks))
        factory = _FACTORIES[name].format(leaves=leaves, half=dimension // 2)
        self._index = faiss.index_factory(
            dimension, factory, faiss.METRIC_INNER_PRODUCT
        )
        if not self._index.is_trained:
            generator = np.random.default_rng(0)
            count = min(_TRAINED_ON, num_blocks)
            sample = np.sort(generator.choice(num_blocks, count, replace=False))
            self._index.train(np.ascontiguousarray(embeddings[sample]))
        for start in range(0, num_blocks, _EXACT_CHUNK):
            rows = embeddings[start : start + _EXACT_CHUNK]
            self._index.add(np.ascontiguousarray(rows))
        self._knob, self._most = None, 1
        if "IVF" in factory:
            self._tuned = faiss.extract_index_ivf(self._index)
            self._knob, self._most = "nprobe", leaves
        elif "HNSW" in factory:
            self._tuned = self._index.hnsw
            self._knob, self._most = "efSearch", _MOST_LINKS_FOLLOWED
        self._rescores = "RFlat" in factory
        if self._rescores:
            self._index.k_factor = _RESCORED
        self.setting = factory

    def search(self, queries: Float[np.ndarray, "query projection"]) -> np.ndarray:
        return self._index.search(np.ascontiguousarray(queries), K)[1]

    def tune(self, queries: np.ndarray, exact: np.ndarray, recall: float) -> None:
        """Finds the smallest sufficient setting by bisection."""
        if self._knob is None:
            return
        setattr(self._tuned, self._knob, self._most)
        # If all leaves are not enough, it is the codes that lose rows.
        while (
            self._rescores
            and self._index.k_factor < _MOST_RESCORED
            and share_found(self.search(queries), exact) < recall
        ):
            self._index.k_factor *= 2
        too_few, enough = 0, self._most
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            setattr(self._tuned, self._knob, middle)
            if share_found(self.search(queries), exact) >= recall:
                enough = middle
            else:
                too_few = middle
        setattr(self._tuned, self._knob, enough)
        self.setting += f", {self._knob} {enough}"
        if self._rescores:
            self.setting += f", k_factor {self._index.k_factor:g}"


def share_found(found: Int[np.ndarray, "q k"], exact: Int[np.ndarray, "q k"]) -> float:
    """Returns recall@k against exact search."""
    pairs = zip(found, exact, strict=True)
    return float(np.mean([np.isin(wanted, row).mean() for row, wanted in pairs]))


def exact_neighbours(
    embeddings: Float[np.ndarray, "block projection"],
    queries: Float[np.ndarray, "query projection"],
) -> Int[np.ndarray, "query k"]:
    """Returns the ids of the `K` best blocks, computed with NumPy only."""
    scores = np.full((len(queries), 0), -np.inf, np.float32)
    ids = np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(embeddings), _EXACT_CHUNK):
        new = queries @ np.asarray(embeddings[start : start + _EXACT_CHUNK]).T
        numbers = np.broadcast_to(start + np.arange(new.shape[1]), new.shape)
        scores, ids = np.hstack([scores, new]), np.hstack([ids, numbers])
        best = np.argpartition(-scores, min(K, scores.shape[1]) - 1, axis=1)[:, :K]
        scores = np.take_along_axis(scores, best, axis=1)
        ids = np.take_along_axis(ids, best, axis=1)
    return ids


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """The searchers that are measured, and how often.

    Attributes:
      searchers: names from `SEARCHERS`.
      batches: numbers of queries searched at once; at most those that exist.
      repetitions: repetitions for each searcher and batch.
      in_turns: whether all searchers are in memory at once, to be measured in turns.
    """

    searchers: Sequence[str] = SEARCHERS
    batches: Sequence[int] = (64, 512)
    repetitions: int = 5
    in_turns: bool = True


def measure_searchers(files: EmbeddingFiles, plan: SearchPlan) -> dict[str, Any]:
    """Builds every searcher on these embeddings, and measures its recall and speed."""
    embeddings = np.load(files.blocks, mmap_mode="r")
    exact = exact_neighbours(embeddings, np.load(files.queries))
    rows: dict[str, dict[str, Any]] = {}
    target = 0.0
    processes = []
    for name in plan.searchers:
        if _is_pointless(name, len(embeddings), target):
            continue
        process = _Process(name, files, exact, target)
        rows[name] = process.built
        if name == "scann":
            target = process.built.get("recall_at_8", 0.0)
        processes.append(process)
        if not plan.in_turns:
            _time_in_turns(processes, rows, plan)
            processes = []
    _time_in_turns(processes, rows, plan)
    return {
        "source": files.source,
        "num_blocks": len(embeddings),
        "num_queries": len(exact),
        "in_turns": plan.in_turns,
        "searchers": rows,
    }


def _is_pointless(name: str, num_blocks: int, recall_of_scann: float) -> bool:
    """Returns whether to skip a searcher.

    A graph takes long to build; if ScaNN scores every row, there is nothing to trade.
    """
    inexact = name.startswith("faiss") and name != "faiss flat"
    too_large = name == "faiss hnsw" and num_blocks > _LARGEST_GRAPH
    return inexact and (too_large or recall_of_scann == 1.0)


def _time_in_turns(
    processes: Sequence["_Process"], rows: dict[str, dict[str, Any]], plan: SearchPlan
) -> None:
    alive = [process for process in processes if "failed" not in process.built]
    seconds = {p.name: {batch: [] for batch in plan.batches} for p in alive}
    for turn in range(plan.repetitions):
        for process in alive if turn % 2 else reversed(alive):
            for batch in plan.batches:
                seconds[process.name][batch].append(process.time(batch))
    for process in processes:
        process.stop()
        rows[process.name]["seconds"] = {
            str(batch): spread(values)
            for batch, values in seconds.get(process.name, {}).items()
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum."""
    return {
        "median": float(np.median(values)),
        "least": float(np.min(values)),
        "most": float(np.max(values)),
    }


class _Process:
    """A searcher in a separate process."""

    def __init__(
        self, name: str, files: EmbeddingFiles, exact: np.ndarray, target: float
    ):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, files, exact, target)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.built: dict[str, Any] = self._receive()

    def time(self, batch: int) -> float:
        """Returns the seconds of one search."""
        self._connection.send(batch)
        return self._receive()["seconds"]

    def stop(self) -> None:
        self._connection.close()
        self._process.join()

    def _receive(self) -> dict[str, Any]:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return {"failed": f"ended with {self._process.exitcode}"}


def _serve(
    connection: Connection,
    name: str,
    files: EmbeddingFiles,
    exact: np.ndarray,
    target: float,
) -> None:
    """Builds a searcher, reports its figures, and searches on request."""
    embeddings = np.load(files.blocks, mmap_mode="r")
    queries = np.load(files.queries)
    make = _Faiss if name.startswith("faiss") else _Ours
    # Exclude libraries and what they set up once from the searcher's memory.
    few = np.random.default_rng(0).standard_normal((64, queries.shape[1]), np.float32)
    make("faiss flat" if make is _Faiss else name, few).search(few)
    before = _anonymous_mib()
    began = time.perf_counter()
    searcher: Measured = make(name, embeddings)
    build_seconds = time.perf_counter() - began
    searcher.tune(queries, exact, target)
    found = searcher.search(queries)
    # JAX releases arrays that it has copied to a device only here.
    gc.collect()
    connection.send(
        {
            "recall_at_8": share_found(found, exact),
            "build_seconds": build_seconds,
            "memory_mib": _anonymous_mib() - before,
            "device_mib": searcher.device_mib,
            "setting": searcher.setting,
        }
    )
    while True:
        try:
            batch = queries[: connection.recv()]
        except EOFError:
            return
        searcher.search(batch)  # Compiles, and warms up threads and caches.
        times, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < _SHORTEST_SECONDS or not times:
            searcher.search(batch)
            times += 1
        connection.send({"seconds": elapsed / times})


def _anonymous_mib() -> float:
    """Returns this process's memory in MiB, without the mapped file of embeddings."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("expected RssAnon in /proc/self/status, found none")
