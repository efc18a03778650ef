"""Registers kinds of encoders, by the names that the records of runs have.

BERT is built in. The configuration of another one extends `BertConfig` by a
`make_encoder` of its own, which returns an `Encoder`; see `examples/own_encoder.py`. It
is registered where it is defined, so whoever opens a model that has it imports that
module first, as `--import_module` does for commands.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from realm_jax.errors import BadInputError
from realm_jax.models.bert import BertConfig
from realm_jax.registry import Registry

_KIND = "encoder"
_ENCODERS: Registry[type[BertConfig]] = Registry(_KIND)

Config = TypeVar("Config", bound=BertConfig)


def register_encoder(name: str) -> Callable[[type[Config]], type[Config]]:
    """Returns a decorator that registers the configuration of an encoder.

    Records call it `name`.
    """
    return _ENCODERS.register(name)


def recorded(config: BertConfig) -> dict[str, Any]:
    """Returns the settings of an encoder as JSON, with its kind unless it is BERT."""
    settings = dataclasses.asdict(config)
    if type(config) is BertConfig:
        return settings
    if name := _ENCODERS.name_of(type(config)):
        return {_KIND: name, **settings}
    raise BadInputError(
        f"expected a registered encoder, got {type(config).__qualname__}; put "
        '@encoders.register_encoder("...") on it'
    )


def from_record(settings: Mapping[str, Any], **others: Any) -> BertConfig:
    """Returns the configuration that `recorded` describes; inverts it.

    Settings that the record omits have their defaults; `others` take the place of its
    own.

    Raises:
      TypeError: a setting is missing, or unknown to this version.
    """
    known = {**settings, **others}
    name = known.pop(_KIND, None)
    if name is None:
        return BertConfig(**known)
    return _ENCODERS.get(name)(**known)
