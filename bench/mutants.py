"""Measures how strong the tests are: breaks one place of the code, and runs them.

    python -m bench.mutants --marks "not full and not soak" --output day.jsonl
    python -m bench.mutants --marks "not soak" --only-survivors-of day.jsonl \\
        --output all.jsonl
    python -m bench.mutants --table day.jsonl all.jsonl
    python -m bench.mutants --survivors day.jsonl

A seed draws the same mutants of the same code. Each package gets ten, or an equal share
of a small count; each further one goes to the package with the most places per mutant.
So the total is that of the drawn, in which small packages weigh more. Left alone are
texts, annotations, decorators, logging, `raise` and `if TYPE_CHECKING`.

A mutant meets the test files that run its statement, the fastest first. What runs while
a module is imported meets the files that run anything of it, or all files if none does.
All meet the tests of their package, too: what a fixture of the session runs counts for
the file that asks for it first. What other processes run counts unless they are killed,
or are started without PYTHONPATH. A test that fails by chance counts as a kill.

All runs are in copies of the checkout, below .cache/mutants, and in namespaces
(`unshare`) in which a mutant can stop no process but its own. The same command, given
again, resumes. More options of pytest, such as a profile of hypothesis, go into
PYTEST_ADDOPTS. This module is also the plugin of pytest in these runs.
"""

import argparse
import ast
import collections
import copy
import hashlib
import itertools
import json
import math
import os
import pathlib
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

import realm_jax
from bench.tables import table

ROOT = pathlib.Path(__file__).parents[1]
_FOLDER = ROOT / ".cache" / "mutants"
_PARTS = "data index models objectives metrics training prepare evaluation weights"
PACKAGES = (*(f"realm_jax/{part}" for part in _PARTS.split()), "tpu_launch")
_FLOOR = 10
_TEST_FILE = "MUTANTS_TEST_FILE"

_PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult Div, "
    "LShift RShift, BitAnd BitOr"
)
_SWAPPED = {
    getattr(ast, old): getattr(ast, new)
    for pair in _PAIRS.split(", ")
    for old, new in (pair.split(), reversed(pair.split()))
} | {ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
_NEGATED_BY_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_TEXTS = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple, ast.Set, ast.Dict)
_LOGGERS = ("logging", "_log")
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Mutant(NamedTuple):
    """One place of the code, and what it is replaced with."""

    package: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    """Byte of the file at which `before` begins."""
    first: int
    """First line of its statement, of which the statements inside are no part."""
    last: int
    at_import: bool
    """Whether it runs when the module is imported, not in a function."""
    source: str
    """Its line, for people."""


def mutants_of(source: str, file: str = "", package: str = "") -> list[Mutant]:
    """Returns all mutants of a module, in the order of their places."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    found = []
    for node, *where in _places(ast.parse(source), (0, 0), at_import=True):
        for operator, place, after in _replacements(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            before = source.encode()[start:end].decode()
            # The lines below keep their numbers.
            after += "\n" * (before.count("\n") - after.count("\n"))
            after = f"({after})" if isinstance(place, ast.expr) else after
            what = (file, place.lineno, operator, before, after, start)
            text = lines[place.lineno - 1].decode().strip()
            found.append(Mutant(package, *what, *where, text))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.operator))


def _places(node: ast.AST, span: tuple[int, int], at_import: bool) -> Iterator[tuple]:
    """Yields nodes, the first and last line of their statements, and `at_import`."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            if name in _LOGGERS:
                return
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
        span = (node.lineno, last)
    yield node, *span, at_import
    for name, value in ast.iter_fields(node):
        inside = name == "body" and isinstance(node, _FUNCTIONS)
        for child in value if isinstance(value, list) else [value]:
            if name not in _SKIPPED_FIELDS and isinstance(child, ast.AST):
                yield from _places(child, span, at_import and not inside)


