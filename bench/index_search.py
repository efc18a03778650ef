"""Measures search time, memory and recall, with one process per searcher.

Separate processes separate the searchers' memory. They are built one after the other;
then each searches once, in turns and never two at a time, so that a machine that is
busy for a while slows all of them down alike.
"""

import argparse
import dataclasses
import gc
import multiprocessing
import pathlib
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bench.index_embeddings import EmbeddingFiles
from realm_jax.index.scann_searcher import share_found, tree_shape

K = 8
DEVICE_SEARCHERS = ("device float32", "device bfloat16", "device int8")
# ScaNN first: the inexact searchers of FAISS are tuned to its recall.
SEARCHERS = (
    "scann",
    "scann untuned",
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
# Codes that are rescored per neighbour, if they are enough.
_RESCORED = 25
_MOST_RESCORED = 400
_MOST_LINKS_FOLLOWED = 4096
_LARGEST_GRAPH = 100_000
# A repetition of a short search consists of many searches.
_SHORTEST_SECONDS = 0.1
_EXACT_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Task:
    """What a process measures a searcher on.

    Attributes:
      exact: the neighbours of the queries.
      exact_of_tuning: those of the queries that ScaNN is tuned on, if there are any.
      recall: the recall that FAISS's indexes are tuned to, on `exact`.
    """

    files: EmbeddingFiles
    exact: Int[np.ndarray, "query k"]
    exact_of_tuning: Int[np.ndarray, "query k"] | None
    recall: float


class _Ours:
    """A searcher of this package, as used by a trainer."""

    def __init__(self, name: str, embeddings: Float[np.ndarray, "block projection"]):
        import jax

        from realm_jax.index.searchers import DeviceConfig, make_searcher

        kind, _, way = name.partition(" ")
        device = DeviceConfig(way) if kind == "device" else DeviceConfig()
        self._searcher: Any = make_searcher(kind, embeddings, device=device)
        arrays = jax.tree.leaves(getattr(self._searcher, "table", ()))
        self.device_mib = sum(array.nbytes for array in arrays) / (1 << 20)
        self._is_tuned = name == "scann"
        self.setting = ""

    def search(self, queries: Float[np.ndarray, "query projection"]) -> np.ndarray:
        """Returns the ids of the `K` best blocks of each query."""
        return np.asarray(self._searcher.search(queries, K).ids)

    def tune(self, task: _Task) -> None:
        """Has ScaNN choose its search, as an index builder does."""
        from realm_jax.index.scann_assets import ScannAssets
        from realm_jax.index.scann_searcher import ScannSearcher

        if not isinstance(self._searcher, ScannSearcher):
            return
        if self._is_tuned and task.exact_of_tuning is not None:
            self._searcher.tune(
                np.load(task.files.tuning),
                task.exact_of_tuning,
                ScannAssets().recall_of_beginnings(),
            )
        visit = self._searcher.visit
        if visit is not None:
            leaves, _ = tree_shape(self._searcher.num_blocks)
            self.setting = (
                f"{visit.leaves} of {leaves} leaves, {visit.reordered} rescored"
            )


class _Faiss:
    """An index of FAISS."""

    device_mib = 0.0

    def __init__(self, name: str, embeddings: Float[np.ndarray, "block projection"]):
        import faiss

        num_blocks, dimension = embeddings.shape
        leaves, count = tree_shape(num_blocks)
        factory = _FACTORIES[name].format(leaves=leaves, half=dimension // 2)
        self._index = faiss.index_factory(
            dimension, factory, faiss.METRIC_INNER_PRODUCT
        )
        if not self._index.is_trained:
            generator = np.random.default_rng(0)
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

    def tune(self, task: _Task) -> None:
        """Finds the smallest sufficient setting by bisection."""
        if self._knob is None:
            return
        queries, exact, recall = np.load(task.files.queries), task.exact, task.recall
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


def exact_neighbours(
    embeddings: Float[np.ndarray, "block projection"],
    queries: Float[np.ndarray, "query projection"],
) -> Int[np.ndarray, "query k"]:
    """Returns the ids of the `K` best blocks, computed with NumPy only."""
    scores = np.full((len(queries), K), -np.inf, np.float32)
    ids = np.full((len(queries), K), -1)
    for start in range(0, len(embeddings), _EXACT_CHUNK):
        new = queries @ np.asarray(embeddings[start : start + _EXACT_CHUNK]).T
        # After some chunks few queries find a better block, and sorting takes longest.
        rows = np.flatnonzero(new.max(axis=1) > scores.min(axis=1))
        numbers = np.broadcast_to(start + np.arange(new.shape[1]), new[rows].shape)
        joined = np.hstack([scores[rows], new[rows]])
        numbers = np.hstack([ids[rows], numbers])
        best = np.argpartition(-joined, K - 1, axis=1)[:, :K]
        scores[rows] = np.take_along_axis(joined, best, axis=1)
        ids[rows] = np.take_along_axis(numbers, best, axis=1)
    return ids


def measure_searchers(
    files: EmbeddingFiles, flags: argparse.Namespace, *, in_turns: bool
) -> dict[str, Any]:
    """Builds every searcher on these embeddings, and measures its recall and speed.

    With `in_turns` all searchers are in memory at once, and take turns. `flags` has
    `searchers`, of `SEARCHERS`; `batches`, numbers of queries searched at once, at most
    those that exist; and `repetitions`.
    """
    embeddings = np.load(files.blocks, mmap_mode="r")
    exact = exact_neighbours(embeddings, np.load(files.queries))
    tuning = None
    if files.tuning:
        tuning = exact_neighbours(embeddings, np.load(files.tuning))
    rows: dict[str, dict[str, Any]] = {}
    target = 0.0
    processes = []
    for name in flags.searchers:
        if _is_pointless(name, len(embeddings), target):
            continue
        process = _Process(name, _Task(files, exact, tuning, target))
        rows[name] = process.built
        if name == "scann":
            target = process.built.get("recall_at_8", 0.0)
        processes.append(process)
        if not in_turns:
            _time_in_turns(processes, rows, flags)
            processes = []
    _time_in_turns(processes, rows, flags)
    return {
        "source": files.source,
        "num_blocks": len(embeddings),
        "num_queries": len(exact),
        "in_turns": in_turns,
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
    processes: Sequence["_Process"],
    rows: dict[str, dict[str, Any]],
    flags: argparse.Namespace,
) -> None:
    alive = [process for process in processes if "failed" not in process.built]
    seconds = {p.name: {batch: [] for batch in flags.batches} for p in alive}
    for turn in range(flags.repetitions):
        for process in alive if turn % 2 else reversed(alive):
            for batch in flags.batches:
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

    def __init__(self, name: str, task: _Task):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, task)
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


def _serve(connection: Connection, name: str, task: _Task) -> None:
    """Builds a searcher, reports its figures, and searches on request."""
    embeddings = np.load(task.files.blocks, mmap_mode="r")
    queries = np.load(task.files.queries)
    make = _Faiss if name.startswith("faiss") else _Ours
    # Exclude libraries and what they set up once from the searcher's memory.
    few = np.random.default_rng(0).standard_normal((64, queries.shape[1]), np.float32)
    make("faiss flat" if make is _Faiss else name, few).search(few)
    before = _anonymous_mib()
    began = time.perf_counter()
    searcher = make(name, embeddings)
    build_seconds = time.perf_counter() - began
    began = time.perf_counter()
    searcher.tune(task)
    tuning_seconds = time.perf_counter() - began
    found = searcher.search(queries)
    # JAX releases arrays that it has copied to a device only here.
    gc.collect()
    connection.send(
        {
            "recall_at_8": share_found(found, task.exact),
            "build_seconds": build_seconds,
            "tuning_seconds": tuning_seconds,
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
