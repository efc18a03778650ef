"""Reads `--gin.NAME=VALUE`: a text needs no quotes where a text is expected."""

import ast
import difflib
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any

import gin

from realm_jax.cli import reach
from realm_jax.errors import BadInputError

# Of references, macros, and containers, which may hold some.
_SYNTAX = ("%", "@", "[", "(", "{")


def name_of(binding: str) -> str:
    """Returns the left side of a binding."""
    return binding.partition("=")[0].strip()


def is_known(binding: str) -> bool:
    """Returns whether the gin files have such a macro or setting."""
    name = name_of(binding)
    try:
        if "." in name:
            reach.parse_setting(name)
        else:
            gin.query_parameter(f"%{name}")
    except ValueError:
        return False
    return True


def require_known(binding: str, files: Sequence[str]) -> None:
    """Requires that a setting exists; gin would ignore a misspelt macro silently.

    Raises:
      ValueError: there is no such configurable or parameter.
    """
    name = name_of(binding)
    if "." in name:
        reach.parse_setting(name)
        return
    if is_known(name):
        return
    raise BadInputError(
        f"unknown macro {name!r}: none of {', '.join(map(str, files))} defines it; "
        f"{meant(name, macros())}"
    )


def macros() -> set[str]:
    """Returns the names of all macros."""
    return {setting.scope for setting, _ in reach.settings() if setting.is_macro}


def meant(name: str, known: Collection[str]) -> str:
    """Returns what to say of a macro that is not among those known.

    It may be named for a command, as in "pretrain/BATCHSIZE".
    """
    scope, slash, last = name.rpartition("/")
    for prefix, sought in (("", name), (scope + slash, last)):
        if close := difflib.get_close_matches(sought, known, n=1):
            return f"did you mean {prefix}{close[0]}?"
    return "the command's --help lists the settings"


def typed(binding: str) -> str:
    """Returns the binding in gin's syntax: a text gets its quotes."""
    name, equals, value = binding.partition("=")
    name, value = name.strip(), value.strip()
    if not equals:
        raise BadInputError(f"expected --gin.{name}=VALUE, got no value")
    if value.startswith(_SYNTAX):
        return binding
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        literal = value
        if not _expects_text(name):
            raise BadInputError(
                f"expected {name} to be {_expected(name)}, got {value}"
            ) from None
    if literal is not None and not isinstance(literal, str) and _expects_text(name):
        literal = value  # Such as a folder named 1984.
    return f"{name} = {literal!r}"


def bind_macro(binding: str) -> None:
    """Binds a macro that no file defines, so that it can be asked for by its name."""
    name, equals, value = binding.partition("=")
    if equals and "." not in name and not value.strip().startswith(_SYNTAX):
        gin.bind_parameter((name.strip(), "gin.macro", "value"), text(binding))


def text(binding: str) -> str:
    """Returns the value of a binding that is known to be a text."""
    name, equals, value = binding.partition("=")
    if not equals:
        raise BadInputError(f"expected --gin.{name}=VALUE, got no value")
    try:
        literal = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        literal = value
    return literal if isinstance(literal, str) else value.strip()


def _expects_text(name: str) -> bool:
    return any(map(_is_text, _kinds(name)))


def _kinds(name: str) -> set[Any]:
    """Returns the types of a setting, or of what reads a macro; else of its value."""
    setting = reach.parse_setting(name)
    readers = reach.readers(name) if setting.is_macro else [setting]
    if not readers:
        return {type(gin.query_parameter(f"%{name}"))}
    return {_type_of(reader) for reader in readers}


def _expected(name: str) -> str:
    """Describes the values that a setting takes."""
    kinds = _kinds(name)
    names = {int: "an integer", float: "a number", bool: "True or False"}
    if len(kinds) == 1 and (kind := kinds.pop()) in names:
        return names[kind]
    return "a number, True, False, None or a text in quotes"


def _type_of(setting: reach.Setting) -> Any:
    """Returns the type that a dataclass or function declares; None if none is known."""
    made = reach.class_of(setting.selector)
    try:
        return typing.get_type_hints(made).get(setting.parameter)
    except (NameError, TypeError):
        return None


def _is_text(kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return str in arguments
    if origin is typing.Literal:
        return all(isinstance(choice, str) for choice in arguments)
    return kind is str
