"""Keeps the index fresh while the retriever learns.

off       the index of the first step is kept
blocking  every REFRESH_PERIOD steps training waits while the corpus is embedded again
async     every REFRESH_PERIOD steps the retriever is published; the index builder, a
          separate job, embeds the corpus, and its index is loaded once it is committed
rolling   every step embeds a slice of the corpus again, in REFRESH_PERIOD steps all of
          it (`rolling_refresh.py`)

MAX_STALENESS_STEPS bounds the age of the index in `async`: beyond it the trainer waits
for a newer one, warns, or stops.

A checkpoint records the version of the index in use, and no other state of a refresh:
the step determines whether one is due, and the model directory what was done. A
retriever is published before the update after its step, so at every checkpoint those of
earlier steps exist, with or without an index. A resumed run deletes those of later
steps, publishes them again when it reaches them, and loads the index of any that exist.
"""

import dataclasses
import enum
import logging
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxtyping import PyTree

from realm_jax.errors import BadInputError, NotReadyError, StoppedError
from realm_jax.index.source import LoadedIndex
from realm_jax.training.index_client import IndexClient


class RefreshMode(enum.Enum):
    """Mode of refreshing the index; see the module."""

    OFF = "off"
    BLOCKING = "blocking"
    ASYNC = "async"
    ROLLING = "rolling"


def blocking_rebuilds(mode: RefreshMode, train_steps: int, period: int) -> float:
    """Returns how often training waits while the whole corpus is embedded."""
    often = {RefreshMode.ASYNC: 0.0, RefreshMode.BLOCKING: train_steps / period}
    return often.get(mode, 1.0)


class WhenStale(enum.Enum):
    """Action of the trainer when its index reaches the maximum age."""

    WAIT = "wait"
    WARN = "warn"
    STOP = "stop"


@dataclasses.dataclass(frozen=True)
class StalenessBound:
    """The maximum age of an index, in updates (None for any), and what to do beyond."""

    max_steps: int | None = None
    action: WhenStale = WhenStale.WAIT


# In a checkpoint's details: those of `Slices`.
_SLICES = "rolling_slices"


@dataclasses.dataclass(frozen=True)
class Slices:
    """Since when `rolling` has embedded the slices of rows that it does.

    A run that goes on with other slices embeds some rows twice in a period, and others
    late.

    Attributes:
      settings: what determines the slices, the period last.
      since: number of updates done before the first of them was embedded.
      oldest: a step that no row was embedded before, as of then.
    """

    settings: tuple[int, ...]
    since: int
    oldest: int

    def oldest_at(self, step: int) -> int:
        """Returns a step that no row was embedded before, after `step` updates."""
        period = self.settings[-1]
        return self.oldest if step < self.since + period else step - period


