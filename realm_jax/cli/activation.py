"""Takes the activation of an encoder from its weights, where gin does not name one.

Shapes do not reveal an activation, and published weights of one size differ in it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from realm_jax.cli import configuration

Config = TypeVar("Config")


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
