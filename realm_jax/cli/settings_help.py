"""Describes the settings of a command, from its run file and its configuration classes.

What a setting means stands in the docstring of the dataclass that has it, and nowhere
else; the run file gives it a short name and a value.
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import gin

from realm_jax.cli import reach
from realm_jax.stages import StageSpec

# What a command line can say, and not an object.
_PLAIN = (bool, int, float, str, tuple, type(None))
_WIDTH = 80
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n   .*)*)", re.MULTILINE)


def settings_help(spec: StageSpec) -> str:
    """Returns the settings of a stage: name, value in its run file, and meaning."""
    gin.clear_config(clear_constants=True)
    gin.parse_config_file(f"runs/{spec.name}.gin")
    bound = dict(reach.settings())
    lines = ["Settings, --gin.NAME=VALUE:"]
    for setting, value in bound.items():
        if setting.is_macro:
            lines += _described(setting.scope, _shown(value), _doc(spec, setting))
    for selector in spec.configs:
        config = reach.class_of(selector)
        docs = field_docs(config)
        for field in dataclasses.fields(config):
            is_bound = reach.Setting("", selector, field.name) in bound
            is_plain = isinstance(field.default, _PLAIN)
            if field.name in docs and not is_bound and is_plain:
                name = field.name.upper()
                lines += _described(name, _shown(field.default), docs[field.name])
    return "\n".join(lines)


def field_docs(config: type) -> dict[str, str]:
    """Returns what the docstrings of a class and its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("\nAttributes:\n")
        for name, doc in _ENTRY.findall(attributes):
            found[name] = " ".join(doc.split())
    return found


def _doc(spec: StageSpec, macro: reach.Setting) -> str:
    """Returns the docstring of what a macro sets, of the stage's own where it can."""
    own = field_docs(reach.class_of(spec.config))
    readers = reach.readers(macro.scope)
    for reader in readers:
        if reader.selector == spec.config:
            return own[reader.parameter]
    if macro.scope.lower() in own:
        return own[macro.scope.lower()]
    return field_docs(reach.class_of(readers[0].selector))[readers[0].parameter]


def _described(name: str, value: str, doc: str) -> Iterator[str]:
    yield f"  {name}{value}"
    yield from textwrap.wrap(
        doc, _WIDTH, initial_indent="      ", subsequent_indent="      "
    )


def _shown(value: Any) -> str:
    """Returns a value as gin files have it."""
    if repr(value) == "%gin.REQUIRED":
        return " (required)"
    return f" = {json.dumps(value) if isinstance(value, str) else repr(value)}"
