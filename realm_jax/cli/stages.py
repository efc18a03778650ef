"""Shared implementation of the commands of the training stages."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from gin import operative_config_str

from realm_jax import multihost
from realm_jax.attempts import Attempt
from realm_jax.cli import activation, configuration, model_dir, rematerialization
from realm_jax.cli.main import STOPPED
from realm_jax.cli.progress import StageProgress
from realm_jax.training import profiling
from realm_jax.training.loop import Report
from realm_jax.training.recorded import open_run
from realm_jax.training.stage_config import StageConfig

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def run_stage(
    command: str,
    description: str | None,
    argv: Sequence[str],
    stop: threading.Event,
    config_class: type[ConfigT],
    run: Callable[[ConfigT, Report, threading.Event, Attempt], bool],
    watch: Callable[
        [ConfigT, StageProgress, Sequence[str]], AbstractContextManager[object]
    ] = lambda config, progress, gin_files: nullcontext(),
) -> int | None:
    """Parses, configures and runs a training stage, and reports how it ended.

    `run` returns whether all updates are done, and `watch` shows the progress of other
    processes meanwhile; it is given the gin files, too. Returns `STOPPED` if another
    process of the job was asked to stop; else None, which leaves the exit code to
    `main.guard`.
    """
    parser = configuration.make_parser(f"realm {command}", description)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write a JAX profile of ten steps to MODEL_DIR/profile",
    )
    flags = configuration.parse(parser, argv, command)
    multihost.join(configuration.configured_if_bound(multihost.HostsConfig), stop)
    config = activation.follow_weights(configuration.configured(config_class))
    rematerialization.require_decided()
    model_dir.require_writable_folder("MODEL_DIR", config.model_dir)
    if flags.profile:
        config = dataclasses.replace(config, profile=True)
    if config.profile:
        profiling.LOG.setLevel(logging.INFO)
    with StageProgress(command, stop) as progress:
        attempt = Attempt(
            command, config, argv, gin=operative_config_str, note=progress.note
        )
        with watch(config, progress, flags.gin_file):
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
