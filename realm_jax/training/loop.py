"""The training loop: what is done between two updates, and in which order."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from realm_jax.errors import StoppedError
from realm_jax.metrics import means as means_lib
from realm_jax.metrics.means import Means
from realm_jax.metrics.metrics_file import MetricsFile
from realm_jax.training.state import TrainState
from realm_jax.training.step import Step
from realm_jax.training.step_timing import Accounting, Part, Stopwatch
from realm_jax.training.tensorboard import EventFile

Report = Callable[[int, int, Mapping[str, float]], None]
"""Called with (steps done, total steps, metrics), to show progress."""


ReplaceState = Callable[[int, TrainState], TrainState]
"""Called with (steps done, state); returns the state to continue with."""


class Stop(Protocol):
    """Tells whether to end between two updates, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Returns whether to end; the same in all processes of a job."""
        ...


class Hook(Protocol):
    """Called after an update; never changes the state."""

    def __call__(self, step: int, state: TrainState, metrics: Means) -> None:
        """Receives the state after `step` updates."""
        ...


def train(
    state: TrainState,
    step: Step,
    inputs_at: Callable[[int, TrainState], Any],
    *,
    total_steps: int,
    hooks: Sequence[Hook],
    stop: Stop,
    stopwatch: Stopwatch,
    replace_state: ReplaceState = lambda step, state: state,
) -> TrainState:
    """Runs updates until `total_steps` or until asked to stop.

    The order must not change. The inputs of step n come from the state after n updates
    (a search needs the newest query tower, and an index is swapped before it is
    searched). Hooks run in the order given, after the update: metrics first, then the
    checkpoint, so that a checkpoint never has a step whose metrics are missing.

    Args:
      state: initial state; its step is the number of updates done.
      step: the jitted update, which donates the state it is given.
      inputs_at: (updates done, state) -> inputs of the next update; may raise
        `StoppedError`, which ends training as `stop` does.
      total_steps: total number of updates.
      hooks: called after every update.
      stop: set when the process is asked to stop; checked between two steps.
      stopwatch: records the time in which a step is dispatched to the devices.
      replace_state: replaces state other than parameters, such as an index, before the
        inputs of an update are made; may raise `StoppedError` too.

    Returns:
      The state after the last update.
    """
    # The first call compiles, on the host.
    handing_over = Part.HOST
    for done in range(int(state.step), total_steps):
        if stop.is_set():
            break
        with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
            try:
                state = replace_state(done, state)
                inputs = inputs_at(done, state)
            except StoppedError:
                # Embedding may take longer than all of training; end here, so that
                # the state is saved.
                break
            with stopwatch.part(handing_over):
                state, metrics = step(state, inputs)
        handing_over = Part.DEVICE
        for hook in hooks:
            hook(done + 1, state, metrics)
    return state


MAX_IN_FLIGHT = 2
"""Updates that are handed over and not finished; more would keep no device any busier,
and hide from whoever watches how far training is."""


class LogMetrics:
    """Accumulates metrics and writes them every `every` steps.

    Shows how many updates are finished: the devices may still be at the last two.

    Args:
      files: files to write to; none in any process but the first.
      report: shows progress.
      accounting: accounts for the time since the last line.
      every: steps between two lines; one is also written at the last step.
      total_steps: total number of updates.
      extra: further values at the time of writing, such as the age of the index.
      due: whether a line is due now, whatever the step.
      before_writing: called in all processes before a line is written; raises an error
        if this job must not write any more.
    """

    def __init__(
        self,
        files: Sequence[MetricsFile | EventFile],
        report: Report,
        accounting: Accounting,
        *,
        every: int,
        total_steps: int,
        extra: Callable[[int], Mapping[str, float]] = lambda step: {},
        due: Callable[[], bool] = lambda: False,
        before_writing: Callable[[], None] = lambda: None,
    ):
        self._files = files
        self._report = report
        self._accounting = accounting
        self._every = every
        self._total_steps = total_steps
        self._extra = extra
        self._due = due
        self._before_writing = before_writing
        self._kept: list[Means] = []

    def __call__(self, step: int, state: TrainState, metrics: Means) -> None:
        """See `Hook`."""
        # Merged when they are written: merging now would wait for the step.
        self._kept.append(metrics)
        on_time = step % self._every == 0 or step == self._total_steps
        if not on_time and not self._due():
            before = self._kept[:-MAX_IN_FLIGHT]
            self._accounting.stopwatch.wait_for(before[-1:])
            self._report(step - self._in_flight(), self._total_steps, {})
            return
        self._accounting.stopwatch.wait_for(self._kept)
        kept = jax.device_get(self._kept)
        values = means_lib.compute(functools.reduce(means_lib.merge, kept))
        values |= self._accounting.line(len(kept))
        values |= self._extra(step)
        self._before_writing()
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


def every(period: int, hook: Callable[[int, TrainState], None]) -> Hook:
    """Returns a hook that calls (steps done, state) every `period` steps."""

    def call(step: int, state: TrainState, metrics: Means) -> None:
        if step % period == 0:
            hook(step, state)

    return call
