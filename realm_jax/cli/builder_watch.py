"""What the trainer shows of the index builder that works beside it."""

import contextlib
import threading

from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.storage import UnavailableStoreError, open_store

_POLL_SECONDS = 1.0
# A builder that was killed leaves a heartbeat that says it runs.
_ALIVE_SECONDS = 60.0


class BuilderWatch:
    """Shows at the trainer how far the builder is with the next index.

    A context manager, which looks every second in the background.
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
            # A store that is away for a moment costs a look, not the job.
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                builder = read_heartbeat(self._store, BUILDER_ROLE)
                self._progress.beside(share_built(builder))


def share_built(builder: JobStatus | None) -> float | None:
    """How much of an index the builder has embedded; None if it embeds none."""
    if builder is None or not builder.is_alive(_ALIVE_SECONDS):
        return None
    if builder.extra.get("activity") != "embedding":
        return None
    return builder.extra["blocks_done"] / builder.extra["num_blocks"]
