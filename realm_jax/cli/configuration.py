"""Gin in T5X's style: files compose, macros are overridden on the command line.

Gin is read here and nowhere else in the package: the rest takes plain dataclasses.
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
"""Where gin/runs/pretrain.gin is found, and runs/pretrain.gin too, whatever the working
directory: in a checkout gin/ lies beside the package, installed it lies within."""
for _folder in GIN_FILE_FOLDERS:
    gin.add_config_file_search_path(str(_folder))
renamed.read_gin_files_by_old_names()

# What gin raises about a file; it has no exception class of its own.
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
    """Says what is wrong with a command line as with any other bad input."""

    def error(self, message: str) -> NoReturn:
        """Refuses in one line instead of printing the usage."""
        raise BadInputError(f"{message}; see {self.prog} --help")


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the command's own docstring."""
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
        # For the help only: `parse` takes these out before argparse sees them.
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
    """Reads the command line and leaves gin configured.

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
    """Does what `parse` does, and returns the flags that it does not know as well.

    Raises:
      BadInputError: a file, macro, binding or module is unknown or malformed.
    """
    flags, others, bindings = _split(parser, argv)
    _read(parser, flags, bindings)
    return flags, others


def parse_for_macro(
    parser: argparse.ArgumentParser, argv: Sequence[str], name: str
) -> tuple[argparse.Namespace, str]:
    """Reads the command line of a command that needs no more of gin than one text.

    Where the command line itself says it, no gin file is needed, and none is read.

    Args:
      parser: as `make_parser` returns it.
      argv: the command line.
      name: of the macro.

    Returns:
      The flags, and the macro's value.

    Raises:
      BadInputError: neither command line nor gin files say it, or a flag, file, macro,
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
        # What else is required is not needed here.
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
    """Returns flags, what is none, and bindings."""
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
    """Builds a configuration dataclass with the bindings that gin holds for it.

    Raises:
      BadInputError: a required macro or binding has no value.
    """
    with _gin_errors():
        config = gin.get_configurable(config_class)()
    _require_types(config)
    return config


def configured_if_bound(config_class: type[Config]) -> Config:
    """Does what `configured` does; the defaults where no gin file names the class."""
    return configured(config_class) if bindings(config_class) else config_class()


def bindings(config_class: type, resolve: bool = False) -> Mapping[str, Any]:
    """Returns what gin binds of a class.

    Args:
      config_class: the class.
      resolve: whether references and macros are replaced by what they stand for.
    """
    try:
        return gin.get_bindings(config_class, resolve_references=resolve)
    except ValueError:  # No gin file names it.
        return {}


def _require_types(config: Any) -> None:
    """Numbers and texts must be what the dataclass says they are."""
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
    # Gin logs a missing file as an error of its own before it raises one.
    logging.getLogger().setLevel(logging.CRITICAL)
    try:
        with _gin_errors():
            gin.clear_config(clear_constants=True)
            gin.parse_config_files_and_bindings(files, [], finalize_config=False)
            for binding in bindings:
                _require_known_macro(binding, files)
                _require_value(binding)
            gin.parse_config(list(bindings))
            if finalize:
                gin.finalize()
    finally:
        logging.getLogger().setLevel(logging.WARNING)


def _require_known_macro(binding: str, files: Sequence[str]) -> None:
    """Gin would take a misspelt macro for a new one and then ignore it."""
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
    """A text without quotes is what people stumble over; gin's words do not help."""
    name, equals, value = binding.partition("=")
    if not equals:
        raise BadInputError(f"expected --gin.{name}=VALUE, got no value")
    if value.strip().startswith(("%", "@", "[", "(", "{")):
        return  # Macros and references, or what holds some.
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
      BadInputError: there is none, or it cannot be imported.
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
    """Turns what gin raises about its files into one line of bad input."""
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
