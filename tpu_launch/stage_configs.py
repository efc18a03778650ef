"""Returns the configurations of `realm` commands, read from gin as they read it."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.stages import BUILD_INDEX, STAGES, StageSpec

_CONFIGURED = {command: spec for command, spec in STAGES.items() if spec.config}
# The file of a later stage also binds settings of an earlier one, as `evaluate` binds
# the configuration of `finetune`; the builder's file may be given beside its trainer's.
_LOOKED_FOR = [
    *(spec for spec in reversed(_CONFIGURED.values()) if spec is not BUILD_INDEX),
    BUILD_INDEX,
]


def configured_stage() -> StageSpec:
    """Returns the command of `realm` whose run file gin has read."""
    for spec in _LOOKED_FOR:
        # Gin binds nothing in a module that none of its files has imported.
        if spec.config.rpartition(".")[0] not in sys.modules:
            continue
        # Every run file binds its corpus; other files only bind settings of training.
        if "corpus" in configuration.bindings(spec.load_config()):
            return spec
    raise BadInputError(
        "expected the run file of a command, got none; add "
        "--gin_file=gin/runs/pretrain.gin, say"
    )


def parse_run(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, StageSpec]:
    """Configures gin for the command of `realm` whose run file is among the gin files.

    Returns the flags and the command.
    """
    # What is named for the command is read once the command is known.
    configuration.parse_chain(parser, argv)
    stage = configured_stage()
    return configuration.parse(parser, argv, stage.command), stage


def stage_config(command: str) -> Any:
    """Returns the configuration that a command of `realm` would run with."""
    if command not in _CONFIGURED:
        raise BadInputError(
            f"expected a command among {', '.join(_CONFIGURED)}, got {command!r}"
        )
    return configuration.configured(_CONFIGURED[command].load_config())
