"""Implements the trainer's side of the refresh: loads the newest index during training.

A thread polls for a commit, verifies it, and loads it beside the index in use; the
trainer takes it between two steps, without waiting. A snapshot that does not fit is
refused once, with a warning, and training keeps its index.

In a job of several processes the first polls for commits, and the others load what it
has loaded. When all have loaded it, all take it at the same call of `take`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from realm_jax import multihost
from realm_jax.errors import NotReadyError, StoppedError
from realm_jax.index.manifest import (
    DamagedSnapshotError,
    Manifest,
    MismatchedSnapshotError,
)
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.index.source import LoadedIndex
from realm_jax.storage import MissingObjectError

_log = logging.getLogger(__name__)

# The version in notes that followers of a job's processes exchange: (step, attempt).
_Version = tuple[int, str]
_LOADED, _REFUSED = "index_loaded", "index_refused"


class IndexFollower:
    """Follows the newest index snapshot in a thread; a context manager.

    At most one index is loaded ahead. Until it is taken no other one is loaded, so that
    memory holds at most two indexes; of the snapshots committed meanwhile, only the
    newest is loaded later.

    The thread calls `load`, which verifies and loads a snapshot, as
    `IndexSource.load_manifest`, and before it `check`, which refuses other unsuitable
    snapshots by a MismatchedSnapshotError. Only steps after `newer_than`, that of the
    index in use, are loaded.
    """

    def __init__(
        self,
        series: SnapshotSeries,
        load: Callable[[Manifest], LoadedIndex],
        *,
        check: Callable[[Manifest], None] = lambda manifest: None,
        poll_seconds: float = 1.0,
        newer_than: int = -1,
    ):
        self._series = series
        self._load = load
        self._check = check
        self._poll_seconds = poll_seconds
        self._newest = newer_than
        self._skipped: dict[int, str] = {}
        self._last_tried: _Version | None = None
        # Guards the attributes below, which both threads use; notified on changes.
        self._changed = threading.Condition()
        self._pending: LoadedIndex | None = None
        self._failure: Exception | None = None
        self._refused: dict[int, str] = {}
        self._looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, name="index-follower", daemon=True
        )

    def start(self) -> "IndexFollower":
        """Begins to poll."""
        self._thread.start()
        return self

    def stop(self, timeout_seconds: float = 60.0) -> None:
        """Ends the thread, waiting for a load in progress. May be called twice."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def __enter__(self) -> "IndexFollower":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def refused(self) -> Mapping[int, str]:
        """The reasons why snapshots were refused, by step."""
        with self._changed:
            return dict(self._refused)

    @property
    def ready_step(self) -> int | None:
        """The step of the index that is ready to be taken, None if there is none."""
        ready = self._ready_version()
        return None if ready is None else ready[0]

    def ready(self) -> bool:
        """Returns whether an index is ready to be taken. Does not block."""
        return self.ready_step is not None

    def has_newer(self) -> bool:
        """Returns, in the first process, whether a newer index is ready or to come."""
        committed = self._series.steps()
        is_to_come = any(s > self._newest and s not in self._skipped for s in committed)
        return is_to_come or self.ready()

    def take(self) -> LoadedIndex | None:
        """Returns the index that waits, None if there is none. Does not block.

        A collective call: all processes of a job get the same index, or none. It raises
        the error that ended the thread, such as a failure of `load`.
        """
        version = multihost.from_first(self._ready_everywhere())
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if version is None:
                return None
            taken, self._pending = self._pending, None
            assert taken is not None
            assert _version(taken.manifest) == version
            self._newest = taken.manifest.step
            self._changed.notify_all()
            return taken

    def wait_for_first(
        self,
        timeout_seconds: float,
        problem: Callable[[], str] = lambda: "",
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[], object] = lambda: 0,
    ) -> LoadedIndex:
        """Waits until there is an index, and takes it.

        Args:
          timeout_seconds: longest wait without progress, in seconds.
          problem: returns the problem of the index builder, "" while it runs; called at
            every poll, in the first process.
          stopped: returns whether this process was asked to stop, in the first one
            whether any was.
          progress: returns how far the builder is, None if it has not been heard of;
            called after `problem`. Until then the builder is not taken to be gone.

        Raises:
          NotReadyError: the timeout has passed, or the builder is gone.
          StoppedError: asked to stop.
        """
        deadline = time.monotonic() + timeout_seconds
        looks_when_gone: int | None = None
        reached: object = None
        while (taken := self.take()) is None:
            why, asked = "", stopped()
            if multihost.is_first() and not asked:
                why, before, reached = problem(), reached, progress()
                if reached != before:
                    deadline = time.monotonic() + timeout_seconds
            left = deadline - time.monotonic()
            if why and reached is not None and looks_when_gone is None:
                looks_when_gone = self._looks
            if left <= 0:
                why = self._no_index(f"none came within {timeout_seconds:g} s", why)
            # A builder may commit and end at once. The poll in progress may have begun
            # before the commit; the next one begins after it.
            elif looks_when_gone is None or self._looks < looks_when_gone + 2:
                why = ""
            else:
                why = self._no_index("the index builder has ended without one", why)
            asked, why = multihost.from_first((asked, why))
            if asked:
                raise StoppedError("stopped while waiting for an index")
            if why:
                raise NotReadyError(why)
            with self._changed:
                self._changed.wait(max(0.0, min(left, self._poll_seconds)))
        return taken

    def _no_index(self, found: str, problem: str) -> str:
        refused = "".join(f"; refused: {why}" for why in self.refused.values())
        return (
            f"expected an index snapshot in {self._series.store.url(self._series.name)}"
            f", but {found}{refused}; look at the log of the index builder. {problem}"
        ).strip()

    def _ready_version(self) -> _Version | None:
        with self._changed:
            return None if self._pending is None else _version(self._pending.manifest)

    def _ready_everywhere(self) -> _Version | None:
        """Returns the version that is ready in all processes, in the first process."""
        version = self._ready_version()
        if version is None or not multihost.is_first() or multihost.count() == 1:
            return version
        refused = [
            why
            for found, why in multihost.posted(_REFUSED).values()
            if found == version
        ]
        if refused:
            step, attempt = version
            self._refuse(step, attempt, refused[0])
            with self._changed:
                self._pending = None
            return None
        loaded = list(multihost.posted(_LOADED).values())
        return version if loaded == [version] * multihost.count() else None

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except OSError as error:
                # The store is temporarily unavailable; the index in use still serves.
                _log.warning("Could not look for an index: %s", error)
            except Exception as error:
                # Not due to the snapshot: raised to the trainer at the next `take`.
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._looks += 1
                self._changed.notify_all()
            self._stop.wait(self._poll_seconds)

    def _look(self) -> None:
        if multihost.is_first():
            if not self.ready():
                self._look_for_newer()
            return
        ready = self._ready_version()
        if ready is not None:
            # The first process may already have loaded a newer one; this one is kept
            # until it is taken here, too, or dropped by the first process.
            dropped, _ = multihost.posted(_REFUSED).get(0, (None, ""))
            if dropped != ready:
                return
            with self._changed:
                self._pending = None
        wanted = multihost.posted(_LOADED).get(0)
        if wanted is not None and wanted != self._last_tried:
            step, attempt = wanted
            self._load_step(step, attempt)
            if self._last_tried != wanted:
                # Else the first process would keep it, and wait for this one.
                self._refuse(step, attempt, "it was deleted before all had loaded it")

    def _look_for_newer(self) -> None:
        committed = self._series.steps()
        # A refused step may be deleted and built again.
        skipped = {
            s for s in list(self._skipped) if not self._is_new_attempt(s, committed)
        }
        wanted = [s for s in committed if s > self._newest and s not in skipped]
        if not wanted:
            return
        self._load_step(max(wanted))

    def _load_step(self, step: int, wanted: str | None = None) -> None:
        """Loads or refuses the snapshot of a step, of an attempt if one is given."""
        attempt = ""
        try:
            manifest = self._series.read_manifest(step)
            attempt = manifest.attempt
            if wanted not in (None, attempt):
                return
            self._check(manifest)
            index = self._load(manifest)
        except MissingObjectError:
            return  # Deleted since it was listed.
        except (DamagedSnapshotError, MismatchedSnapshotError) as error:
            if step in self._series.steps():  # Else it was deleted while being read.
                self._refuse(step, attempt, str(error))
            return
        self._last_tried = _version(manifest)
        with self._changed:
            self._pending = index
        multihost.post(_LOADED, self._last_tried)

    def _is_new_attempt(self, step: int, committed: Sequence[int]) -> bool:
        """Returns whether a refused snapshot was replaced or deleted."""
        if step not in committed:
            del self._skipped[step]
            return True
        try:
            return self._series.read_manifest(step).attempt != self._skipped[step]
        except (DamagedSnapshotError, MissingObjectError):
            return False

    def _refuse(self, step: int, attempt: str, why: str) -> None:
        _log.warning("Refused the index of step %d: %s", step, why)
        self._skipped[step] = attempt
        self._last_tried = (step, attempt)
        with self._changed:
            self._refused[step] = why
        multihost.post(_REFUSED, (self._last_tried, why))


def _version(manifest: Manifest) -> _Version:
    return manifest.step, manifest.attempt
