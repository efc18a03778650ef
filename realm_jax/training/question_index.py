"""The index that fine-tuning searches: that of its first step, or a refreshed one.

A refreshed index changes hands as in pre-training (`refresh.py`). It belongs to the
document tower that is being trained, so whoever opens a checkpoint later searches an
index of the parameters of that checkpoint, not the one that training was using then.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from realm_jax.index.source import IndexSource, LoadedIndex
from realm_jax.training.checkpoints import KeptCheckpoints
from realm_jax.training.index_client import IndexClient
from realm_jax.training.refresh import Refresher, RefreshMode
from realm_jax.training.stage import Stage, StageParts
from realm_jax.training.step_timing import Part

# While the builder makes no progress, as long as pre-training waits by default.
_WAIT_SECONDS = 3600.0


class FrozenIndex(contextlib.AbstractContextManager["FrozenIndex"]):
    """The index of the retriever that a run begins with, searched to the end."""

    def __init__(
        self,
        stage: StageParts[Any],
        source: IndexSource,
        stop: threading.Event,
        trained: str = "",
    ):
        """Prepares the index; `open` loads or builds it.

        Args:
          stage: the run, with its initial state.
          source: loads and builds its indexes.
          stop: ends embedding.
          trained: as in `IndexSource.open_first`.
        """
        self._stage = stage
        # The loss takes the embeddings of what was found from there.
        self._source = dataclasses.replace(source, keeps_rows=True)
        self._stop = stop
        self._trained = trained
        self._index: LoadedIndex | None = None

    @property
    def current(self) -> LoadedIndex:
        """The index in use, with its rows; available once `open` has returned."""
        assert self._index is not None
        return self._index

    def open(self) -> None:
        """Gets the index of the first update.

        Raises:
          BadInputError: it is missing and cannot be made again.
          StoppedError: stopped while the corpus was being embedded.
          NotReadyError: the index builder has not made one in time.
        """
        self._index = self._source.open_first(
            self._stage.state.params["retriever"],
            self._stop,
            resumes=self._stage.details is not None,
            trained=self._trained,
        )

    def refresh(self) -> None:
        """Publishes or embeds, if it is time, and takes a newer index.

        Raises:
          StoppedError: stopped while the corpus was being embedded.
          BadInputError: the parameters are not finite.
        """

    def metrics(self) -> Mapping[str, float]:
        """Returns version and age of a refreshed index, as metrics."""
        return {}

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold of a refreshed index."""
        return {}

    def keep(self, kept: KeptCheckpoints) -> None:
        """Has the indexes kept with which checkpoints resume."""

    def finish(self) -> None:
        """Publishes the last retriever, if there is a builder for it."""

    def __exit__(self, *error: Any) -> None:
        """Ends what is in the background."""


class RefreshedIndex(FrozenIndex):
    """An index that follows the retriever in training, `blocking` or `async`."""

    def __init__(
        self,
        stage: Stage[Any],
        source: IndexSource,
        stop: threading.Event,
        mode: RefreshMode,
        period: int,
    ):
        """Prepares the index, and sends the trainer's heartbeat from here on.

        Args:
          stage: the run, with its initial state.
          source: loads and builds its indexes.
          stop: ends embedding and waiting.
          mode: who embeds.
          period: updates between two refreshes.
        """
        super().__init__(stage, source, stop)
        self._run = stage
        self._client = IndexClient(
            self._source, stop, step=stage.step, lease=stage.lease
        )
        self._refresher = Refresher(
            mode, period, self._client, wait_seconds=_WAIT_SECONDS
        )

    @property
    def current(self) -> LoadedIndex:
        """See `FrozenIndex`."""
        return self._refresher.index

    def open(self) -> None:
        """See `FrozenIndex`; a resumed run gets the index of its checkpoint again."""
        run = self._run
        saved = None if run.details is None else run.details["index_step"]
        self._refresher.start(run.step, run.state.params["retriever"], saved)

    def refresh(self) -> None:
        """See `FrozenIndex`; nothing is done twice for the same step."""
        run, refresher = self._run, self._refresher
        retriever = run.state.params["retriever"]
        if refresher.is_due(run.step):
            run.require_finite(retriever)
        with run.stopwatch.part(Part.SWAP):
            refresher.before_step(run.step, retriever)
        self._client.beat(run.step)

    def metrics(self) -> Mapping[str, float]:
        """See `FrozenIndex`."""
        return {
            **self._refresher.staleness(self._run.step),
            **self._client.builder_progress(),
        }

    def details(self) -> Mapping[str, Any]:
        """See `FrozenIndex`."""
        return {"index_step": self.current.manifest.step}

    def keep(self, kept: KeptCheckpoints) -> None:
        """See `FrozenIndex`."""
        self._client.keep(kept.index_steps)

    def finish(self) -> None:
        """See `FrozenIndex`; the builder makes the last index, and ends."""
        run = self._run
        self._client.finish(run.step, run.state.params["retriever"])

    def __exit__(self, *error: Any) -> None:
        """Sends the last heartbeat."""
        self._client.__exit__(*error)
