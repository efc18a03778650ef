"""The registry names what is there: modules, configurations, help and metrics."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import pytest

from realm_jax import stages
from realm_jax.cli import configuration
from realm_jax.stages import STAGES
from tests import tiny_run
from tpu_launch.chain import configured_stage

CLI = pathlib.Path(stages.__file__).parent / "cli"


def commands_of_the_cli():
    """Modules of `realm_jax.cli` with a `main` that takes a command line."""
    for path in CLI.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
            if is_main and [arg.arg for arg in node.args.args] == ["argv", "stop"]:
                yield path.stem


def test_every_command_is_registered_and_no_other():
    assert {spec.name for spec in STAGES.values()} == set(commands_of_the_cli())
    assert all(command == spec.command for command, spec in STAGES.items())


def test_the_run_file_of_a_command_is_known_by_what_it_binds(tmp_path):
    for command, spec in STAGES.items():
        if not spec.config:
            continue
        config = spec.load_config()
        fields = {field.name for field in dataclasses.fields(config)}
        assert "corpus" in fields
        # Speed, checkpoints and resuming are those of training stages alone.
        assert spec.trains == ("train_steps" in fields)
        assert not spec.trains or config.stage is spec
        parse(command, tmp_path, f"runs/{spec.name}")
        assert configured_stage() is spec


def test_a_builder_beside_its_trainer_is_not_what_is_launched(tmp_path):
    parse("pretrain", tmp_path, "runs/pretrain", "runs/build_index")
    assert configured_stage() is stages.PRETRAIN


def parse(command, folder, *files):
    arguments = [
        f"--gin_file={tiny_run.GIN / file}.gin" for file in (*files, "models/tiny")
    ]
    bindings = [f"--gin.{b}" for b in tiny_run.bindings(command, folder)]
    configuration.parse(configuration.make_parser("", ""), [*arguments, *bindings])


@pytest.mark.process("imports are those of a process")
def test_the_registry_loads_nothing_of_what_it_names():
    program = (
        "import sys; before = set(sys.modules); import realm_jax.stages; "
        "print(*{name for name in set(sys.modules) - before if 'realm' in name})"
    )
    command = [sys.executable, "-c", program]
    loaded = subprocess.check_output(command, cwd=tiny_run.ROOT, text=True)
    # What the package itself imports is there before any module of it.
    expected = {"realm_jax", "realm_jax.errors", "realm_jax.stages"}
    assert set(loaded.split()) <= expected


def test_stages_have_titles_for_people():
    for name, title in {
        "warm_start": "Warm start",
        "build-index": "Index builder",
        "ask": "ask",
        "somebody's own": "somebody's own",
    }.items():
        assert stages.title_of(name) == title
