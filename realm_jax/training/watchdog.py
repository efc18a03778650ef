"""Ends a run that does not move, such as one whose collective never returns.

The training thread cannot do so: it waits for the devices, or for a file. So a thread
of the watchdog looks at regular intervals whether another update has come. If none has
for too long, it prints the stacks of all threads and the reason, and ends the process.
Of several processes each has its own watchdog; they wait for each other, so all end.

Whoever runs the command starts it again after the first time (exit code 1, a crash). If
it stalls once more at the same checkpoint, it ends with code 2, as the next attempt
would probably stall too. The model directory remembers the last stall:

    MODEL_DIR/stalled.json    {"checkpoint": newest step saved, "reason": text}, sealed

Saving, and what is done for an index, may take as long as it needs. Time is counted in
looks, so that a process that was suspended has not stalled.
"""

import collections
import contextlib
import faulthandler
import os
import pathlib
import statistics
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from realm_jax import multihost
from realm_jax.errors import BAD_INPUT, BUG
from realm_jax.manifests import seal, unseal
from realm_jax.storage import MissingObjectError, Store
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.step_timing import MAX_IN_FLIGHT, Part, Stopwatch

STALLED = "stalled.json"
"""Name of the record of the last stall in the model directory."""

_UPDATES = 20
# Compiling the update for a pod takes minutes, and no update has been seen yet.
_COMPILING_SECONDS = 3600.0
_LOOKS = 60
_REMEMBERED_LOOKS = 101
# They wait for other jobs and for the bucket, with bounds of their own, or embed.
_UNBOUNDED = (Part.CHECKPOINT, Part.SWAP)
_STORE_SECONDS = 60.0
_STDERR = 2
_PACKAGE = pathlib.Path(__file__).parents[1]


def stall_bound(shortest: float, update_seconds: float) -> float:
    """Returns the seconds without an update, at least `shortest`, that end a run."""
    return max(shortest, _UPDATES * update_seconds)


class Watchdog:
    """Ends the process if no update comes; a context manager around the loop.

    All processes make one, in the training thread.
    """

    def __init__(
        self,
        store: Store,
        stopwatch: Stopwatch,
        first_step: int,
        shortest: float,
        end: Callable[[int], object] = os._exit,
    ):
        self._store = store
        self._stopwatch = stopwatch
        self._first = self._step = self._seen = first_step
        self._shortest = shortest
        self._seconds_per_look = shortest / _LOOKS
        self._end = end
        # Read now: when this stalls, another process may have written it already.
        self._stalled_at = multihost.run_on_primary(lambda: _stalled_at(store))
        self._idle = 0.0
        # Seconds per update, of looks that saw any.
        self._recent = collections.deque[float](maxlen=_REMEMBERED_LOOKS)
        self._training_thread = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __call__(self, step: int) -> None:
        """Notes the number of updates done; called after each."""
        if self._step == self._first:
            # The first update was compiled until now.
            self._idle = 0.0
        self._step = step

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def bound(self) -> float:
        """Seconds without an update after which the run ends itself."""
        if not self._recent:
            return max(self._shortest, _COMPILING_SECONDS)
        return stall_bound(self._shortest, statistics.median(self._recent))

    def look(self) -> None:
        """Counts one interval, and ends the process if it was one too many."""
        step, part = self._step, self._stopwatch.active
        if part not in _UNBOUNDED:
            self._idle += self._seconds_per_look
        if step != self._seen:
            # The first ones are handed over to the devices, and not waited for.
            if step > self._first + MAX_IN_FLIGHT:
                self._recent.append(self._idle / (step - self._seen))
            self._seen, self._idle = step, 0.0
        elif self._idle > self.bound:
            self._give_up(self._reason(part))

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds_per_look):
            self.look()

    def _reason(self, part: Part) -> str:
        usual = "compiling included"
        if self._recent:
            usual = f"one took {statistics.median(self._recent):.3g} s before"
        return (
            f"expected update {self._seen + 1} within {self.bound:.0f} s ({usual}), "
            f"but it has not come: the training thread is in {part.value!r}"
            f"{self._place()}"
        )

    def _place(self) -> str:
        frame = sys._current_frames().get(self._training_thread)
        for caller, line in traceback.walk_stack(frame) if frame else ():
            path = pathlib.Path(caller.f_code.co_filename)
            if path.is_relative_to(_PACKAGE):
                return f", at {path.relative_to(_PACKAGE)}:{line}"
        return ""

    def _give_up(self, reason: str) -> None:
        # The training thread may hold the lock of sys.stderr, which is not used here.
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        is_again = False
        # A store that does not answer may be the very reason.
        with contextlib.suppress(Exception):
            noting = ThreadPoolExecutor(1).submit(self._note, reason)
            is_again = noting.result(_STORE_SECONDS)
        advice = (
            "for the second time since the last checkpoint; see the stacks above, and "
            "the machines"
            if is_again
            else "the same command goes on from the last checkpoint"
        )
        # The last line is what supervisors repeat.
        os.write(_STDERR, f"error: {reason}; {advice}\n".encode())
        self._end(BAD_INPUT if is_again else BUG)

    def _note(self, reason: str) -> bool:
        """Records this stall; returns whether the last one was at this checkpoint."""
        newest = max(finished_steps(self._store), default=0)
        record = {"checkpoint": newest, "reason": reason}
        self._store.write(STALLED, seal(record))
        return newest == self._stalled_at


def _stalled_at(store: Store) -> int | None:
    """Returns the checkpoint of the last stall; None if there was none."""
    try:
        return unseal(store.read(STALLED), required=False).get("checkpoint")
    except (MissingObjectError, ValueError):
        return None
