"""What a test of the gate may not do, found in its source before anything runs.

The gate (`make test`) is the same on an idle machine and on a busy one. So none of its
tests starts a process, sleeps, or sends a signal, unless it says why by
`@pytest.mark.process("reason")`. What needs processes or real time to mean anything is
marked `full`, or `soak`.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator

BEYOND_THE_GATE = ("full", "soak")
ALLOWED = "process"

FORBIDDEN = frozenset(
    {
        "time.sleep",
        "threading.Timer",
        "os.fork",
        "os.kill",
        "os.killpg",
        "subprocess.Popen",
        "subprocess.run",
        "subprocess.check_call",
        "subprocess.check_output",
        "multiprocessing.Process",
        "multiprocessing.get_context",
        # Helpers of the tests that start processes.
        "groups.started",
        "tiny_builder.start_builder",
        "tiny_run.launch",
        "tiny_run.start",
    }
)


def faults(path: pathlib.Path, name: str) -> list[str]:
    """Lists what a test reaches in its file that the gate may not do.

    Args:
      path: the file of the test.
      name: the test function, or Class::function.

    Returns:
      "call in line N" for each.
    """
    definitions, calls = _module(path)
    found, seen = [], set()
    waiting = [name.rpartition("::")[2]]
    while waiting:
        here = waiting.pop()
        if here in seen or here not in definitions:
            continue
        seen.add(here)
        found += [f"{call} in line {line}" for call, line in calls[here]]
        waiting += definitions[here]
    return sorted(found)


@functools.cache
def _module(
    path: pathlib.Path,
) -> tuple[dict[str, set[str]], dict[str, list[tuple[str, int]]]]:
    """Returns which names each definition uses, and its forbidden calls."""
    names: dict[str, set[str]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    for node in _definitions(ast.parse(path.read_text())):
        used = {
            word.id if isinstance(word, ast.Name) else word.arg
            for word in ast.walk(node)
            if isinstance(word, ast.Name | ast.arg)
        }
        # Methods of the same name in two classes are taken for one.
        names.setdefault(node.name, set()).update(used - {node.name})
        calls.setdefault(node.name, []).extend(
            (ast.unparse(word), word.lineno)
            for word in ast.walk(node)
            if isinstance(word, ast.Attribute) and ast.unparse(word) in FORBIDDEN
        )
    return names, calls


def _definitions(
    tree: ast.Module,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yields functions and classes, and the methods of classes of tests."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (one for one in node.body if isinstance(one, ast.FunctionDef))
        elif isinstance(node, ast.ClassDef):
            yield node
