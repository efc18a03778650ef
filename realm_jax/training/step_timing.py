"""Measures how the time of training is spent, and how much work is done in it.

Times are wall times of the training thread, whatever it does or waits for. Steps are
dispatched ahead and the devices compute meanwhile, so host work that overlaps with them
counts as the host's, and `DEVICE` is the time in which the thread only waits for the
devices. A value near zero shows that the host, or a search, delays the devices.
"""

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from realm_jax import hardware
from realm_jax.training.state import TrainState
from realm_jax.training.step import Loss

MAX_IN_FLIGHT = 2
"""Updates that are handed over and not finished; more would keep no device any busier,
and hide from whoever watches how far training is."""

_TERA = 1e12


class Part(enum.Enum):
    """Activity of the training thread.

    Attributes:
      SEARCH: a search outside of the step, and gathering its results. A search within
        the step is the device's.
      DEVICE: dispatching a step to the devices and waiting for their results.
      HOST: batches, placing them, metrics, compiling the step, everything else.
      CHECKPOINT: the part of saving for which training waits.
      SWAP: publishing a retriever, embedding in the trainer, waiting for an index,
        taking it, and measuring on held-out examples.
    """

    SEARCH = "search"
    DEVICE = "device"
    HOST = "host"
    CHECKPOINT = "checkpoint"
    SWAP = "swap"


class Stopwatch:
    """Attributes all time to the innermost active part; at first that is `HOST`.

    It belongs to one thread; the work of other threads is not measured.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._part = Part.HOST
        self._since = now()
        self._seconds = dict.fromkeys(Part, 0.0)

    @property
    def active(self) -> Part:
        """The innermost part that is under way; any thread may ask."""
        return self._part

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Attributes the time within to `part`, and marks it in a profile."""
        outer = self._switch(part)
        try:
            with jax.profiler.TraceAnnotation(part.value):
                yield
        finally:
            self._switch(outer)

    def wait_for(self, arrays: PyTree) -> None:
        """Waits for the devices, as `DEVICE`.

        For places that would wait anyway, so that the next part is not charged with it.
        """
        with self.part(Part.DEVICE):
            jax.block_until_ready(arrays)

    def take(self) -> dict[Part, float]:
        """Returns the seconds of each part since the last call, all wall time."""
        self._switch(self._part)
        seconds, self._seconds = self._seconds, dict.fromkeys(Part, 0.0)
        return seconds

    def _switch(self, part: Part) -> Part:
        now = self._now()
        self._seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before


class Accounting:
    """Computes speed, utilisation and the time split for each line of metrics."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        loss: Loss,
        batch_size: int,
        devices: Sequence[Any],
    ):
        self.stopwatch = stopwatch
        self._loss = loss
        self._batch_size = batch_size
        chip = hardware.find_chip(devices[0].device_kind)
        self._peak_flops = None if chip is None else len(devices) * chip.peak_flops
        self._shapes: PyTree = None
        stopwatch.take()

    def see(self, state: TrainState, inputs: Any) -> None:
        """Records the shapes of an update, which are the same for every update."""
        if self._shapes is not None:
            return
        # No loss reads the optimizer's moments.
        state = state.replace(optimizer_state=None)
        self._shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),
            (state, inputs),
        )

    def line(self, updates: int) -> dict[str, float]:
        """Returns the metrics of the time since the last call (`metrics_file.py`)."""
        operations = self._operations()
        parts = self.stopwatch.take()
        rate = updates / max(sum(parts.values()), 1e-9)
        values = {
            "steps_per_second": rate,
            "examples_per_second": rate * self._batch_size,
            **{f"{part.value}_seconds": parts[part] / updates for part in Part},
        }
        if operations is not None:
            values["model_tflops_per_second"] = rate * operations / _TERA
            if self._peak_flops is not None:
                achieved = rate * operations / self._peak_flops
                values["model_flops_utilization"] = achieved
        return values

    def _operations(self) -> int | None:
        if self._shapes is None:
            return None
        leaves, structure = jax.tree.flatten(self._shapes)
        return _operations(self._loss, structure, tuple(leaves))


@functools.lru_cache(maxsize=16)
def _operations(loss: Loss, structure: Any, leaves: tuple[Any, ...]) -> int:
    """Traces the loss, which takes up to seconds; cached per loss and shapes."""
    return loss.update_flops(*jax.tree.unflatten(structure, leaves))
