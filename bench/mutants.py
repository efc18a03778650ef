"""Measures the tests: makes small mistakes in the code, and counts those they notice.

    python -m bench.mutants --output mutants.jsonl --page CONTRIBUTING.md

`--each` mutants of each package are drawn of all that `bench/mutations.py` can make; a
seed draws the same ones from the same source. What is mutated is a copy of `--root`,
which may stand at another commit.

A mutant is tried with every test of the gate that reaches its module by imports, the
nearest first, a process of pytest for each distance. It is

- killed if a test fails, or takes longer than 120 s, that passes without the mutant;
- survived if all pass;
- undecided if the time that `--minutes` gives ends before.

`--output` gets a line for each, and a run that was ended goes on after them. With
`--again` nothing is drawn: tried are the mutants of that file that were not killed, as
far as the source still has their lines. The table counts those of both files.
"""

import argparse
import ast
import contextlib
import fnmatch
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.mutations import Mutation, find_mutations, is_mutant
from bench.tables import table

PACKAGES = (
    *("data", "index", "models", "objectives", "metrics"),
    *("training", "prepare", "evaluation", "weights", "tpu_launch"),
)
OUTCOMES = ("killed", "survived", "undecided")
_PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-m", "not full and not soak"),
    *("--timeout=120", "-x", "-q", "-rfE"),
)
_NO_TESTS = 5  # As pytest's exit code: none is in the gate.


class Mutant(NamedTuple):
    """A mistake in a file of a package.

    Attributes:
      file: from the root.
      before: the line.
      after: the line of the mutant.
    """

    package: str
    file: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, ...]:
        """What stays when lines above are added or removed."""
        return self.file, self.operator, self.before, self.after


class Result(NamedTuple):
    """What became of a mutant, and the test that failed, if any."""

    mutant: Mutant
    outcome: str
    by: str
    seconds: float


def draw(root: pathlib.Path, package: str, seed: int) -> Iterator[tuple[Mutant, bytes]]:
    """Yields all mutants of a package and their sources, in an order of the seed."""
    folder = "tpu_launch" if package == "tpu_launch" else f"realm_jax/{package}"
    sources = {
        path: path.read_bytes() for path in sorted((root / folder).rglob("*.py"))
    }
    places = [(path, m) for path, text in sources.items() for m in find_mutations(text)]
    random.Random(f"{package} {seed}").shuffle(places)
    for path, mutation in places:
        if is_mutant(sources[path], mutation):
            file = str(path.relative_to(root))
            yield _mutant(package, file, sources[path], mutation)


def _mutant(
    package: str, file: str, source: bytes, mutation: Mutation
) -> tuple[Mutant, bytes]:
    mutated = mutation.apply(source)
    before, after = (
        text.splitlines()[mutation.line - 1].decode().strip()
        for text in (source, mutated)
    )
    mutant = Mutant(package, file, mutation.line, mutation.operator, before, after)
    return mutant, mutated


def find_again(root: pathlib.Path, mutant: Mutant) -> list[tuple[Mutant, bytes]]:
    """Returns a mutant of another commit, if the source still has its line."""
    if not (root / mutant.file).exists():
        return []
    source = (root / mutant.file).read_bytes()
    found = [
        _mutant(mutant.package, mutant.file, source, mutation)
        for mutation in find_mutations(source)
    ]
    same = [one for one in found if one[0].key == mutant.key]
    return sorted(same, key=lambda one: abs(one[0].line - mutant.line))[:1]


def files_by_distance(root: pathlib.Path, file: str) -> list[list[str]]:
    """Returns the files of tests that reach a module by imports, nearest first.

    First come those with its name, then those that import it, then those that import
    what imports it, and so on; of each, those of the module's package before others.
    """
    package = file.removeprefix("realm_jax/").partition("/")[0]
    users, found, ring, rings = _users(root), {file}, {file}, []
    while ring := set().union(*(users.get(one, ()) for one in ring)) - found:
        found |= ring
        rings.append({one for one in ring if re.search(r"/test_\w+\.py$", one)})
    named = {one for one in found if one.endswith(f"/test_{pathlib.Path(file).name}")}
    split = [
        sorted(one for one in some if one.startswith(f"tests/{package}/") == is_own)
        for some in (named, *(ring - named for ring in rings))
        for is_own in (True, False)
    ]
    return [some for some in split if some]


@functools.cache
def _users(root: pathlib.Path) -> Mapping[str, set[str]]:
    """Returns which files use a file: import it, anywhere in them, or name it."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    users: dict[str, set[str]] = {}
    for user, path in paths.items():
        used: set[str] = set()
        for name in _imported(ast.parse(path.read_text())):
            used |= {f"{name}.py", f"{name}/__init__.py"}
            if name.endswith("/"):
                used.update(fnmatch.filter(paths, f"{name}*.py"))
        if user.startswith("tests/"):
            used |= {str(above / "conftest.py") for above in pathlib.Path(user).parents}
        for one in used - {user}:
            users.setdefault(one, set()).add(user)
    return users


def _imported(tree: ast.AST) -> set[str]:
    """Returns what may be paths of modules, or folders of some that a name is added to.

    `realm_jax/cli/` is such a folder if there is an f"realm_jax.cli.{name}".
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(str(module), aliases):
                names |= {module, *(f"{module}.{alias.name}" for alias in aliases)}
            case ast.Constant(str(text)) if re.fullmatch(r"(\w+\.)+\w*", text):
                names |= {text, text.rpartition(".")[0]}
    return {name.replace(".", "/") for name in names}