class Refresher:
    """Provides the index that each step searches.

    `wait_seconds` is the longest wait for an index while the builder makes no progress.
    `slices` are what determines the slices of `rolling`, the period last.
    `swap_seconds` is how long the last replacement delayed the next update, without
    what is measured of it. `failure` is why training was stopped for lack of a fresh
    index, to be raised after the state is saved.
    """

    def __init__(
        self,
        mode: RefreshMode,
        period: int,
        client: IndexClient,
        *,
        wait_seconds: float,
        bound: StalenessBound | None = None,
        slices: tuple[int, ...] = (),
    ):
        if period < 1:
            raise BadInputError(
                f"expected a REFRESH_PERIOD of at least 1 step, got {period}; to keep "
                'the first index set REFRESH_MODE="off"'
            )
        bound = bound or StalenessBound()
        most = bound.max_steps if mode is RefreshMode.ASYNC else None
        if most is not None and most < period:
            raise BadInputError(
                f"expected MAX_STALENESS_STEPS of at least REFRESH_PERIOD ({period}), "
                f"got {most}; no index could ever be young enough"
            )
        self._mode = mode
        self._bound = bound
        self._warned_of = -1
        self._period = period
        self._client = client
        self._wait_seconds = wait_seconds
        self._settings = slices or (period,)
        self._slices: Slices | None = None
        self._index: LoadedIndex | None = None
        self._asked = 0.0
        self.num_swaps = 0
        self.swap_seconds = 0.0
        self.failure: NotReadyError | None = None

    @property
    def index(self) -> LoadedIndex:
        """The index in use; available once `start` or `adopt` has returned."""
        assert self._index is not None
        return self._index

    def start(self, step: int, params: PyTree, saved: int | None) -> None:
        """Gets the first index, which is never empty; NotReadyError if none came.

        `saved` is the version of the checkpoint that was restored, None for a new run.
        It is loaded again; if it no longer exists, an index of the present parameters
        is built, with a warning.
        """
        self._client.forget_after(step)
        index = None if saved is None else self._client.load(saved)
        if index is None and saved is not None:
            logging.warning(
                "index %d of the checkpoint is gone; making one of step %d", saved, step
            )
        if self._mode is RefreshMode.ASYNC:
            if index is None:
                # Publish before following: an existing index may be of another run.
                self._client.publish(step, params)
            self._client.follow(newer_than=-1 if index is None else index.manifest.step)
            if index is None:
                index = self._client.wait(self._wait_seconds)
        if index is None:
            index = self._client.build(step, params)
        self._slices = Slices(self._settings, step, index.manifest.step)
        self._use(index)

    def adopt(self, step: int, index: LoadedIndex, saved: Mapping[str, Any]) -> None:
        """Uses the index that a checkpoint held; called instead of `start`.

        `saved` are the checkpoint's details; the manifest is of the one it was made
        from.
        """
        oldest = index.manifest.step
        found = saved.get(_SLICES)
        if found is not None:
            before = Slices(tuple(found["settings"]), found["since"], found["oldest"])
            oldest = before.oldest_at(step)
            self._slices = before if before.settings == self._settings else None
        if self._slices is None:
            # Not rolling, or by an earlier release, it may be as old as its manifest.
            self._slices = Slices(self._settings, step, oldest)
        self._client.forget_after(step)
        if self._mode is RefreshMode.ASYNC:
            self._client.follow(newer_than=index.manifest.step)
        self._use(index)

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold of the age of its rows."""
        if self._mode is not RefreshMode.ROLLING or self._slices is None:
            return {}
        return {_SLICES: dataclasses.asdict(self._slices)}

    def is_due(self, step: int) -> bool:
        """Returns whether the next update is preceded by embedding or publishing."""
        if self._mode not in (RefreshMode.BLOCKING, RefreshMode.ASYNC):
            return False
        return step % self._period == 0 and self.index.manifest.step != step

    def has_renewed(self, step: int) -> bool:
        """Returns whether `rolling` has just embedded all rows of the index again."""
        if self._mode is not RefreshMode.ROLLING or step % self._period:
            return False
        return step > self.index.manifest.step

    def before_step(self, step: int, params: PyTree) -> LoadedIndex:
        """Returns the index that the next update searches; `step` updates are done.

        Publishing comes before the update, so that a snapshot holds exactly the
        parameters its step names; swapping comes before the search.
        """
        self._asked = time.perf_counter()
        due = self.is_due(step)
        if self._mode is RefreshMode.BLOCKING and due:
            self._swap(self._client.build(step, params))
        if self._mode is RefreshMode.ASYNC:
            if due:
                self._client.publish(step, params)
            newer = self._client.take()
            if newer is not None:
                self._swap(newer)
            self._keep_fresh(step)
        return self.index

    def _keep_fresh(self, step: int) -> None:
        """Waits, warns or stops if the index has reached its maximum age."""
        bound = self._bound
        while bound.max_steps is not None and self._age(step) >= bound.max_steps:
            age = (
                f"the index of step {self.index.manifest.step} is {self._age(step)} "
                f"steps old at step {step}, as old as it may be"
            )
            if bound.action is WhenStale.WARN:
                if self._warned_of != self.index.manifest.step:
                    self._warned_of = self.index.manifest.step
                    logging.warning("%s; is the index builder alive?", age)
                return
            # A run that was stopped and started again has yet to load what came since.
            if bound.action is WhenStale.STOP and not self._client.has_newer():
                self._fail(
                    NotReadyError(
                        f"expected a newer index in time, but {age}; look at the log "
                        "of the index builder, and start this run again to go on"
                    )
                )
            try:
                newer = self._client.wait(self._wait_seconds)
            except NotReadyError as error:
                self._fail(error)
            else:
                self._swap(newer)

    def _fail(self, error: NotReadyError) -> NoReturn:
        self.failure = error
        raise StoppedError(str(error)) from error

    def _age(self, step: int) -> int:
        return step - self.index.manifest.step

    def staleness(self, step: int) -> Mapping[str, float]:
        """Returns version and age of the index (`rolling`: oldest row), as metrics."""
        age, version = self.index.staleness(step), self.index.manifest.step
        steps = age.steps
        if self._mode is RefreshMode.ROLLING and self._slices is not None:
            steps = min(steps, step - self._slices.oldest_at(step))
            # A version is one pass over all rows, dated to the beginning of the pass.
            version = max(version, (step - 1) // self._period * self._period)
        return {
            "index_step": version,
            "index_age_steps": steps,
            "index_age_seconds": age.seconds,
        }

    def _use(self, index: LoadedIndex) -> None:
        self._index = index
        self._client.use(index.manifest.step)

    def _swap(self, index: LoadedIndex) -> None:
        self._use(index)
        self.swap_seconds = time.perf_counter() - self._asked
        self.num_swaps += 1
