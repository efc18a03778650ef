"""Where the time of training goes, and how much work is done in it.

The seconds are wall time of the thread that trains: whatever it does, or waits for. The
devices are given work ahead and compute meanwhile, so what the host does beside them
counts as the host's, and `DEVICE` is the time in which there was nothing left to do but
wait for them. Near zero it says that the host, or a search, holds the devices up.
"""

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from realm_jax import chips
from realm_jax.training.state import TrainState
from realm_jax.training.step import Loss

_TERA = 1e12


class Part(enum.Enum):
    """What the thread that trains does, or waits for.

    Attributes:
      SEARCH: a search outside of the step, and the gathering of what it found. A search
        within the step is the device's.
      DEVICE: handing a step to the devices and waiting for what they compute.
      HOST: batches, placing them, hooks, compiling the step, and all else.
      CHECKPOINT: what training stands still for when it is saved.
      SWAP: publishing a retriever, embedding in the trainer, waiting for an index,
        taking it, and measuring it.
    """

    SEARCH = "search"
    DEVICE = "device"
    HOST = "host"
    CHECKPOINT = "checkpoint"
    SWAP = "swap"


class Stopwatch:
    """Attributes every moment to one part: the innermost that is under way.

    It belongs to one thread; what others do meanwhile is not its concern.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        """Starts in `HOST`.

        Args:
          now: seconds since whenever.
        """
        self._now = now
        self._part = Part.HOST
        self._since = now()
        self._seconds = dict.fromkeys(Part, 0.0)

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Attributes what happens within to `part`, and shows it in a profile."""
        outer = self._switch(part)
        try:
            with jax.profiler.TraceAnnotation(part.value):
                yield
        finally:
            self._switch(outer)

    def wait_for(self, arrays: PyTree) -> None:
        """Waits for the devices, as `DEVICE`.

        For places that would wait anyway, so that what follows is not blamed for it.
        """
        with self.part(Part.DEVICE):
            jax.block_until_ready(arrays)

    def take(self) -> dict[Part, float]:
        """Returns the seconds of each part since the last call; all wall time."""
        self._switch(self._part)
        seconds, self._seconds = self._seconds, dict.fromkeys(Part, 0.0)
        return seconds

    def _switch(self, part: Part) -> Part:
        now = self._now()
        self._seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before


class Accounting:
    """Speed, utilisation and the time split, for each line of metrics.

    Attributes:
      stopwatch: as given.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        loss: Loss,
        batch_size: int,
        devices: Sequence[Any],
    ):
        """Starts the time of the first line.

        Args:
          stopwatch: of the thread that trains.
          loss: what is optimised; hashable.
          batch_size: examples an update, over all devices.
          devices: `jax.Device`s of all processes.
        """
        self.stopwatch = stopwatch
        self._loss = loss
        self._batch_size = batch_size
        chip = chips.find(devices[0].device_kind)
        self._peak_flops = None if chip is None else len(devices) * chip.peak_flops
        self._shapes: PyTree = None
        stopwatch.take()

    def see(self, state: TrainState, inputs: Any) -> None:
        """Notes the shapes of an update, which are those of every other."""
        if self._shapes is not None:
            return
        # No loss reads the optimizer's moments.
        state = state.replace(optimizer_state=None)
        self._shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),
            (state, inputs),
        )

    def line(self, updates: int) -> dict[str, float]:
        """Returns the metrics of the time since the last call (`metrics_file.py`).

        Args:
          updates: made in that time.
        """
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
        """Of an update, over all devices; None before there was one."""
        if self._shapes is None:
            return None
        leaves, structure = jax.tree.flatten(self._shapes)
        return _operations(self._loss, structure, tuple(leaves))


@functools.lru_cache(maxsize=16)
def _operations(loss: Loss, structure: Any, leaves: tuple[Any, ...]) -> int:
    """Traces the loss, which takes up to seconds: once for a loss and its shapes."""
    return loss.update_flops(*jax.tree.unflatten(structure, leaves))
