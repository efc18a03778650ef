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

_KIND = "encoder"
_KINDS: dict[str, type[BertConfig]] = {}

Config = TypeVar("Config", bound=BertConfig)


def register_encoder(name: str) -> Callable[[type[Config]], type[Config]]:
    """Returns a decorator that registers the configuration of an encoder.

    Records call it `name`. The same one may be registered again, as a module that is
    reloaded does.
    """

    def register(kind: type[Config]) -> type[Config]:
        place, taken = _place(kind), _place(_KINDS.get(name, kind))
        if place != taken:
            raise BadInputError(
                f"expected a new name for the encoder {place}, got {name!r}, which is "
                f"that of {taken}; choose another"
            )
        _KINDS[name] = kind
        return kind

    return register


def _place(kind: type[BertConfig]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def recorded(config: BertConfig) -> dict[str, Any]:
    """Returns the settings of an encoder as JSON, with its kind unless it is BERT."""
    settings = dataclasses.asdict(config)
    if type(config) is BertConfig:
        return settings
    for name, kind in _KINDS.items():
        if type(config) is kind:
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
    if name not in _KINDS:
        raise BadInputError(
            f"expected an encoder that is registered, got {name!r}; import the module "
            "that defines it first (--import_module=MODULE of a command)"
        )
    return _KINDS[name](**known)
