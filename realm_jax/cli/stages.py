"""Shared implementation of the commands of the training stages.

It shows the progress of the index builder in the trainer's output. Where there is no
builder the trainer waits for one, and says which command is missing.
"""

import contextlib
import dataclasses
import logging
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gin import operative_config_str

from realm_jax import multihost
from realm_jax.cli import bert_settings, configuration, model_dir
from realm_jax.cli.main import STOPPED
from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.run_record import Attempt
from realm_jax.stages import STAGES
from realm_jax.storage import UnavailableStoreError, open_store
from realm_jax.training import profiling
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.recorded import open_run
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.stage import Report
from realm_jax.training.stage_config import StageConfig

_POLL_SECONDS = 1.0

# A builder that was killed leaves a heartbeat that says "running".
_ALIVE_SECONDS = 60.0
_REMIND_SECONDS = 60.0


def run_stage(
    command: str,
    description: str | None,
    argv: Sequence[str],
    stop: threading.Event,
    run: Callable[[Any, Report, threading.Event, Attempt], bool],
) -> int | None:
    """Parses, configures and runs a training stage, and reports how it ended.

    `run` takes the stage's configuration and returns whether all updates are done.
    Returns `STOPPED` if another process of the job was asked to stop; else None, which
    leaves the exit code to `main.guard`.
    """
    parser = configuration.make_parser(f"realm {command}", description)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write a JAX profile of ten steps to MODEL_DIR/profile",
    )
    flags = configuration.parse(parser, argv, command)
    multihost.join(configuration.configured_if_bound(multihost.HostsConfig), stop)
    config = configuration.configured(STAGES[command].load_config())
    config = bert_settings.follow_weights(config)
    bert_settings.require_decided_remat()
    model_dir.require_writable_folder("MODEL_DIR", config.model_dir)
    if flags.profile:
        config = dataclasses.replace(config, profile=True)
    if config.profile:
        profiling.LOG.setLevel(logging.INFO)
    with StageProgress(command, stop) as progress:
        attempt = Attempt(
            command, config, argv, gin=operative_config_str, note=progress.note
        )
        with _watched_builder(config, progress, flags.gin_file):
            is_done = run(config, progress, stop, attempt)
        if is_done:
            attempt.report_ignored_changes()
            progress.note(f"done, {_steps(config)} in {config.model_dir}")
            return None
        progress.note(f"stopped; run it again to go on from {config.model_dir}")
        return None if stop.is_set() else STOPPED


def _steps(config: StageConfig) -> str:
    """Returns how many steps were made, which are fewer if the run ended early."""
    run, planned = open_run(config.model_dir), f"{config.train_steps:,} steps"
    if run is None or not run.has_ended or run.step >= config.train_steps:
        return planned
    return f"{run.step:,} of {planned}, after which dev got no better,"


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


def _watched_builder(
    config: StageConfig, progress: StageProgress, gin_files: Sequence[str]
) -> contextlib.AbstractContextManager[object]:
    """Returns the watch over the builder of a run, if another job embeds for it."""
    if (
        not isinstance(config, PretrainConfig | FinetuneConfig)
        or config.refresh_mode != RefreshMode.ASYNC.value
    ):
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
    }
    if config.searcher == "scann":
        macros["SCANN"] = "@scann_assets.ScannAssets()"
    words = [
        "realm",
        "build-index",
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
