"""What the commands of `realm` would run with, read from gin as they read it."""

import importlib
from typing import Any

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

# Command -> what gin binds of it. What is bound within another stands after that.
_CONFIGURATIONS = {
    "pretrain": "realm_jax.training.pretrain.PretrainConfig",
    "warm-start": "realm_jax.training.warm_start.WarmStartConfig",
    "evaluate": "realm_jax.evaluation.run.EvaluateConfig",
    "ask": "realm_jax.evaluation.ask.AskConfig",
    "finetune": "realm_jax.training.finetune.FinetuneConfig",
    "build-index": "realm_jax.cli.build_index.BuildIndexConfig",
    "prepare": "realm_jax.prepare.prepare.PrepareConfig",
    "update-corpus": "realm_jax.prepare.update_corpus.UpdateConfig",
}


def configured_command() -> str:
    """Returns the command of `realm` whose run file gin holds.

    Raises:
      BadInputError: it holds none.
    """
    for command, place in _CONFIGURATIONS.items():
        # Every run file says which corpus it is about, others only how to train.
        if "corpus" in configuration.bindings(_load(place)):
            return command
    raise BadInputError(
        "expected the run file of a command, got none; add "
        "--gin_file=gin/runs/pretrain.gin, say"
    )


def stage_config(command: str) -> Any:
    """Returns the configuration that a command of `realm` would run with.

    Raises:
      BadInputError: there is no such command, or a setting is missing.
    """
    if command not in _CONFIGURATIONS:
        raise BadInputError(
            f"expected a command among {', '.join(_CONFIGURATIONS)}, got {command!r}"
        )
    return configuration.configured(_load(_CONFIGURATIONS[command]))


def _load(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)
