"""Reads gin configurations as T5X does: composed files, macros set by flags.

No other part of the package reads gin: the rest takes plain dataclasses.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import logging
import pathlib
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import gin

from realm_jax.cli import renamed
from realm_jax.errors import BadInputError

Config = TypeVar("Config")

_PACKAGE = pathlib.Path(__file__).parents[1]
GIN_FILE_FOLDERS = tuple(
    folder for root in (_PACKAGE.parent, _PACKAGE) for folder in (root, root / "gin")
)
"""Folders in which gin/runs/pretrain.gin is found, and runs/pretrain.gin too, from any
working directory: a checkout has gin/ beside the package, an installation within it."""
for _folder in GIN_FILE_FOLDERS:
    gin.add_config_file_search_path(str(_folder))
renamed.read_gin_files_by_old_names()


def _is_not_of_the_search(record: logging.LogRecord) -> bool:
    return record.pathname != gin.resource_reader.__file__


# Gin logs each folder without the file as an error, by the root logger. A logger's
# filter sees what is logged by that logger itself, so all others are as they were.
logging.getLogger().addFilter(_is_not_of_the_search)

# The exceptions that gin raises about a file; it has no class of its own.
_GIN_RAISES = (
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class Parser(argparse.ArgumentParser):
    """Reports errors in a command line as bad input."""

    def error(self, message: str) -> NoReturn:
        """Raises the error as one line instead of printing the usage."""
        raise BadInputError(f"{message}; see {self.prog} --help")


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the docstring of the command's module."""
    parser = Parser(
        prog=command,
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file; may be repeated, later files override earlier ones",
    )
    parser.add_argument(
        # For the help only: `parse` removes these before argparse sees them.
        "--gin.MACRO=VALUE",
        dest="gin_help_only",
        action="store_true",
        help="sets a macro or a binding, e.g. --gin.BATCH_SIZE=64",
    )
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of yours to import first, e.g. one that registers corpora",
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line and configures gin.

    Raises:
      BadInputError: a flag, file, macro, binding or module is unknown or malformed.
    """
    flags, others = parse_known(parser, argv)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return flags


def parse_known(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Does what `parse` does, and also returns unknown flags.

    Raises:
      BadInputError: a file, macro, binding or module is unknown or malformed.
    """
    flags, others, bindings = _split(parser, argv)
    _read(parser, flags, bindings)
    return flags, others


def parse_for_macro(
    parser: argparse.ArgumentParser, argv: Sequence[str], name: str
) -> tuple[argparse.Namespace, str]:
    """Parses the command line of a command that needs only one text from gin.

    If the command line itself sets the macro, no gin file is needed, and none is read.

    Args:
      parser: from `make_parser`.
      argv: the command line.
      name: name of the macro.

    Returns:
      The flags, and the macro's value.

    Raises:
      BadInputError: neither command line nor gin files set it, or a flag, file, macro,
        binding or module is unknown or malformed.
    """
    flags, others, bindings = _split(parser, argv)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    said = [one for one in bindings if one.partition("=")[0].strip() == name]
    value = None
    if said:
        _require_value(said[-1])
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(said[-1].partition("=")[2].strip())
    elif flags.gin_file:
        # Other required settings are not needed here.
        _read(parser, flags, bindings, finalize=False)
        with contextlib.suppress(ValueError):  # No gin file has such a macro.
            value = gin.query_parameter(f"%{name}")
    if not isinstance(value, str) or not value:
        raise BadInputError(
            f"expected {name}, a text, got none; add --gin.{name}='\"...\"'"
        )
    return flags, value


