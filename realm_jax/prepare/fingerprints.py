"""Fingerprints of the code that makes parts and examples.

Parts are only used again, and examples only kept, if the code that made them is known
to be this code. It is compared by its source, as parsed: comments and layout do not
count, everything else does.

Two kinds of code are told apart. That of this package is recorded as a whole. That of a
task of the user's own is recorded by module: those that `--import_module` names and
those of the user's modules that they import, at any depth.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

import realm_jax

_PACKAGE = Path(realm_jax.__file__).resolve().parent
# What blocks and examples are made by; the rest of the package only reads them.
_MAKERS = ("data", "prepare")
_INSTALLED = {"site-packages", "dist-packages"}


@functools.cache
def package_code() -> dict[str, str]:
    """Returns the version of this package, and a SHA-256 of the source that counts."""
    digest = hashlib.sha256()
    for folder in _MAKERS:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(_PACKAGE).as_posix()
            digest.update(f"{name} {source_sha256(path)}\n".encode())
    return {"version": realm_jax.__version__, "source": digest.hexdigest()}


def module_code(names: Iterable[str]) -> dict[str, str]:
    """Returns a SHA-256 of the source of each module of the user's, by name.

    Args:
      names: modules, which are imported if they are not yet. They count wherever they
        lie; of what they import, the standard library, installed packages and this
        package do not.
    """
    found: dict[str, str] = {}
    waiting: list[str] = []
    for name in names:
        importlib.import_module(name)
        packages = [*_with_parents(name)][:-1]
        waiting += [name, *filter(_is_users, packages)]
    while waiting:
        name = waiting.pop()
        path = _source_file(name)
        if path is None or name in found:
            continue
        found[name] = source_sha256(path)
        waiting += filter(_is_users, _imports(name, path))
    return dict(sorted(found.items()))


def differing_modules(made: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the modules that two results of `module_code` do not share, sorted."""
    return sorted({name for name, _ in made.items() ^ now.items()})


def source_sha256(path: Path) -> str:
    """Returns a SHA-256 of a source file without comments and layout."""
    content = path.read_bytes()
    # Of an extension module, or source that does not parse, the bytes count.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        content = ast.dump(ast.parse(content)).encode()
    return hashlib.sha256(content).hexdigest()


def listing_sha256(folder: str) -> str:
    """Returns a SHA-256 of the names, sizes and times of the files of a folder.

    It is "" if there is no such folder.
    """
    root = epath.Path(folder).expanduser()
    if not root.is_dir():
        return ""
    files = [(path, path.stat()) for path in sorted(root.iterdir())]
    lines = [f"{path.name} {stat.length} {stat.mtime}" for path, stat in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _source_file(name: str) -> Path | None:
    """Returns the file of a module; None if there is no such module, or no file."""
    try:
        # Of a module that is loaded, not of one that is found by its name now.
        found: Any = sys.modules.get(name) or importlib.util.find_spec(name)
        path = Path(getattr(found, "__file__", None) or found.origin).resolve()
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
    return path if path.is_file() else None


def _is_users(name: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return False
    path = _source_file(name)
    if path is None or _INSTALLED & set(path.parts):
        return False
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    others = [*map(Path, libraries), _PACKAGE, _PACKAGE.parent / "tasks"]
    return not any(path.is_relative_to(other) for other in others)


def _imports(name: str, path: Path) -> Iterator[str]:
    """Yields all that a module may import, also within functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            yield from _with_parents(base)
            for alias in node.names:
                # A module of the package, or a name in the module.
                yield f"{base}.{alias.name}"


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
