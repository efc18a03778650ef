"""Shows the progress of the index builder in the trainer's output."""

import contextlib
import threading

from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.storage import UnavailableStoreError, open_store

_POLL_SECONDS = 1.0
# A builder that was killed leaves a heartbeat that says "running".
_ALIVE_SECONDS = 60.0


class BuilderWatch:
    """Shows in the trainer's output how much of the next index is built.

    A context manager, which polls every second in the background.
    """

    def __init__(self, model_dir: str, progress: StageProgress):
        """Prepares to follow the builder's heartbeat in `model_dir`."""
        self._store = open_store(model_dir)
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "BuilderWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            # If the store is unavailable, skip one poll and do not fail the job.
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                builder = read_heartbeat(self._store, BUILDER_ROLE)
                self._progress.beside(share_built(builder))


def share_built(builder: JobStatus | None) -> float | None:
    """Returns the share of an index that is embedded; None if none is being built."""
    if builder is None or not builder.is_alive(_ALIVE_SECONDS):
        return None
    if builder.extra.get("activity") != "embedding":
        return None
    return builder.extra["blocks_done"] / builder.extra["num_blocks"]