def _split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Returns flags, unknown arguments, and bindings."""
    bindings = [
        renamed.current(arg.removeprefix("--gin."), arg.partition("=")[0])
        for arg in argv
        if arg.startswith("--gin.")
    ]
    flags, others = parser.parse_known_args(
        [arg for arg in argv if not arg.startswith("--gin.")]
    )
    return flags, others, bindings


def _read(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    bindings: Sequence[str],
    finalize: bool = True,
) -> None:
    for module in flags.import_module:
        import_module(module)
    if not flags.gin_file:
        raise BadInputError(
            f"expected at least one --gin_file, got none; see {parser.prog} --help"
        )
    _configure(flags.gin_file, bindings, finalize)


def configured(config_class: type[Config]) -> Config:
    """Builds a configuration dataclass with the bindings that gin has for it.

    Raises:
      BadInputError: a required macro or binding has no value.
    """
    with _gin_errors():
        config = gin.get_configurable(config_class)()
    _require_types(config)
    return config


def configured_if_bound(config_class: type[Config]) -> Config:
    """Does what `configured` does, with defaults if no gin file names the class."""
    return configured(config_class) if bindings(config_class) else config_class()


def bindings(config_class: type, resolve: bool = False) -> Mapping[str, Any]:
    """Returns gin's bindings of a class.

    Args:
      config_class: the class.
      resolve: whether references and macros are replaced by their values.
    """
    try:
        return gin.get_bindings(config_class, resolve_references=resolve)
    except ValueError:  # No gin file names it.
        return {}


def _require_types(config: Any) -> None:
    """Requires that numbers and texts have the types the dataclass declares."""
    types = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        expected, value = types[field.name], getattr(config, field.name)
        accepted = (int, float) if expected is float else expected
        if expected not in (int, float, str, bool) or (
            isinstance(value, accepted)
            and (expected is bool or not isinstance(value, bool))
        ):
            continue
        raise BadInputError(
            f"expected {type(config).__name__}.{field.name} to be of type "
            f"{expected.__name__}, got {value!r}"
        )


def _configure(files: Sequence[str], bindings: Sequence[str], finalize: bool) -> None:
    with _gin_errors():
        gin.clear_config(clear_constants=True)
        gin.parse_config_files_and_bindings(files, [], finalize_config=False)
        for binding in bindings:
            _require_known_macro(binding, files)
            _require_value(binding)
        gin.parse_config(list(bindings))
        if finalize:
            gin.finalize()


def _require_known_macro(binding: str, files: Sequence[str]) -> None:
    """Requires that a macro exists; gin would ignore a misspelt one silently."""
    name = binding.partition("=")[0].strip()
    if "." in name:
        return
    try:
        gin.query_parameter(f"%{name}")
    except ValueError as error:
        raise BadInputError(
            f"unknown macro {name!r}: none of {', '.join(files)} defines it; the "
            "macros stand at the top of each run file"
        ) from error


def _require_value(binding: str) -> None:
    """Requires a valid value; gin's own error for a text without quotes is unclear."""
    name, equals, value = binding.partition("=")
    if not equals:
        raise BadInputError(f"expected --gin.{name}=VALUE, got no value")
    if value.strip().startswith(("%", "@", "[", "(", "{")):
        return  # Macros and references, or containers of them.
    try:
        ast.literal_eval(value.strip())
    except (ValueError, SyntaxError) as error:
        raise BadInputError(
            f"expected {name} to be a number, True, False, None or a text in quotes, "
            f"got {value}; a text is written --gin.{name}='\"{value}\"'"
        ) from error


def import_module(module: str) -> None:
    """Imports a user's module, from PYTHONPATH or below the working directory.

    Raises:
      BadInputError: the module does not exist, or cannot be imported.
    """
    sys.path.insert(0, "")
    try:
        importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        raise BadInputError(
            f"expected an importable --import_module, got {module!r} ({error}); give "
            "a module on PYTHONPATH or below the working directory"
        ) from error
    finally:
        sys.path.remove("")


@contextlib.contextmanager
def _gin_errors() -> Iterator[None]:
    """Converts gin's exceptions about its files into one line of bad input."""
    try:
        yield
    except BadInputError:
        raise
    except _GIN_RAISES as error:
        said = str(error)
        if isinstance(error, SyntaxError) and error.filename:
            said = f"{error.msg} ({error.filename}, line {error.lineno})"
        lines = [line.rstrip() for line in said.splitlines() if line.strip()]
        where = [line.strip() for line in lines if line.startswith("  In ")]
        raise BadInputError(" ".join(["gin:", *lines[:1], *where])) from error
