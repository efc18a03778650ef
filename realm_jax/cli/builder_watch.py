"""Shows the progress of the index builder in the trainer's output.

Where there is no builder the trainer waits for one, and says which command is missing.
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import UnavailableStoreError, open_store
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.refresh import RefreshMode

_POLL_SECONDS = 1.0
# A builder that was killed leaves a heartbeat that says "running".
_ALIVE_SECONDS = 60.0
_REMIND_SECONDS = 60.0


class BuilderWatch:
    """Shows in the trainer's output how much of the next index is built.

    A context manager, which polls every second in the background.
    """

    def __init__(self, model_dir: str, progress: StageProgress, command: str):
        """Prepares to follow the builder's heartbeat.

        `command` starts a builder of this run; it is shown while the trainer waits for
        one.
        """
        self._store = open_store(model_dir)
        self._progress = progress
        self._command = command
        self._reminded = -_REMIND_SECONDS
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
                self._progress.show_builder(share_built(builder))
                if self._misses(builder):
                    self._remind()

    def _misses(self, builder: JobStatus | None) -> bool:
        """Returns whether the trainer waits for its first index, and nobody makes it.

        The retriever is published right before the wait.
        """
        if not self._progress.is_starting:
            return False
        if builder is not None and builder.is_alive(_ALIVE_SECONDS):
            return False
        published = SnapshotSeries(self._store, RETRIEVER_SERIES).latest_step()
        built = SnapshotSeries(self._store, INDEX_SERIES).steps()
        return published is not None and published not in built

    def _remind(self) -> None:
        now = time.monotonic()
        if now - self._reminded >= _REMIND_SECONDS:
            self._reminded = now
            self._progress.note(
                f"waiting for an index; start its builder beside this: {self._command}"
            )


def watched_builder(
    config: PretrainConfig | FinetuneConfig,
    progress: StageProgress,
    gin_files: Sequence[str],
) -> AbstractContextManager[object]:
    """Returns the watch over the builder of a run, if another job embeds for it."""
    if config.refresh_mode != RefreshMode.ASYNC.value:
        return contextlib.nullcontext()
    command = builder_command(config, gin_files)
    return BuilderWatch(config.model_dir, progress, command)


def builder_command(
    config: PretrainConfig | FinetuneConfig, gin_files: Sequence[str]
) -> str:
    """Returns the command line of an index builder for a run.

    Of the run's own gin files those for the hardware are the builder's too.
    """
    files = [file for file in gin_files if "hardware/" in file]
    macros = {
        "MODEL_DIR": f'"{config.model_dir}"',
        "CORPUS": f'"{config.corpus}"',
        "embed.EmbedConfig.document_length": config.models.lengths.document,
        **(
            {"SCANN": "@scann_assets.ScannAssets()"}
            if config.searcher == "scann"
            else {}
        ),
    }
    words = [
        *("realm", "build-index"),
        *(f"--gin_file={file}" for file in [*files, "gin/runs/build_index.gin"]),
        *(f"--gin.{name}={value}" for name, value in macros.items()),
    ]
    return shlex.join(words)


def share_built(builder: JobStatus | None) -> float | None:
    """Returns the share of an index that is embedded; None if none is being built."""
    if builder is None or not builder.is_alive(_ALIVE_SECONDS):
        return None
    if builder.extra.get("activity") != "embedding":
        return None
    return builder.extra["blocks_done"] / builder.extra["num_blocks"]
