"""What surrounds the updates of every stage: stops, metrics, checkpoints, profiles.

Each stage has its own loop, such as `_Pretraining.train` in `pretrain.py`; what it does
not say itself is here. The order within a turn of a loop must not change: the inputs of
an update come from the state before it, and metrics are written before the checkpoint,
so that a checkpoint never has a step whose metrics are missing.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from realm_jax import multihost, placement
from realm_jax.errors import StoppedError
from realm_jax.metrics import means as means_lib
from realm_jax.metrics.means import Means
from realm_jax.metrics.metrics_file import MetricsFile
from realm_jax.training.profiling import Profiler
from realm_jax.training.stage import CheckpointDetails, Report, Stage
from realm_jax.training.step import Loss
from realm_jax.training.step_timing import MAX_IN_FLIGHT, Accounting, Part
from realm_jax.training.tensorboard import EventFile
from realm_jax.training.watchdog import Watchdog


@contextlib.contextmanager
def train_loop(
    stage: Stage[Any],
    loss: Loss,
    stop: threading.Event,
    details: CheckpointDetails = dict,
) -> Iterator["Loop"]:
    """Surrounds the loop of a stage; the last state is saved after it.

        with train_loop(stage, loss, stop, details) as loop:
            for done in loop:
                loop.update(...)  # the inputs of the update after `done`
                loop.log()
                loop.save_if_due()

    `details` are what checkpoints hold beyond the details of every stage. Within, a
    `StoppedError` ends training as `stop` does: embedding, or waiting for an index, may
    take longer than all of training. An update that was not finite is in no checkpoint.
    """
    stage.begin()
    with (
        jax.set_mesh(stage.mesh),
        _profiler(stage) as profiler,
        _watchdog(stage) as dog,
    ):
        loop = Loop(stage, loss, stop, details, profiler, dog)
        with contextlib.suppress(StoppedError):
            yield loop
    loop.save_last()


class Loop:
    """The turns of a loop; see `train_loop`."""

    def __init__(
        self,
        stage: Stage[Any],
        loss: Loss,
        stop: threading.Event,
        details: CheckpointDetails,
        profiler: Profiler | None,
        watchdog: Watchdog | None,
    ):
        config = stage.config
        self._stage = stage
        self._step = stage.make_step(loss)
        self._stop = multihost.StopRequest(stop)
        self._details = details
        self._profiler = profiler
        self._watchdog = watchdog
        self._first = stage.step
        # The first call compiles, on the host.
        self._handing_over = Part.HOST
        devices = list(stage.mesh.devices.flat)
        self._accounting = Accounting(
            stage.stopwatch, loss, config.examples_per_update, devices
        )
        of_run = (config.model_dir, config.stage.name, stage.step)
        self._metrics = MetricsLog(
            [MetricsFile(*of_run), EventFile(*of_run)] if multihost.is_first() else [],
            stage.report,
            self._accounting,
            every=config.log_period,
            total_steps=config.train_steps,
        )

    def __iter__(self) -> Iterator[int]:
        """Yields the number of updates done, until the last or a stop."""
        stage = self._stage
        for done in range(stage.step, stage.config.train_steps):
            if self._stop.is_set():
                return
            with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
                yield done
            if self._profiler is not None:
                self._profiler(stage.step, stage.state)
            if self._watchdog is not None:
                self._watchdog(stage.step)

    def update(self, inputs: Any) -> None:
        """Hands an update over to the devices, with inputs as made of `Stage.batch`."""
        stage = self._stage
        inputs = placement.place_batch(stage.mesh, inputs)
        self._accounting.see(stage.state, inputs)
        with stage.stopwatch.part(self._handing_over):
            # The step donates the state that it is given.
            stage.state, metrics = self._step(stage.state, inputs)
        self._handing_over = Part.DEVICE
        stage.step += 1
        stage.finite.note(stage.step, metrics)
        self._metrics.add(metrics)

    def log(
        self, values: Callable[[], Mapping[str, float]] = dict, now: bool = False
    ) -> None:
        """Writes a line of metrics if one is due, or `now`; else shows the progress.

        `values` returns further values of the line, such as the age of the index. An
        update since the last line that was not finite has its line, and ends training.
        """
        stage, step = self._stage, self._stage.step
        if not now and not self._metrics.is_due(step):
            self._metrics.show_progress(step)
            return
        stage.stopwatch.wait_for(stage.state)
        stage.require_alone()
        rate = float(np.asarray(stage.learning_rate(step - 1)))
        self._metrics.write(step, {"learning_rate": rate, **values()})
        stage.finite.require_updates()

    def save_if_due(self) -> None:
        """Saves a checkpoint every so many updates."""
        if self._stage.step % self._stage.config.checkpoint_period == 0:
            self._stage.save(self._details)

    def save_last(self) -> None:
        """Saves the state if updates were done since the last checkpoint."""
        step = self._stage.step
        if step > self._first and step % self._stage.config.checkpoint_period:
            self._stage.save(self._details)


class MetricsLog:
    """Accumulates metrics, and writes them every so many steps, and at the last.

    Shows how many updates are finished: the devices may still be at the last two. No
    process but the first has files.
    """

    def __init__(
        self,
        files: Sequence[MetricsFile | EventFile],
        report: Report,
        accounting: Accounting,
        *,
        every: int,
        total_steps: int,
    ):
        self._files = files
        self._report = report
        self._accounting = accounting
        self._every = every
        self._total_steps = total_steps
        self._kept: list[Means] = []

    def is_due(self, step: int) -> bool:
        """Returns whether a line is written after this many updates."""
        return step % self._every == 0 or step == self._total_steps

    def add(self, metrics: Means) -> None:
        """Keeps the metrics of an update; merging them now would wait for it."""
        self._kept.append(metrics)

    def show_progress(self, step: int) -> None:
        """Waits until at most `MAX_IN_FLIGHT` updates are unfinished, and shows it."""
        self._accounting.stopwatch.wait_for(self._kept[:-MAX_IN_FLIGHT][-1:])
        self._report(step - self._in_flight(), self._total_steps, {})

    def write(self, step: int, extra: Mapping[str, float]) -> None:
        """Writes the means since the last line, and further values."""
        self._accounting.stopwatch.wait_for(self._kept)
        kept = jax.device_get(self._kept)
        values = means_lib.compute(functools.reduce(means_lib.merge, kept))
        values |= self._accounting.line(len(kept))
        values |= extra
        for file in self._files:
            file.write(step, values)
        self._report(step, self._total_steps, values)
        self._kept = []

    def _in_flight(self) -> int:
        """Returns the number of updates that the devices have not finished."""
        return sum(
            not all(
                value.is_ready()
                for value in jax.tree.leaves(kept)
                if isinstance(value, jax.Array)
            )
            for kept in self._kept[-MAX_IN_FLIGHT:]
        )


def _profiler(
    stage: Stage[Any],
) -> contextlib.AbstractContextManager[Profiler | None]:
    config = stage.config
    if not config.profile or stage.is_done:
        return contextlib.nullcontext()
    steps = stage.step, config.train_steps
    return Profiler(stage.model_store, config.stage.name, *steps, stage.stopwatch)


def _watchdog(
    stage: Stage[Any],
) -> contextlib.AbstractContextManager[Watchdog | None]:
    shortest = stage.config.stall_seconds
    if shortest is None or stage.is_done:
        return contextlib.nullcontext()
    return Watchdog(stage.model_store, stage.stopwatch, stage.step, shortest)
