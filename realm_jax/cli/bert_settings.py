"""Settings of BERT that gin files may leave open: the activation, rematerialisation.

The activation is then that of the encoder's weights. Shapes do not reveal it, and
published weights of one size differ in it. `bert.BertConfig.remat = "auto"` lets the
planner choose what the backward pass recomputes. It writes its choice as a gin file; a
command that makes models requires one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

Config = TypeVar("Config")

REMAT = "bert.BertConfig.remat"
_AUTO = "auto"


def follow_weights(
    config: Config, recorded: Callable[[str], str | None] | None = None
) -> Config:
    """Returns a configuration whose encoders have the activation of their weights.

    It is that of the first of these that has one: the run's own checkpoint, what its
    retriever starts from, and what its reader starts from. An activation that gin names
    is left as it is; weights with another one are then refused.

    The configuration is of a training stage, or of `evaluate` or `ask`, whose model is
    that of their fine-tuning. `recorded` returns the activation in a source, None if
    that does not say; by default the source is read.
    """
    from realm_jax.models.bert import BertConfig
    from realm_jax.training.initialization import recorded_activation

    if "activation" in configuration.bindings(BertConfig):
        return config
    stage: Any = getattr(config, "finetuned", config)
    reader_source = stage.reader_warm_start or stage.warm_start
    for source in (stage.model_dir, stage.retriever_source, reader_source):
        activation = (recorded or recorded_activation)(source)
        if activation is not None:
            return _with_activation(config, activation)
    return config


def _with_activation(config: Any, activation: str) -> Any:
    changed = {}
    for name in ("models", "finetuned"):
        value = getattr(config, name, None)
        if name == "models" and value is not None:
            bert = functools.partial(value.bert, activation=activation)
            changed[name] = dataclasses.replace(value, bert=bert)
        elif value is not None:
            changed[name] = _with_activation(value, activation)
    return dataclasses.replace(config, **changed)


def remat_is_undecided() -> bool:
    """Returns whether gin leaves the choice to the planner."""
    # Imported here, for commands that only show their help.
    from realm_jax.models.bert import BertConfig

    return configuration.bindings(BertConfig, resolve=True).get("remat") == _AUTO


def require_decided_remat() -> None:
    """Requires that gin does not leave the choice to the planner."""
    if remat_is_undecided():
        raise BadInputError(
            f'expected a decision for remat="{_AUTO}", got none; have one made by '
            "`python -m tpu_launch plan ... --write=plan.gin` and add "
            f"--gin_file=plan.gin, or set {REMAT} to none, attention, dots or full"
        )