def _replacements(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """Yields an operator, the node that it replaces, and the new text."""
    match node:
        case ast.Compare(ops=ops):
            for n, op in enumerate(ops):
                swapped = [*ops[:n], _SWAPPED[type(op)](), *ops[n + 1 :]]
                yield "comparison", node, _with(node, ops=swapped)
        case ast.BoolOp(op=op):
            yield "and/or", node, _with(node, op=_SWAPPED[type(op)]())
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            if type(op) in _SWAPPED and not any(map(_is_text, vars(node).values())):
                yield "arithmetic", node, _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", node, ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield "flipped", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant + 1", node, repr(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None", node, "return None"
        case ast.Expr(value=ast.Call()):
            yield "call deleted", node, "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            match test:
                case ast.UnaryOp(op=ast.Not()) | ast.Constant():
                    pass  # Another operator negates it.
                case ast.Compare(ops=[op]) if isinstance(op, _NEGATED_BY_SWAP):
                    pass
                case _:
                    yield "condition negated", test, f"not ({ast.unparse(test)})"


def _with(node: ast.AST, **fields: Any) -> str:
    changed = copy.copy(node)
    vars(changed).update(fields)
    return ast.unparse(changed)


def _is_text(side: Any) -> bool:
    """Returns whether it is a text or a list, whose + and % are no arithmetic."""
    value = side.value if isinstance(side, ast.Constant) else None
    return isinstance(side, _TEXTS) or isinstance(value, str | bytes)


def mutated(content: bytes, mutant: Mutant) -> bytes:
    """Returns a file with the mutant in it.

    Raises:
      ValueError: the file is not the one that it was drawn from.
    """
    before, after = mutant.before.encode(), mutant.after.encode()
    if not content[mutant.start :].startswith(before):
        raise ValueError(f"{mutant.file} has changed since its mutants were drawn")
    return content[: mutant.start] + after + content[mutant.start + len(before) :]


def draw(places: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draws mutants of each package, in mixed order: a part tells of all of them."""
    floor = min(_FLOOR, count // len(places))
    sizes = {package: min(floor, len(found)) for package, found in places.items()}
    for _ in range(min(count, sum(map(len, places.values()))) - sum(sizes.values())):
        left = [package for package in places if sizes[package] < len(places[package])]
        sizes[max(left, key=lambda p: len(places[p]) / (sizes[p] + 1))] += 1
    drawn = []
    for package, size in sizes.items():
        drawn += random.Random(f"{seed} {package}").sample(places[package], size)
    return random.Random(seed).sample(drawn, len(drawn))


def wilson(killed: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns the 95 % interval of Wilson for a share."""
    centre = (killed + z * z / 2) / (count + z * z)
    spread = killed * (count - killed) / count + z * z / 4
    half = z * math.sqrt(spread) / (count + z * z)
    return centre - half, centre + half


def markdown(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table of the packages, with the killed of each file of results."""
    packages = {row["package"]: None for rows in files.values() for row in rows}

    def cells(package: str | None) -> Iterator[str]:
        for rows in files.values():
            ours = [row["killed"] for row in rows if package in (None, row["package"])]
            low, high = wilson(sum(ours), len(ours)) if ours else (0.0, 1.0)
            share = f"{sum(ours) / max(1, len(ours)):.0%} ({low:.0%} to {high:.0%})"
            yield from (f"{sum(ours)} of {len(ours)}", share)

    heads = [h for name in files for h in (f"killed, {name}", "share, 95 % interval")]
    lines = [(package, *cells(package)) for package in sorted(packages)]
    return table(["package", *heads], [*lines, ("total", *cells(None))])


def copy_checkout(to: pathlib.Path) -> pathlib.Path:
    """Copies what git tracks or would; caches of tests and fetched data are shared."""
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    # Some tests ask git for the files or the commit.
    _git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(to))
    for name in _git("ls-files", "-coz", "--exclude-standard").split("\0")[:-1]:
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    _git("-C", str(to), "reset", "--quiet")
    (ROOT / ".cache" / "compiled_for_tests").mkdir(parents=True, exist_ok=True)
    (to / ".cache").mkdir()
    for shared in ("compiled_for_tests", "data", "tpu_compiler"):
        if (ROOT / ".cache" / shared).exists():
            (to / ".cache" / shared).symlink_to(ROOT / ".cache" / shared)
    return to


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


# A shell as the first process buries the orphans of others. Short of memory, the system
# ends these runs before anything else.
_ALONE = (
    "choom -n 1000 -- "
    "unshare --map-current-user --pid --fork --kill-child --mount-proc sh -c"
)


def _pytest(
    checkout: pathlib.Path,
    marks: str,
    arguments: Iterable[str],
    seconds: float | None = None,
    **environment: str,
) -> tuple[int | None, str]:
    """Returns the exit code, None after `seconds`, and what pytest says."""
    command = [*_ALONE.split(), '"$@"; exit $?', "sh", sys.executable, "-m", "pytest"]
    command += ["-q", "-p", "no:cacheprovider", "-p", "bench.mutants", "-m", marks]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment |= {"PYTHONPATH": str(checkout), "TMPDIR": scratch}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            ended = subprocess.run(
                [*command, f"--basetemp={scratch}/t", *arguments],
                cwd=checkout,
                env=os.environ | environment,
                timeout=seconds,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ""
    return ended.returncode, ended.stdout


def measure(
    checkout: pathlib.Path, marks: str, tests: Sequence[str], jobs: int
) -> dict[str, Any]:
    """Returns what each test file takes and runs, and which tests fail anyway.

    It is kept for the next command, while code, tests, marks and `tests` stay.
    """
    sources = {
        str(path.relative_to(checkout)): path.read_text()
        for folder in ("realm_jax", "tpu_launch", "tests")
        for path in sorted((checkout / folder).rglob("*.py"))
    }
    text = json.dumps([sources, marks, *tests, os.environ.get("PYTEST_ADDOPTS")])
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    kept = _FOLDER / f"measured-{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    report, data = checkout / ".cache" / "junit.xml", checkout / ".cache" / "coverage"
    workers = f"-n {jobs} --dist=loadfile --no-loadscope-reorder"
    junit = f"--junitxml={report} -o junit_family=xunit1"
    arguments = [*workers.split(), *junit.split(), *tests]
    print("one run of the tests finds out what each file runs", flush=True)
    code, said = _pytest(checkout, marks, arguments, **_start_coverage(checkout, data))
    (checkout / "sitecustomize.py").unlink()
    if code not in (0, 1):
        raise RuntimeError(f"the tests do not run; exit code {code}: {said[-3000:]}")
    failed = _FAILED.findall(said)
    if failed:
        # Some may fail only because they are watched, or the machine is busy.
        failed = _FAILED.findall(_pytest(checkout, marks, failed)[1])
        print(f"left out, as they fail without a mutant: {failed}", flush=True)
    seconds = collections.Counter()
    for case in ElementTree.parse(report).iterfind(".//testcase[@file]"):
        seconds[case.get("file")] += float(case.get("time"))
    lines = _lines_by_test(checkout, data)
    measured = {"seconds": seconds, "failing": failed, "lines": lines}
    kept.write_text(json.dumps(measured))
    return measured


_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_COVERAGE = "coverage==7.17.4"
_SETTINGS = """[run]
parallel = true
data_file = {data}/lines
context = ${{{test_file}-}}
source = {checkout}/realm_jax, {checkout}/tpu_launch
patch = _exit, fork
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


def _start_coverage(checkout: pathlib.Path, data: pathlib.Path) -> dict[str, str]:
    """Has every Python that starts on a copy watched; returns the environment."""
    site = _FOLDER / "site"
    if not (site / "coverage").exists():
        uv = str(pathlib.Path(sys.executable).with_name("uv"))
        install = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        subprocess.run([*install, "--target", str(site), _COVERAGE], check=True)
    data.mkdir()
    settings = _SETTINGS.format(data=data, test_file=_TEST_FILE, checkout=checkout)
    (data / "settings").write_text(settings)
    with (checkout / ".git" / "info" / "exclude").open("a") as file:
        file.write("/sitecustomize.py\n")
    start = "import coverage\ncoverage.process_startup()\n"
    path = f"import sys\nsys.path.append({str(site)!r})\n"
    (checkout / "sitecustomize.py").write_text(path + start)
    return {"COVERAGE_PROCESS_START": str(data / "settings")}


def _lines_by_test(
    checkout: pathlib.Path, data: pathlib.Path
) -> dict[str, dict[str, list[int]]]:
    """Returns, by test file and file of the code, the lines that ran during a test."""
    sys.path.append(str(_FOLDER / "site"))
    import coverage

    whole = coverage.Coverage(config_file=str(data / "settings"))
    whole.combine()
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in whole.get_data().measured_files():
        file = str(pathlib.Path(path).relative_to(checkout))
        for line, tests in whole.get_data().contexts_by_lineno(path).items():
            for test in {test.rpartition("|")[2] for test in tests} - {""}:
                found[test][file].append(line)
    return found


def tests_of(mutant: Mutant, measured: Mapping[str, Any]) -> list[str]:
    """Returns the test files that a mutant meets, the fastest first."""
    own = f"tests/{mutant.package.removeprefix('realm_jax/')}/"
    statement = range(mutant.first, mutant.last + 1)
    by_test = measured["lines"]
    unused = not any(mutant.file in files for files in by_test.values())

    def meets(test: str) -> bool:
        lines = by_test.get(test, {}).get(mutant.file, [])
        if mutant.at_import:
            return bool(lines) or unused
        return any(line in statement for line in lines)

    found = [t for t in measured["seconds"] if t.startswith(own) or meets(t)]
    return sorted(found, key=measured["seconds"].get)


def run_mutant(
    mutant: Mutant, checkout: pathlib.Path, marks: str, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs the tests of a mutant; returns its row of results."""
    tests = tests_of(mutant, measured)
    limit = 3 * sum(measured["seconds"][test] for test in tests) + 120
    left_out = [f"--deselect={test}" for test in measured["failing"]]
    path = checkout / mutant.file
    content = path.read_bytes()
    began = time.monotonic()
    path.write_bytes(mutated(content, mutant))
    try:
        arguments = ["-x", "-n0", *left_out, *tests]
        code, said = _pytest(checkout, marks, arguments, limit) if tests else (5, "")
    finally:
        path.write_bytes(content)
    if code == 4 and "conftest" not in said:
        raise RuntimeError(f"pytest refuses its command: {said[-3000:]}")
    # 5: no tests are selected.
    killed = code not in (0, 5)
    named = [*_FAILED.findall(said), "timeout" if code is None else f"exit {code}"]
    ended = {
        "killed": killed,
        "by": named[0] if killed else "",
        "test_files": len(tests),
    }
    seconds = round(time.monotonic() - began, 1)
    return mutant._asdict() | ended | {"seconds": seconds, "marks": marks}


def run_all(flags: argparse.Namespace) -> None:
    """Runs the mutants that the output does not have yet, and adds them there."""
    output = pathlib.Path(flags.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch()
    names = [f"work-{output.stem}-{number}" for number in range(flags.jobs)]
    checkouts = [copy_checkout(_FOLDER / name) for name in names]
    known = {_mutant(row) for row in rows(output)}
    with output.open("a") as file:
        if flags.only_survivors_of:
            earlier = rows(flags.only_survivors_of)
            drawn = [_mutant(row) for row in earlier if not row["killed"]]
            for row in earlier:
                if row["killed"] and _mutant(row) not in known:
                    file.write(json.dumps(row) + "\n")
        else:
            found = _by_package(checkouts[0], flags.paths)
            drawn = draw(found, flags.count, flags.seed)
        measured = measure(checkouts[0], flags.marks, flags.tests, flags.jobs)
        todo = [mutant for mutant in drawn if mutant not in known]
        for row in _in_parallel(todo, checkouts, flags.marks, measured):
            file.write(json.dumps(row) + "\n")
            file.flush()
            fate = f"killed by {row['by']}" if row["killed"] else "survived"
            print(f"{_shown(row)}: {fate}, {row['seconds']} s", flush=True)


def _in_parallel(
    mutants: Iterable[Mutant],
    checkouts: Sequence[pathlib.Path],
    marks: str,
    measured: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yields rows as mutants end, one at a time on each copy."""
    free = queue.SimpleQueue()
    for checkout in checkouts:
        free.put(checkout)

    def run(mutant: Mutant) -> dict[str, Any]:
        checkout = free.get()
        try:
            return run_mutant(mutant, checkout, marks, measured)
        finally:
            free.put(checkout)

    pool = ThreadPoolExecutor(len(checkouts))
    try:
        runs = [pool.submit(run, mutant) for mutant in mutants]
        yield from (ended.result() for ended in as_completed(runs))
    finally:
        pool.shutdown(cancel_futures=True)


def _by_package(checkout: pathlib.Path, paths: Iterable[str]) -> dict:
    found = {}
    for path in paths:
        files = sorted((checkout / path).rglob("*.py"))
        named = [(file.read_text(), str(file.relative_to(checkout))) for file in files]
        found[path] = [m for text, name in named for m in mutants_of(text, name, path)]
    return found


def rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """Reads a file of results."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def _mutant(row: Mapping[str, Any]) -> Mutant:
    return Mutant(*(row[field] for field in Mutant._fields))


def _shown(row: Mapping[str, Any]) -> str:
    before, after = (textwrap.shorten(row[key], 90) for key in ("before", "after"))
    return f"{row['file']}:{row['line']} {row['operator']}: {before} -> {after}"


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to test other code than the copy's; the installed one is elsewhere."""
    if not pathlib.Path(realm_jax.__file__).is_relative_to(config.rootpath):
        raise pytest.UsageError(f"expected the code below here, got {realm_jax}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Tells coverage, here and in programs that the test starts, whose lines follow."""
    if watcher := _watcher():
        os.environ[_TEST_FILE] = item.nodeid.split("::")[0]
        watcher.switch_context(os.environ[_TEST_FILE])


def pytest_sessionfinish() -> None:
    """Writes the lines at once: xdist does not wait long for its workers to end."""
    if watcher := _watcher():
        watcher.stop()
        watcher.save()


def _watcher() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage and coverage.Coverage.current()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Puts the files in the order of the command; `tests/conftest.py` has its own."""
    place = {name: n for n, name in enumerate(config.invocation_params.args)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], 0))


def main() -> None:
    """Runs mutants, or shows their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", help="file of JSON lines; what it has is kept")
    parser.add_argument("--marks", default="not soak", help="as in pytest -m")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--paths", nargs="+", default=PACKAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only-survivors-of", help="a file of results")
    parser.add_argument("--table", nargs="+", help="files of results")
    parser.add_argument("--survivors", help="a file of results")
    flags = parser.parse_args()
    if flags.table:
        print(markdown({pathlib.Path(path).stem: rows(path) for path in flags.table}))
    elif flags.survivors:
        for row in rows(flags.survivors):
            if not row["killed"]:
                print(f"{_shown(row)}\n    {row['source']}")
    elif flags.output:
        run_all(flags)
    else:
        parser.error("expected --output, --table or --survivors, got none of them")


if __name__ == "__main__":
    main()
