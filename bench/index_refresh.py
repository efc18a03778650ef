"""Measures the cost of a refresh to the trainer: transfer, swap, and shared machine.

The trainer is `realm pretrain`'s own, in a process on core 0; beside it, on core 1,
runs the index builder, or a process that publishes indexes as fast as they are wanted.
"""

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from bench.index_embed import bert_config, invent_blocks
from bench.index_search import spread
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import write_examples
from realm_jax.index.builder import RETRIEVER_CRC32C, BuilderConfig, IndexBuilder
from realm_jax.index.embed import EmbedConfig, shard_ranges
from realm_jax.index.embedding_cache import HASHES, index_series
from realm_jax.index.manifest import EMBEDDINGS, Manifest
from realm_jax.index.retrievers import PARAMS_CRC32C
from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import Store, open_store
from realm_jax.training import pretrain, refresh
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.types import Lengths

# As in the quickstart.
LENGTHS = Lengths(query=64, document=96, joined=128)
_BATCH, _CANDIDATES, _MASKS, _EXAMPLES = 16, 5, 10, 512
_TASK = "invented"
_TRAINER_CORE, _BUILDER_CORE = 0, 1
# Steps that compile, and first swaps, which compile the measurements of an index.
_WARM_STEPS, _WARM_SWAPS = 5, 1
# Minimum per phase, on a busy machine too: two make a step that is entirely in it.
_FEWEST_STEPS = 4
# Few enough steps between two retrievers to keep the builder busy.
_REFRESH_PERIOD = 10
_PATIENCE_SECONDS = 600.0


def measure_publishing(
    flags: argparse.Namespace, folder: pathlib.Path
) -> dict[str, Any]:
    """Measures the time from an index's commit to its use, and the cost of the swap."""
    num_blocks = flags.publish_blocks
    with Jobs(flags.model, folder / "publish", num_blocks, publish_indexes) as jobs:
        steps, swaps = jobs.steps, []
        while len(swaps) < flags.num_swaps + _WARM_SWAPS:
            event = jobs.next_event()
            if isinstance(event, Mapping):
                swaps.append(event)
    measured = swaps[_WARM_SWAPS:]
    return {
        "blocks": num_blocks,
        "swaps": len(measured),
        "step_seconds": spread(np.diff(steps)[_WARM_STEPS:]),
        **{name: spread([swap[name] for swap in measured]) for name in measured[0]},
        "first_swap": swaps[0],
    }


