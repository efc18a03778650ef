"""The trainer's side of the refresh: fetch the newest index while training goes on.

A thread polls for a commit, verifies it, and loads it beside the index in use; the
trainer takes it between two steps, without waiting. What does not fit is refused,
once and aloud, and training keeps the index it has.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from realm_jax.errors import BadInputError
from realm_jax.index.manifest import (
    DamagedSnapshotError,
    Expectation,
    Manifest,
    MismatchedSnapshotError,
)
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import MissingObjectError

_log = logging.getLogger(__name__)

SearcherT = TypeVar("SearcherT")
Load = Callable[[SnapshotSeries, Manifest], SearcherT]
"""Makes a searcher of a snapshot; reads what it needs of it."""


@dataclasses.dataclass(frozen=True)
class LoadedIndex(Generic[SearcherT]):
    """An index ready to be searched, and what it was made from."""

    searcher: SearcherT
    manifest: Manifest

    def staleness(self, step: int) -> "Staleness":
        """Returns how far the index lags behind the trainer at `step`.

        In seconds, it is the time since its embedding began: then at the latest was
        its encoder published.
        """
        seconds = max(0.0, time.time() - self.manifest.began)
        return Staleness(steps=step - self.manifest.step, seconds=seconds)


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The age of an index, in training steps and in seconds."""

    steps: int
    seconds: float


def load_index(
    series: SnapshotSeries,
    manifest: Manifest,
    expected: Expectation,
    load: Load[SearcherT],
) -> LoadedIndex[SearcherT]:
    """Verifies a snapshot and loads it.

    Args:
      series: of index snapshots.
      manifest: of the snapshot.
      expected: what the caller needs it to be.
      load: makes the searcher.

    Raises:
      MismatchedSnapshotError: it is of another corpus, dimension or count.
      DamagedSnapshotError: it is not what was committed.
    """
    series.verify(manifest, expected)
    return LoadedIndex(load(series, manifest), manifest)


class IndexFollower(Generic[SearcherT]):
    """Follows the newest index snapshot in a thread; a context manager.

    At most one index is loaded ahead. While it waits to be taken nothing else is
    fetched, so memory holds two indexes at most; snapshots committed meanwhile are
    skipped but for the newest.
    """

    def __init__(
        self,
        series: SnapshotSeries,
        expected: Expectation,
        load: Load[SearcherT],
        *,
        check: Callable[[Manifest], None] = lambda manifest: None,
        poll_seconds: float = 1.0,
        newer_than: int = -1,
    ):
        """Prepares the follower; `start` begins to poll.

        Args:
          series: of index snapshots.
          expected: what the trainer needs a snapshot to be.
          load: makes a searcher; called in the follower's thread.
          check: refuses a snapshot that fits in shape and yet is not to be used, by a
            MismatchedSnapshotError; called in the follower's thread.
          poll_seconds: pause between two looks at the store.
          newer_than: the step of the index in use; only higher ones are fetched.
        """
        self._series = series
        self._expected = expected
        self._load = load
        self._check = check
        self._poll_seconds = poll_seconds
        self._newest = newer_than
        self._skipped: dict[int, str] = {}
        # Guards what follows, which both threads use; notified when it changes.
        self._changed = threading.Condition()
        self._pending: LoadedIndex[SearcherT] | None = None
        self._failure: Exception | None = None
        self._refused: dict[int, str] = {}
        self._looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, name="index-follower", daemon=True
        )

    def start(self) -> "IndexFollower[SearcherT]":
        """Begins to poll."""
        self._thread.start()
        return self

    def stop(self, timeout_seconds: float = 60.0) -> None:
        """Ends the thread; waits for a load under way. May be called twice."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def __enter__(self) -> "IndexFollower[SearcherT]":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def refused(self) -> Mapping[int, str]:
        """Why snapshots were refused, by step."""
        with self._changed:
            return dict(self._refused)

    @property
    def ready_step(self) -> int | None:
        """The step of the index that waits to be taken."""
        with self._changed:
            return None if self._pending is None else self._pending.manifest.step

    def ready(self) -> bool:
        """Returns whether an index waits to be taken. Does not block."""
        return self.ready_step is not None

    def take(self) -> LoadedIndex[SearcherT] | None:
        """Returns the index that waits, None if there is none. Does not block.

        Raises:
          Exception: what ended the thread, such as a failure of `load`.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            taken, self._pending = self._pending, None
            self._changed.notify_all()
            return taken

    def wait_for_first(
        self, timeout_seconds: float, alive: Callable[[], bool] = lambda: True
    ) -> LoadedIndex[SearcherT]:
        """Waits until there is an index, and takes it.

        Args:
          timeout_seconds: how long to wait.
          alive: whether the index builder still runs; asked at every poll.

        Raises:
          BadInputError: the time is over, or the builder is gone.
          Exception: as `take`.
        """
        deadline = time.monotonic() + timeout_seconds
        looks_when_gone: int | None = None
        while (taken := self.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._no_index(f"none came within {timeout_seconds:g} s")
            if looks_when_gone is None and not alive():
                looks_when_gone = self._looks
            # A builder may commit and end at once. The look under way may have begun
            # before that; the one after it has not.
            if looks_when_gone is not None and self._looks >= looks_when_gone + 2:
                raise self._no_index("the index builder has ended without one")
            with self._changed:
                self._changed.wait(min(left, self._poll_seconds))
        return taken

    def _no_index(self, found: str) -> BadInputError:
        refused = "".join(f"; refused: {why}" for why in self.refused.values())
        return BadInputError(
            f"expected an index snapshot in {self._series.store.url(self._series.name)}"
            f", but {found}{refused}; look at the log of the index builder."
        )

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except OSError as error:
                # The store is away for a while. The index in use still serves.
                _log.warning("Could not look for an index: %s", error)
            except Exception as error:
                # Not the snapshot's fault: the trainer must know, at its next take.
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._looks += 1
                self._changed.notify_all()
            self._stop.wait(self._poll_seconds)

    def _look(self) -> None:
        if self.ready():
            return
        committed = self._series.steps()
        # A refused step may be deleted and made anew.
        skipped = {
            s for s in list(self._skipped) if not self._is_new_attempt(s, committed)
        }
        wanted = [s for s in committed if s > self._newest and s not in skipped]
        if not wanted:
            return
        step, attempt = max(wanted), ""
        try:
            manifest = self._series.read_manifest(step)
            attempt = manifest.attempt
            self._check(manifest)
            index = load_index(self._series, manifest, self._expected, self._load)
        except MissingObjectError:
            return  # Collected since it was listed.
        except (DamagedSnapshotError, MismatchedSnapshotError) as error:
            if step in self._series.steps():  # Else it was collected while being read.
                self._refuse(step, attempt, error)
            return
        self._newest = step
        with self._changed:
            self._pending = index

    def _is_new_attempt(self, step: int, committed: Sequence[int]) -> bool:
        """Whether a refused snapshot was replaced, or is gone."""
        if step not in committed:
            del self._skipped[step]
            return True
        try:
            return self._series.read_manifest(step).attempt != self._skipped[step]
        except (DamagedSnapshotError, MissingObjectError):
            return False

    def _refuse(self, step: int, attempt: str, error: BadInputError) -> None:
        _log.warning("Refused the index of step %d: %s", step, error)
        self._skipped[step] = attempt
        with self._changed:
            self._refused[step] = str(error)
