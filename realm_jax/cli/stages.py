"""What the commands of the training stages share."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from realm_jax import hosts
from realm_jax.cli import configuration
from realm_jax.cli.progress import StageProgress
from realm_jax.training.loop import Report
from realm_jax.training.stage import StageConfig

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def run_stage(
    command: str,
    description: str | None,
    argv: Sequence[str],
    stop: threading.Event,
    config_class: type[ConfigT],
    run: Callable[[ConfigT, Report, threading.Event], bool],
    watch: Callable[
        [ConfigT, StageProgress], AbstractContextManager[object]
    ] = lambda config, progress: nullcontext(),
) -> None:
    """Parses, configures and runs a training stage, and says how it ended.

    Args:
      command: its name after `realm`.
      description: the help.
      argv: the command line.
      stop: ends the stage between two steps.
      config_class: what gin binds.
      run: (configuration, report, stop) -> whether all updates are done.
      watch: shows what other processes do meanwhile.
    """
    parser = configuration.make_parser(f"realm {command}", description)
    configuration.parse(parser, argv)
    hosts.join(configuration.configured_if_bound(hosts.HostsConfig))
    config = configuration.configured(config_class)
    with StageProgress(command, stop) as progress:
        with watch(config, progress):
            is_done = run(config, progress, stop)
        if is_done:
            progress.note(f"done, {config.train_steps:,} steps in {config.model_dir}")
        else:
            progress.note(f"stopped; run it again to go on from {config.model_dir}")