def measure_sizes(
    flags: argparse.Namespace, folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Measures seconds per step over indexes of several sizes, searched with ScaNN.

    Each run has one index, of random rows, which no tree can partition well. The
    trainer has one core for the steps and the searches beside them.
    """
    measured = []
    for num_blocks in flags.blocks:
        jobs = Jobs(
            flags.model,
            folder / f"size-{num_blocks}",
            num_blocks,
            publish_indexes,
            searcher="scann",
            refresh_period=1_000_000,
        )
        with jobs:
            while len(jobs.steps) < flags.num_steps + _WARM_STEPS:
                jobs.next_event()
        steps = np.diff(jobs.steps)[_WARM_STEPS:]
        measured.append({"blocks": num_blocks, "step_seconds": spread(steps)})
    return measured


def measure_beside_builder(
    flags: argparse.Namespace, folder: pathlib.Path
) -> dict[str, Any]:
    """Compares steps per second while the builder runs with those while it is stopped.

    The builder is stopped and continued by signals, so that both halves of a pair have
    the same processes, seconds apart.
    """
    phases: list[tuple[float, float]] = []
    num_blocks = flags.trained_blocks
    with Jobs(flags.model, folder / "trainer", num_blocks, _build_indexes) as jobs:
        while len(jobs.steps) < _WARM_STEPS:
            jobs.next_event()
        try:
            for number in range(2 * flags.num_pairs):
                running = bool(number % 2)
                jobs.signal(signal.SIGCONT if running else signal.SIGSTOP)
                began, before = time.time(), len(jobs.steps)
                while (
                    time.time() - began < flags.phase_seconds
                    or len(jobs.steps) - before < _FEWEST_STEPS
                ):
                    jobs.next_event()
                phases.append((began, time.time()))
        finally:
            jobs.signal(signal.SIGCONT)
    steps, cpu_seconds = np.array(jobs.steps), np.array(jobs.cpu_seconds)
    rates, medians, costs = [], [], []
    for began, ended in phases:
        within = (began <= steps) & (steps <= ended)
        rates.append(1.0 / np.diff(steps[within]).mean())
        medians.append(np.median(np.diff(steps[within])))
        costs.append(np.median(np.diff(cpu_seconds[within])))
    return {
        "blocks": num_blocks,
        "phase_seconds": flags.phase_seconds,
        "steps_per_second": {
            "alone": spread(rates[::2]),
            "beside": spread(rates[1::2]),
        },
        "rate_ratio": spread(np.divide(rates[1::2], rates[::2])),
        # Ratio of median steps, which a swap in one of many steps does not affect.
        "step_ratio": spread(np.divide(medians[::2], medians[1::2])),
        # Memory is shared whatever the cores do; other work on them is not counted.
        "cpu_ratio": spread(np.divide(costs[::2], costs[1::2])),
    }


class Jobs:
    """A trainer and another job, on one core each; a context manager.

    Attributes:
      steps: time at which each step was done, in Unix seconds.
      cpu_seconds: CPU time of the trainer until then.
    """

    def __init__(
        self,
        model: str,
        folder: pathlib.Path,
        num_blocks: int,
        other: Callable[[pretrain.PretrainConfig, Event], None],
        **changes: Any,
    ):
        """Writes a corpus of this many blocks; `changes` override the configuration.

        `model` is that of both towers and the reader, by its name in `index_embed`.
        """
        corpus = _invent_corpus(folder / "corpus", num_blocks)
        context = multiprocessing.get_context("spawn")
        self._events, self._theirs = context.Pipe(duplex=False)
        self._stop = context.Event()
        config = _config(model, str(folder / "model"), corpus)
        config = dataclasses.replace(config, **changes)
        self._jobs = [
            context.Process(
                target=_train, args=(config, self._theirs, self._stop), daemon=True
            ),
            context.Process(target=other, args=(config, self._stop), daemon=True),
        ]
        self.steps: list[float] = []
        self.cpu_seconds: list[float] = []

    def __enter__(self) -> "Jobs":
        for job in self._jobs:
            job.start()
        # So that the pipe ends when the trainer does.
        self._theirs.close()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        # A full pipe would block the trainer.
        with contextlib.suppress(EOFError):
            while True:
                self._events.recv()
        for job in self._jobs:
            job.join(_PATIENCE_SECONDS)

    def next_event(self) -> tuple[float, float] | Mapping[str, float]:
        """Returns the times of the next step, also storing them, or those of a swap."""
        waited = 0.0
        while not self._events.poll(1.0):
            waited += 1.0
            dead = [job.exitcode for job in self._jobs if job.exitcode is not None]
            if dead or waited > _PATIENCE_SECONDS:
                raise RuntimeError(f"no step for {waited:.0f} s, exit codes {dead}")
        event = self._events.recv()
        if isinstance(event, tuple):
            self.steps.append(event[0])
            self.cpu_seconds.append(event[1])
        return event

    def signal(self, number: int) -> None:
        """Sends a signal to the job beside the trainer, to stop or continue it."""
        pid = self._jobs[1].pid
        assert pid is not None
        os.kill(pid, number)


class _TimedRefresher(refresh.Refresher):
    """Notes for every swap the index's age, and how long training waited."""

    swap: Mapping[str, float] | None = None

    def __init__(self, mode, period, client, **others):
        self._publishing = 0.0
        client.publish = self._timed(client.publish)
        super().__init__(mode, period, client, **others)

    def _timed(self, publish):
        def call(*arguments):
            began = time.perf_counter()
            publish(*arguments)
            self._publishing = time.perf_counter() - began

        return call

    def before_step(self, step, params):
        swaps, self._publishing = self.num_swaps, 0.0
        began = time.perf_counter()
        index = super().before_step(step, params)
        seconds = time.perf_counter() - began
        if self.num_swaps > swaps:
            _TimedRefresher.swap = {
                "commit_to_swap_seconds": time.time() - index.manifest.committed,
                "index_swap_seconds": seconds - self._publishing,
            }
        return index


def _train(config: pretrain.PretrainConfig, events: Connection, stop: Event) -> None:
    """Trains until told to stop; reports the time of each step."""
    os.sched_setaffinity(0, {_TRAINER_CORE})
    pretrain.Refresher = _TimedRefresher

    def report(
        step: int, total: int, values: Mapping[str, float], what: str = ""
    ) -> None:
        if what:
            return
        swap, _TimedRefresher.swap = _TimedRefresher.swap, None
        if swap is not None:
            # Every swap has a line of metrics.
            measure = values["index_measuring_seconds"]
            events.send({**swap, "measure_seconds": measure})
        events.send((time.time(), time.process_time()))

    pretrain.run(config, report, _as_threading(stop))


def _build_indexes(config: pretrain.PretrainConfig, stop: Event) -> None:
    """Runs the index builder."""
    os.sched_setaffinity(0, {_BUILDER_CORE})
    store, corpus = open_store(config.model_dir), BlockStore.open(config.corpus)
    builder = BuilderConfig(embed=config.embed)
    IndexBuilder(store, corpus, builder).run(_as_threading(stop))


def publish_indexes(config: pretrain.PretrainConfig, stop: Event) -> None:
    """Publishes an index of random rows for every retriever, without embedding."""
    os.sched_setaffinity(0, {_BUILDER_CORE})
    store, corpus = open_store(config.model_dir), BlockStore.open(config.corpus)
    retrievers, done = SnapshotSeries(store, RETRIEVER_SERIES), None
    while not stop.wait(0.05):
        step = retrievers.latest_step()
        if step is not None and step != done:
            _publish(store, corpus, retrievers.read_manifest(step), config.embed)
            done = step


def _publish(
    store: Store, corpus: BlockStore, retriever: Manifest, embed: EmbedConfig
) -> None:
    writer = index_series(store, corpus.fingerprint).begin(
        retriever.step,
        corpus_fingerprint=corpus.fingerprint,
        metadata={
            RETRIEVER_CRC32C: retriever.metadata[PARAMS_CRC32C],
            "embed": dataclasses.asdict(embed),
        },
    )
    generator = np.random.default_rng(retriever.step)
    rows = generator.standard_normal((corpus.num_blocks, 128), np.float32)
    for name, array in {EMBEDDINGS: rows, HASHES: corpus.content_hashes}.items():
        writer.create_array(name, array.shape, array.dtype.name, embed.shard_blocks)
        for shard in shard_ranges(corpus.num_blocks, embed.shard_blocks):
            writer.write_rows(name, shard.start, array[shard.start : shard.stop])
    writer.commit()


def _as_threading(stop: Event) -> threading.Event:
    """Returns an event of this process that follows one shared by all processes."""
    mine = threading.Event()

    def follow() -> None:
        stop.wait()
        mine.set()

    threading.Thread(target=follow, daemon=True).start()
    return mine


def _config(model: str, model_dir: str, corpus: str) -> pretrain.PretrainConfig:
    return pretrain.PretrainConfig(
        model_dir=model_dir,
        corpus=corpus,
        task=_TASK,
        train_steps=1_000_000,
        batch_size=_BATCH,
        num_candidates=_CANDIDATES,
        refresh_period=_REFRESH_PERIOD,
        models=ModelFactory(
            functools.partial(bert_config, model), RetrieverConfig, LENGTHS
        ),
        optimizer=OptimizerConfig,
        embed=EmbedConfig(LENGTHS.document),
        checkpoint_period=1_000_000,
        # Writing a line waits for its step, so that the end of each step is observed.
        log_period=1,
    )


def _invent_corpus(folder: pathlib.Path, num_blocks: int) -> str:
    store = invent_blocks(folder, num_blocks, 70, LENGTHS.document)
    generator = np.random.default_rng(0)
    shape = (_EXAMPLES, LENGTHS.query)
    query_ids = generator.integers(10, store.vocabulary.size, shape, np.int32)
    query_ids[:, 1 : 1 + _MASKS] = store.vocabulary.mask
    masks = np.ones((_EXAMPLES, _MASKS), np.int32)
    examples = {
        "query_ids": query_ids,
        "mask_positions": masks * np.arange(1, 1 + _MASKS, dtype=np.int32),
        "mask_ids": query_ids[:, -_MASKS:].copy(),
        "mask_weights": masks.astype(np.float32),
        "source_block": np.full(_EXAMPLES, -1, np.int32),
    }
    place = folder / "examples" / _TASK / "train"
    place.parent.mkdir(parents=True)
    write_examples(place, [examples], {"corpus_fingerprint": store.fingerprint})
    return str(folder)