class Tests:
    """The tests of a checkout."""

    def __init__(self, checkout: pathlib.Path, seconds: float) -> None:
        """Gives a mutant so many seconds."""
        self._checkout, self._seconds = checkout, seconds
        self._passes: dict[str, bool] = {}

    def attempt(self, mutant: Mutant, source: bytes) -> Result:
        """Tries a mutant, and leaves the checkout as it was."""
        path, began = self._checkout / mutant.file, time.monotonic()
        right = path.read_bytes()
        path.write_bytes(source)
        try:
            outcome, by = self._outcome(mutant.file, began + self._seconds)
        finally:
            path.write_bytes(right)
        if outcome == "killed" and not self._passes_without(by):
            outcome, by = "undecided", f"{by}, which fails without the mutant"
        return Result(mutant, outcome, by, round(time.monotonic() - began, 1))

    def _outcome(self, file: str, end: float) -> tuple[str, str]:
        for files in files_by_distance(self._checkout, file):
            try:
                by = self._first_failure(files, end - time.monotonic())
            except subprocess.TimeoutExpired:
                return "undecided", ""
            if by:
                return "killed", by
        return "survived", ""

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = not self._first_failure([test], None)
        return self._passes[test]

    def _first_failure(self, tests: list[str], seconds: float | None) -> str | None:
        """Runs tests until one fails, and returns its name.

        It is that of the first file if pytest itself fails, as by a conftest.

        Raises:
          subprocess.TimeoutExpired: they took longer.
        """
        path = os.pathsep.join([str(self._checkout), os.environ.get("PYTHONPATH", "")])
        with subprocess.Popen(
            [sys.executable, *_PYTEST, *tests],
            cwd=self._checkout,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode in (0, _NO_TESTS):
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)( - .*)?$", said, re.MULTILINE)
        return failed[1] if failed else tests[0]


@contextlib.contextmanager
def copied(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a copy of what git tracks in a checkout, which is dropped.

    Repository, environment and what was downloaded are those of the checkout.
    """
    listing = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = pathlib.Path(folder).resolve() / "checkout"
        for name in filter(None, listing.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        for name in (".git", ".venv", ".cache"):
            if (root / name).exists():
                (copy / name).symlink_to((root / name).resolve())
        yield copy


def as_table(results: Iterable[Result], before: Iterable[Result]) -> str:
    """Returns how many mutants of each package were killed, now and before."""
    now, then = _outcomes(results), _outcomes(before)
    rows = []
    for package in filter(now.__contains__, PACKAGES):
        old = then.get(package, [])
        counts = [len(now[package]), *map(now[package].count, OUTCOMES)]
        share = f"{old.count('killed')} of {len(old)}" if old else ""
        rows.append([package, *map(str, counts), share])
    return table(["package", "drawn", *OUTCOMES, "killed before"], rows)


def _outcomes(results: Iterable[Result]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in results:
        found.setdefault(one.mutant.package, []).append(one.outcome)
    return found


def read(path: pathlib.Path | None) -> dict[tuple[str, ...], Result]:
    """Reads an output, if there is one."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    rows = map(json.loads, lines)
    results = [
        Result(Mutant(**row["mutant"]), row["outcome"], row["by"], row["seconds"])
        for row in rows
    ]
    return {one.mutant.key: one for one in results}


def _chosen(
    checkout: pathlib.Path, flags: argparse.Namespace
) -> Iterator[tuple[Mutant, bytes]]:
    for package in flags.package:
        if not flags.again:
            yield from itertools.islice(draw(checkout, package, flags.seed), flags.each)
        for mutant, outcome, *_ in read(flags.again).values():
            if mutant.package == package and outcome != "killed":
                yield from find_again(checkout, mutant)


def _flags() -> argparse.Namespace:
    parser, path = make_parser(__doc__, "page"), pathlib.Path
    parser.add_argument("--root", type=path, default=path(), help="the checkout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=12, help="mutants of a package")
    parser.add_argument("--package", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--minutes", type=float, default=30, help="for a mutant")
    parser.add_argument("--output", type=path, required=True, help="lines of JSON")
    parser.add_argument("--again", type=path, help="an output with some not killed")
    parser.add_argument("--before", type=path, help="an output to show beside it")
    return parser.parse_args()


def main() -> None:
    """Tries the mutants, and prints the table."""
    flags = _flags()
    # A shell ignores SIGINT in the background, and then the tests would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with reporting("mutants", flags), copied(flags.root) as checkout:
        tests, known = Tests(checkout, flags.minutes * 60), read(flags.output)
        for mutant, source in _chosen(checkout, flags):
            if mutant.key not in known:
                result = tests.attempt(mutant, source)
                row = {**result._asdict(), "mutant": mutant._asdict()}
                with flags.output.open("a") as output:
                    output.write(json.dumps(row) + "\n")
                print(*mutant, *result[1:], sep="\t", flush=True)
        results = read(flags.again) | read(flags.output)
        text = as_table(results.values(), read(flags.before).values())
        text = f"    {command_line('mutants')}\n\n{text}\n\n{today()}, {machine()}."
        publish("mutants", text, None, argparse.Namespace(page=flags.page))


if __name__ == "__main__":
    main()
