"""Imports point downward, and heavy libraries have one home."""

import ast
import collections
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("realm_jax", "tasks", "tpu_launch")

# Higher may import lower and its own, never the other way round.
LAYERS = (
    (
        *("axes", "errors", "extras", "hardware", "manifests", "multihost"),
        *("placement", "ranges", "registry", "rendezvous", "run_record", "stages"),
        *("storage", "types"),
    ),
    ("data", "metrics", "models", "objectives"),
    ("answering", "index", "prepare", "weights"),
    ("training", "evaluation", "tasks"),
    ("api", "cli", "t5x", "tpu_launch"),
)
LAYER = {name: number for number, layer in enumerate(LAYERS) for name in layer}

# Library -> the places that may import it.
HOMES = {
    "tensorflow": ("tasks", "realm_jax.prepare", "realm_jax.weights"),
    "seqio": ("tasks", "realm_jax.prepare"),
    "apache_beam": ("realm_jax.prepare",),
    "scann": ("realm_jax.index.scann_searcher",),
    "orbax": ("realm_jax.training.checkpoints", "realm_jax.t5x"),
    "t5x": ("realm_jax.t5x",),
    "gin": ("realm_jax.cli", "tpu_launch"),
    "kubernetes": ("tpu_launch.gke",),
    "aiohttp": ("realm_jax.evaluation.server",),
    "bm25s": ("realm_jax.answering.hybrid",),
    "rich": ("realm_jax.cli", "tpu_launch"),
    # Of the user alone: a `tasks.py` of theirs may shadow the registrations.
    "tasks": ("tasks",),
    # Of gin files alone, so that a missing T5X is missed nowhere else.
    "realm_jax.t5x": ("realm_jax.t5x",),
}


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


MODULES = modules()


@functools.cache
def imports(path: pathlib.Path, *, at_once: bool = False) -> set[str]:
    """Every module a file imports; inside functions too, unless it is `at_once`."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else str(node.module))
    return found


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def package(name: str) -> str:
    """The package that a module is in, or the module where it is in none."""
    return name.removeprefix("realm_jax.").partition(".")[0]


def test_imports_point_downward():
    upward = [
        f"{name} imports {imported}"
        for name in MODULES.keys() - {"realm_jax"}
        for imported in imports(MODULES[name]) & MODULES.keys() - {"realm_jax"}
        if LAYER[package(imported)] > LAYER[package(name)]
    ]
    assert sorted(upward) == []


def test_nothing_is_imported_around_a_circle():
    """Neither modules nor packages: of two of a layer, one knows the other at most."""
    modules, packages = {}, collections.defaultdict(set)
    for name, path in MODULES.items():
        modules[name] = imports(path) & MODULES.keys() - {name}
        packages[package(name)] |= set(map(package, modules[name])) - {package(name)}
    packages.pop("realm_jax")
    for graph in (modules, packages):
        graphlib.TopologicalSorter(graph).prepare()


def test_heavy_libraries_have_one_home():
    away = [
        f"{name} imports {library}"
        for library, homes in HOMES.items()
        for name, path in MODULES.items()
        if any(inside(imported, library) for imported in imports(path))
        if not any(inside(name, home) for home in homes)
    ]
    assert away == []


def test_tensorflow_is_imported_lazily_where_a_trainer_could_import_it():
    """`realm_jax.prepare.prepare` is named by gin files that trainers read too."""
    seen, waiting = set(), ["realm_jax.prepare.prepare"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        imported = imports(MODULES[name], at_once=True)
        heavy = {"seqio", "tensorflow", "tensorflow_datasets", "apache_beam"}
        assert not heavy & {module.partition(".")[0] for module in imported}, name
        waiting += imported & MODULES.keys() - seen
    assert "realm_jax.prepare.blocks" in seen


@pytest.mark.process("imports are those of a process")
def test_a_trainer_reads_of_its_machines_without_the_launcher():
    """In a process that has read hardware files, and the paper's run, as it would."""
    program = """
import sys
from realm_jax.cli import configuration
for files in sys.argv[1:]:
    arguments = [f"--gin_file={file}" for file in files.split(",")]
    if "gin/runs/" in files:
        macros = ("MODEL_DIR", "CORPUS", "TASK", "WARM_START")
        arguments += [f"--gin.{name}='x'" for name in macros]
    configuration.parse(configuration.make_parser("realm pretrain", ""), arguments)
assert "realm_jax.hardware" in sys.modules
print(*(name for name in sys.modules if name.partition(".")[0] == "tpu_launch"))
"""
    hardware = sorted(map(str, (ROOT / "gin" / "hardware").glob("*.gin")))
    run = f"{ROOT}/gin/runs/pretrain_paper.gin,{hardware[-1]}"
    done = subprocess.run(
        [sys.executable, "-c", program, *hardware, run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_gin_and_tests_are_no_packages():
    """Or `import gin` would find our folder instead of the library."""
    assert not (ROOT / "gin" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
