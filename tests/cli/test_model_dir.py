"""A folder that cannot be written is refused before anything heavy is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

from realm_jax.cli.main import main
from realm_jax.cli.model_dir import require_writable_folder
from realm_jax.errors import BadInputError
from tests import tiny_run

# Files cannot be made there, not even by root.
UNWRITABLE = "/proc"


@pytest.fixture
def inputs(tmp_path):
    tiny_run.make_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command", ["warm-start", "pretrain", "build-index", "finetune", "evaluate"]
)
def test_every_command_that_writes_one_refuses(command, inputs, capsys):
    arguments = tiny_run.arguments(command, inputs, MODEL_DIR=f"{UNWRITABLE}/run")
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"MODEL_DIR, got {UNWRITABLE}/run" in line
    assert "choose another" in line


@pytest.mark.process("imports are those of a process")
def test_nothing_heavy_is_imported_before(inputs):
    arguments = tiny_run.arguments("finetune", inputs, MODEL_DIR=f"{UNWRITABLE}/run")
    program = (
        "import sys; from realm_jax.cli.main import main; "
        "code = main(sys.argv[1:]); "
        "assert not {'jax', 'numpy', 'gin'} & set(sys.modules); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        cwd=tiny_run.ROOT,
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr


def test_a_folder_that_a_gin_file_names_is_refused_too(inputs, capsys):
    (inputs / "mine.gin").write_text(f'MODEL_DIR = "{UNWRITABLE}/run"\n')
    arguments = [
        word
        for word in tiny_run.arguments("finetune", inputs)
        if not word.startswith("--gin.MODEL_DIR")
    ]
    assert main([*arguments, f"--gin_file={inputs}/mine.gin"]) == 2
    assert f"{UNWRITABLE}/run" in capsys.readouterr().err


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/run"):
        with pytest.raises(BadInputError, match=r"it is a file.*choose another"):
            require_writable_folder("MODEL_DIR", str(tmp_path / place))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_asked_of_the_system(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInputError, match="Permission denied"):
        require_writable_folder("MODEL_DIR", str(tmp_path / "run"))


def test_a_folder_that_does_not_exist_yet_is_not_made(tmp_path):
    require_writable_folder("MODEL_DIR", str(tmp_path / "a" / "b"))
    require_writable_folder("MODEL_DIR", "gs://bucket/run")
    assert list(pathlib.Path(tmp_path).iterdir()) == []
