"""Reads gin configurations as T5X does: composed files, macros set by flags.

No other part of the package reads gin: the rest takes plain dataclasses.
"""

import argparse
import contextlib
import dataclasses
import importlib

# Gin uses it without importing it.
import importlib.util
import logging
import pathlib
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import gin

from realm_jax.cli import reach, renamed, values
from realm_jax.errors import BadInputError
from realm_jax.stages import STAGES, StageSpec

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

# Gin logs each folder without the file as an error, by the root logger. A logger's
# filter sees what is logged by that logger itself, so all others are as they were.
logging.getLogger().addFilter(
    lambda record: record.pathname != gin.resource_reader.__file__
)

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

    stage: StageSpec | None = None
    """The stage whose settings the help lists, before the example."""

    def format_help(self) -> str:
        """Returns the help."""
        text = super().format_help()
        if self.stage is None:
            return text
        before, example, after = text.partition("\nExample:\n")
        run_file = _found(f"gin/runs/{self.stage.name}.gin")
        settings = reach.settings_help(self.stage, run_file)
        return f"{before}\n{settings}\n{example}{after}"

    def error(self, message: str) -> NoReturn:
        """Raises the error as one line instead of printing the usage."""
        raise BadInputError(f"{message}; see {self.prog} --help")


def make_plain_parser(command: str, description: str | None) -> Parser:
    """Returns a parser whose help is the docstring of the command's module."""
    return Parser(
        prog=command,
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def make_parser(command: str, description: str | None) -> Parser:
    """Returns such a parser for a command that takes gin files."""
    parser = make_plain_parser(command, description)
    parser.stage = STAGES.get(command.removeprefix("realm "))
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
        help="sets a macro or a setting, e.g. --gin.BATCH_SIZE=64",
    )
    add_import_module(parser)
    return parser


