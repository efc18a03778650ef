"""Imports point downward, and heavy libraries stay in their rooms."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("realm_jax", "tasks", "tpu_launch")

# Longest matching prefix decides. Higher may import lower and its own, never the
# other way round.
LAYERS = {
    "realm_jax": 1,
    "realm_jax.axes": 1,
    "realm_jax.types": 1,
    "realm_jax.chips": 1,
    "realm_jax.errors": 1,
    "realm_jax.storage": 1,
    "realm_jax.models": 2,
    "realm_jax.objectives": 2,
    "realm_jax.data": 2,
    "realm_jax.index": 2,
    "realm_jax.training.flops": 2,
    "realm_jax.training.partitioning": 2,
    "realm_jax.training.optimizers": 2,
    "realm_jax.training.metrics": 2,
    "realm_jax.evaluation": 2,
    "realm_jax.index.embed": 3,
    "realm_jax.index.follower": 3,
    "realm_jax.training": 3,
    "realm_jax.weights": 3,
    "tasks": 3,
    "realm_jax.training.loop": 4,
    "realm_jax.training.stage": 4,
    "realm_jax.training.warm_start": 4,
    "realm_jax.training.pretrain": 4,
    "realm_jax.training.finetune": 4,
    "realm_jax.training.first_index": 4,
    "realm_jax.training.index_link": 4,
    "realm_jax.index.build": 4,
    "realm_jax.index.builder": 4,
    "realm_jax.evaluation.answering": 4,
    "realm_jax.evaluation.ask": 4,
    "realm_jax.evaluation.following": 4,
    "realm_jax.evaluation.open_qa": 4,
    "realm_jax.evaluation.page": 4,
    "realm_jax.evaluation.provenance": 4,
    "realm_jax.evaluation.trained": 4,
    "realm_jax.evaluation.masked_spans": 4,
    "realm_jax.evaluation.report": 4,
    "realm_jax.evaluation.run": 4,
    "realm_jax.cli": 5,
    "tpu_launch": 5,
}

# Library -> the places that may import it.
ROOMS = {
    "tensorflow": ("tasks", "realm_jax.data.feature_converters", "realm_jax.weights"),
    "seqio": ("tasks", "realm_jax.data.feature_converters"),
    "scann": ("realm_jax.index.searchers",),
    "orbax": ("realm_jax.training.checkpoints",),
    "gin": ("realm_jax.cli", "tpu_launch"),
    "aiohttp": ("realm_jax.evaluation.page",),
    "rich": ("realm_jax.cli", "tpu_launch"),
}


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


MODULES = modules()


def imports(path: pathlib.Path) -> set[str]:
    """Every module a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else str(node.module))
    return found


def imported_at_once(path):
    """Imports that stand at the top of a module, outside of any function."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else str(node.module))
    return found


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def layer(name: str) -> int:
    return LAYERS[max((p for p in LAYERS if inside(name, p)), key=len)]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downward(name):
    for imported in imports(MODULES[name]):
        if any(inside(imported, package) for package in PACKAGES):
            assert layer(imported) <= layer(name), f"{name} imports {imported}"


@pytest.mark.parametrize("library", ROOMS)
def test_heavy_libraries_stay_in_their_rooms(library):
    for name, path in MODULES.items():
        uses = any(inside(imported, library) for imported in imports(path))
        allowed = any(inside(name, room) for room in ROOMS[library])
        assert allowed or not uses, f"{name} imports {library}"


def test_tensorflow_is_imported_lazily_where_a_trainer_could_import_it():
    """`tasks.prepare` is named by gin files that trainers read too."""
    seen, waiting = set(), ["tasks.prepare"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        imported = imported_at_once(MODULES[name])
        heavy = {"seqio", "tensorflow", "tensorflow_datasets", "apache_beam"}
        assert not heavy & {module.partition(".")[0] for module in imported}, name
        waiting += [
            module for module in imported & MODULES.keys() if module not in seen
        ]
    assert "tasks.make_blocks" in seen


def test_no_module_imports_itself_around_a_circle():
    graph = {
        name: {m for m in imports(path) if m in MODULES and m != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for imported in graph[name]:
                visit(imported, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_gin_and_tests_are_no_packages():
    """Or `import gin` would find our folder instead of the library."""
    assert not (ROOT / "gin" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
