"""Keeping the index fresh while the retriever learns.

off       the index of the first step stays
blocking  every REFRESH_PERIOD steps training waits while the corpus is embedded anew
async     every REFRESH_PERIOD steps the retriever is published; the index builder, a
          separate job, embeds the corpus, and its index is taken up when it is there
"""

import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.index.follower import LoadedIndex

Publish = Callable[[int, PyTree], None]
"""(step, retriever parameters): writes a retriever snapshot."""

Build = Callable[[int, PyTree], LoadedIndex]
"""(step, retriever parameters): embeds the corpus and commits an index snapshot."""

Load = Callable[[int], LoadedIndex | None]
"""(step): the committed index of that step, None if there is none (any more)."""


class RefreshMode(enum.Enum):
    """When a new index is made, and by whom."""

    OFF = "off"
    BLOCKING = "blocking"
    ASYNC = "async"


class Follower(Protocol):
    """What `async` needs of `index.follower.IndexFollower`."""

    def take(self) -> LoadedIndex | None:
        """Returns a newer index if one is loaded, without waiting."""
        ...


@dataclasses.dataclass(frozen=True)
class RefreshHooks:
    """How the modes act on the world.

    Attributes:
      publish: for `async`.
      build: for `off` (once) and `blocking`.
      load: for resuming.
      wait_for_first: for `async`: blocks until the builder has published an index.
      follower: for `async`.
    """

    build: Build
    load: Load
    publish: Publish | None = None
    wait_for_first: Callable[[], LoadedIndex] | None = None
    follower: Follower | None = None


class Refresher:
    """Hands every step the index it searches.

    Attributes:
      index: the index in use.
      num_swaps: how many times it was replaced while training ran.
    """

    def __init__(
        self,
        mode: RefreshMode,
        period: int,
        hooks: RefreshHooks,
        on_swap: Callable[[int, PyTree, LoadedIndex], None],
    ):
        """Remembers how to refresh; `start` gets the first index.

        Args:
          mode: who refreshes.
          period: steps between two refreshes.
          hooks: what refreshing does.
          on_swap: called with (step, retriever parameters, new index) after every swap,
            the first included.

        Raises:
          BadInputError: the period is not positive.
        """
        if period < 1:
            raise BadInputError(
                f"expected a REFRESH_PERIOD of at least 1 step, got {period}; to keep "
                'the first index set REFRESH_MODE="off"'
            )
        self._mode = mode
        self._period = period
        self._hooks = hooks
        self._on_swap = on_swap
        self.index: LoadedIndex
        self.num_swaps = 0

    def start(self, step: int, params: PyTree, saved: int | None) -> None:
        """Gets the index to begin with: never an empty one.

        Args:
          step: updates done.
          params: of the retriever.
          saved: the index version of the checkpoint that was restored, None for a new
            run. It is loaded again; if it is gone, an index is made of the present
            parameters, and a warning says so.
        """
        if saved is not None:
            index = self._hooks.load(saved)
            if index is not None:
                self._swap(step, params, index)
                return
            logging.warning(
                "index %d of the checkpoint is gone; making one of step %d", saved, step
            )
        if self._mode is RefreshMode.ASYNC:
            self._hooks.publish(step, params)
            self._swap(step, params, self._hooks.wait_for_first())
        else:
            self._swap(step, params, self._hooks.build(step, params))

    def before_step(self, step: int, params: PyTree) -> LoadedIndex:
        """Returns the index that the update after `step` updates searches.

        Swapping comes before the search and publishing before the update, so that a
        snapshot holds exactly the parameters its step names.
        """
        due = step > 0 and step % self._period == 0
        if self._mode is RefreshMode.BLOCKING and due and self.index.step != step:
            self._swap(step, params, self._hooks.build(step, params))
        if self._mode is RefreshMode.ASYNC:
            if due:
                self._hooks.publish(step, params)
            newer = self._hooks.follower.take()
            if newer is not None:
                self._swap(step, params, newer)
                self.num_swaps += 1
        return self.index

    def staleness(self, step: int) -> Mapping[str, float]:
        """Version and age of the index, as metrics."""
        return {
            "index_step": self.index.step,
            "index_age_steps": step - self.index.step,
            "index_age_seconds": time.time() - self.index.manifest.began,
        }

    def _swap(self, step: int, params: PyTree, index: LoadedIndex) -> None:
        self.index = index
        self._on_swap(step, params, index)