def add_import_module(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `import_modules` reads."""
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of yours to import first, e.g. one that registers corpora; may "
        "be repeated",
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], command: str = ""
) -> argparse.Namespace:
    """Parses the command line and configures gin; returns the flags.

    Macros of a gin file or of the command line that are named for `command`, one of
    `realm`, such as pretrain/BATCH_SIZE, replace those without its name, and what the
    command line sets must be read by it; "": by any command.
    """
    flags, others = parse_known(parser, argv, command)
    _require_none(parser, others)
    return flags


def parse_known(
    parser: argparse.ArgumentParser, argv: Sequence[str], command: str = ""
) -> tuple[argparse.Namespace, list[str]]:
    """Does what `parse` does, and also returns unknown flags."""
    flags, others = _split(parser, argv)
    import_modules(flags)
    read = _read(parser, flags.gin_file, flags.bindings, command)
    takes_others = bool(command) and STAGES[command].others_are_passed_on
    for binding in read.without_effect:
        if not (takes_others and _is_for_another_command(binding, command)):
            raise BadInputError(read.explain(binding, command))
    return flags, others


def parse_chain(
    parser: argparse.ArgumentParser, argv: Sequence[str], command: str = ""
) -> tuple[argparse.Namespace, set[str]]:
    """Does what `parse` does for one of several commands that share their settings.

    `command` is "" for the launcher of all of them. Returns the flags, and the bindings
    of the command line that it does not read.
    """
    flags, others = _split(parser, argv)
    _require_none(parser, others)
    import_modules(flags)
    read = _read(parser, flags.gin_file, flags.bindings, command, is_shared=True)
    return flags, set(read.without_effect)


def parse_for_macro(
    parser: argparse.ArgumentParser, argv: Sequence[str], name: str
) -> tuple[argparse.Namespace, str]:
    """Parses the command line of a command that needs only one text from gin.

    If the command line itself sets the macro `name`, no gin file is needed, and none is
    read. Returns the flags, and the macro's value.
    """
    flags, others = _split(parser, argv)
    _require_none(parser, others)
    said = [one for one in flags.bindings if values.name_of(one) == name]
    value = None
    if said:
        value = values.text(said[-1])
    elif flags.gin_file:
        import_modules(flags)
        # Other required settings are not needed here.
        _read(parser, flags.gin_file, flags.bindings, finalize=False)
        with contextlib.suppress(ValueError):  # No gin file has such a macro.
            value = gin.query_parameter(f"%{name}")
    if not isinstance(value, str) or not value:
        raise BadInputError(f"expected {name}, a text, got none; add --gin.{name}=...")
    return flags, value


def _split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns flags, with `bindings` among them, and unknown arguments."""
    bindings = [
        renamed.current(arg.removeprefix("--gin."), arg.partition("=")[0])
        for arg in argv
        if arg.startswith("--gin.")
    ]
    flags, others = parser.parse_known_args(
        [arg for arg in argv if not arg.startswith("--gin.")]
    )
    flags.bindings = bindings
    return flags, others


def _require_none(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")


def import_modules(flags: argparse.Namespace) -> None:
    """Imports the user's modules that the command line names."""
    for module in flags.import_module:
        import_module(module)


@dataclasses.dataclass(frozen=True)
class _Read:
    """What was read.

    Attributes:
      without_effect: bindings of the command line that change nothing.
      overridden: macro -> where a file binds a setting that read the macro before.
    """

    without_effect: Sequence[str]
    overridden: Mapping[str, tuple[str, reach.Setting]]

    def explain(self, binding: str, command: str) -> str:
        """Returns the error about a binding without effect."""
        name, _, value = binding.partition("=")
        said = f"{name} has no effect"
        said += f" on `realm {command}`" if command else ""
        instead = self.overridden.get(name.rpartition("/")[2])
        if instead is None:
            return f"{said}: nothing that runs reads it; leave --gin.{name} out"
        file, setting = instead
        return (
            f"{said}: {file} binds {setting.binding}, which read it; give "
            f"--gin.{setting.binding}={value}"
        )


def _read(
    parser: argparse.ArgumentParser,
    files: Sequence[str],
    bindings: Sequence[str],
    command: str = "",
    *,
    finalize: bool = True,
    is_shared: bool = False,
) -> _Read:
    """Configures gin; `is_shared`: some bindings are for other commands."""
    if not files:
        raise BadInputError(
            f"expected at least one --gin_file, got none; see {parser.prog} --help"
        )
    given, unread = {}, []
    with _gin_errors():
        gin.clear_config(clear_constants=True)
        overridden = _read_files(files)
        if command:
            _use_macros_of(command)
        # What is named for this command comes last, so that it wins.
        for binding in sorted(dict.fromkeys(bindings), key=_is_scoped):
            own = _for_this_command(binding, command)
            if values.is_known(own):
                gin.parse_config([values.typed(own)])
                given[reach.parse_setting(values.name_of(own))] = binding
            elif is_shared or _is_for_another_command(own, command):
                unread.append(binding)
                if not command:
                    values.bind_macro(own)
            else:
                values.require_known(own, files)
        _require_run_file(command, files)
        if finalize:
            gin.finalize()
        unread += [given[one] for one in reach.without_effect(given, command)]
    return _Read(unread, overridden)


def _require_run_file(command: str, files: Sequence[str]) -> None:
    """Requires that the gin files say something to the command, if one is named."""
    if not command:
        return
    spec = STAGES[command]
    # Every run file binds its corpus; other files only bind settings of training.
    if reach.Setting("", spec.config, "corpus") not in dict(reach.settings()):
        raise BadInputError(
            f"expected a run file of `realm {command}`, got "
            f"{', '.join(map(str, files))}; add --gin_file=gin/runs/{spec.name}.gin"
        )


def _read_files(files: Sequence[str]) -> dict[str, tuple[str, reach.Setting]]:
    """Reads gin files; returns which file took which macro its reader."""
    reads: dict[reach.Setting, set[str]] = {}
    taken: dict[str, tuple[str, reach.Setting]] = {}
    for file in files:
        gin.parse_config_file(_found(file))
        for setting, value in reach.settings():
            now = reach.macros_in(value)
            for macro in reads.get(setting, set()) - now:
                taken[macro] = (file, setting)
            reads[setting] = now
    return taken


def _found(file: str) -> str:
    """Returns the file, or the shipped one of its name."""
    if pathlib.Path(file).exists():
        return file
    # Gin would take runs/ in the working directory for a package and fail.
    shipped = (folder / file for folder in GIN_FILE_FOLDERS)
    return next((str(path) for path in shipped if path.is_file()), file)


def _use_macros_of(command: str) -> None:
    """Replaces macros and settings by those that gin files name for this command."""
    scope = f"{STAGES[command].name}/"
    for setting, value in list(reach.settings()):
        if not (setting.is_macro and setting.scope.startswith(scope)):
            continue
        name = _setting_of(setting.scope.removeprefix(scope), command)
        if not values.is_known(name):
            raise BadInputError(
                f"unknown macro {name!r} in {setting.scope}: `realm {command} --help` "
                "lists the settings"
            )
        gin.bind_parameter(reach.parse_setting(name), value)


def _for_this_command(binding: str, command: str) -> str:
    """Returns the binding without the command's name, if it is a macro named so."""
    name, equals, value = binding.partition("=")
    if not command or "." in name:
        return binding
    name = name.strip().removeprefix(f"{STAGES[command].name}/")
    return f"{_setting_of(name, command)}{equals}{value}"


def _is_scoped(binding: str) -> bool:
    """Returns whether this is a macro that is named for a command."""
    name = values.name_of(binding)
    return "." not in name and "/" in name


def _setting_of(name: str, command: str) -> str:
    """Returns a macro, or the setting of its name of the command if there is no macro.

    What a configuration has can so be set by the name of a macro before any run file
    has one: WAIT_SECONDS is pretrain.PretrainConfig.wait_seconds.
    """
    if not name.isupper() or "/" in name or values.is_known(name):
        return name
    for config in STAGES[command].configs:
        setting = reach.Setting("", config, name.lower()).binding
        if values.is_known(setting):
            return setting
    return name


def _is_for_another_command(binding: str, command: str) -> bool:
    """Returns whether this is a macro that is named for another command.

    Where a command is given the settings of others, as the index builder is given its
    trainer's, also whether it is a setting that only they have.
    """
    if _is_scoped(binding):
        stage = binding.partition("/")[0].strip().replace("_", "-")
        return stage in STAGES and stage != command
    if not command or not STAGES[command].others_are_passed_on:
        return False
    name = values.name_of(binding)
    trained = [stage for stage, spec in STAGES.items() if spec.trains]
    return any(_setting_of(name, stage) != name for stage in trained)


def configured(config_class: type[Config]) -> Config:
    """Builds a configuration dataclass with the bindings that gin has for it."""
    with _gin_errors():
        config = gin.get_configurable(config_class)()
    _require_types(config)
    return config


def configured_if_bound(config_class: type[Config]) -> Config:
    """Does what `configured` does, with defaults if no gin file names the class."""
    return configured(config_class) if bindings(config_class) else config_class()


def bindings(config_class: type, resolve: bool = False) -> Mapping[str, Any]:
    """Returns gin's bindings of a class.

    With `resolve`, references and macros are replaced by their values.
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


def import_module(module: str) -> None:
    """Imports a user's module, from PYTHONPATH or below the working directory."""
    sys.path.insert(0, "")
    try:
        # Neither a path nor an empty text: importlib takes the dot for a relative name.
        if not module or module.startswith("."):
            raise ImportError("not the name of a module, such as my_tasks")
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


def names_gin(argv: Sequence[str]) -> bool:
    """Returns whether a command line has gin files or macros."""
    return bool(gin_files(argv)) or any(word.startswith("--gin.") for word in argv)


def gin_files(argv: Sequence[str]) -> list[str]:
    """Returns the gin files that a command line names, in order."""
    parser = Parser(prog="realm", add_help=False, allow_abbrev=False)
    parser.add_argument("--gin_file", action="append", default=[])
    return parser.parse_known_args(argv)[0].gin_file
