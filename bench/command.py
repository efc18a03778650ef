"""What every bench does as a command: what it says, writes, and how it fails."""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.tables import find_place, replace_place
from realm_jax.errors import BadInputError

_FILES = {"page": "page to write the tables to", "output": "JSON file of the figures"}


def command_line(module: str, places: Mapping[str, object] | None = None) -> str:
    """Returns the command that was given, for a page.

    `places` has what to call a path instead, which is another on every machine.
    """
    names = {str(place): name for name, place in (places or {}).items()}
    words = [names.get(word, word) for word in sys.argv[1:]]
    return shlex.join(["python", "-m", f"bench.{module}", *words])


def make_parser(doc: str | None, *files: str) -> argparse.ArgumentParser:
    """Returns a parser whose help is a module's docstring.

    It has those options of `publish` that `files` names, "page" and "output".
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in files:
        parser.add_argument(f"--{name}", type=pathlib.Path, help=_FILES[name])
    return parser


def require_room(name: str, flags: argparse.Namespace) -> None:
    """Checks that `publish` will find `--page` and `--output`, before measuring."""
    if flags.page:
        find_place(flags.page, name)
    output = getattr(flags, "output", None)
    if output and not output.parent.is_dir():
        raise BadInputError(
            f"expected a folder for {output}, found none; make {output.parent} first"
        )


def publish(name: str, text: str, result: Any, flags: argparse.Namespace) -> None:
    """Prints tables in Markdown, and writes them to the place of `--page`.

    The figures are written to `--output`, if there is that option.
    """
    print(text)
    if flags.page:
        replace_place(flags.page, name, text)
    if getattr(flags, "output", None):
        write_figures(flags.output, result)


def write_figures(place: str | pathlib.Path, result: Any) -> None:
    """Writes a file of figures, and its folder if need be."""
    path = pathlib.Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


class Spent(NamedTuple):
    """What a command took: seconds, and the memory of its largest process."""

    seconds: float
    peak_gib: float


def run_step(command: Sequence[object], log: pathlib.Path) -> Spent:
    """Runs a command, its output appended to a file."""
    words = [str(word) for word in command]
    began = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise BadInputError(
            f"expected {shlex.join(words)} to succeed, got code {code}; see {log}"
        )
    return Spent(time.monotonic() - began, usage.ru_maxrss / 2**20)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process with one line and exit code 2 where input is bad."""
    try:
        yield
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def reporting(name: str, flags: argparse.Namespace) -> Iterator[None]:
    """Has `publish` find its places before measuring; see `one_line_errors`, too."""
    with one_line_errors():
        require_room(name, flags)
        yield
