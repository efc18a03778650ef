"""The index builder and its trainer as they see each other on one machine."""

import abc
import contextlib
import os
import select
import threading
from types import TracebackType

from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.index.retrievers import RETRIEVER_SERIES
from realm_jax.index.reuse import INDEX_SERIES
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import Store, UnavailableStoreError, open_store

_POLL_SECONDS = 1.0
# A builder that was killed leaves a heartbeat that says it runs.
_ALIVE_SECONDS = 60.0


class _Watch(abc.ABC):
    """Calls `look` every second in the background; a context manager."""

    def __init__(self):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abc.abstractmethod
    def look(self) -> None:
        """Looks once, in the thread of the watch."""

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            # A store that is away for a moment costs a look, not the job.
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                self.look()


class BuilderWatch(_Watch):
    """Shows at the trainer how far the builder is with the next index."""

    def __init__(self, model_dir: str, progress: StageProgress):
        """Prepares to follow the builder's heartbeat in `model_dir`."""
        super().__init__()
        self._store = open_store(model_dir)
        self._progress = progress

    def look(self) -> None:
        """Reads the heartbeat once."""
        self._progress.beside(share_built(read_heartbeat(self._store, BUILDER_ROLE)))


class TrainerWatch(_Watch):
    """Ends the builder once its trainer is over and nothing is left to do.

    The trainer may die and start again meanwhile. Whoever starts both holds a pipe open
    for as long as the trainer is to go on; its other end is the builder's input.
    """

    def __init__(self, lifeline: int, store: Store, stop: threading.Event):
        """Prepares to watch the file descriptor; `stop` is set at its end."""
        super().__init__()
        self._lifeline = lifeline
        self._store = store
        self._stop = stop
        self._is_over = False

    def look(self) -> None:
        """Looks at the pipe first: what was published before it was closed counts."""
        while not self._is_over and select.select([self._lifeline], [], [], 0)[0]:
            self._is_over = not os.read(self._lifeline, 1024)
        if self._is_over and _is_up_to_date(self._store):
            self._stop.set()


def share_built(builder: JobStatus | None) -> float | None:
    """How much of an index the builder has embedded; None if it embeds none."""
    if builder is None or not builder.is_alive(_ALIVE_SECONDS):
        return None
    if builder.extra.get("activity") != "embedding":
        return None
    return builder.extra["blocks_done"] / builder.extra["num_blocks"]


def _is_up_to_date(store: Store) -> bool:
    """Whether the newest retriever has an index, or was refused one."""
    newest = SnapshotSeries(store, RETRIEVER_SERIES).latest_step()
    if newest is None or newest in SnapshotSeries(store, INDEX_SERIES).steps():
        return True
    builder = read_heartbeat(store, BUILDER_ROLE)
    return builder is not None and str(newest) in builder.extra.get("refused", ())
