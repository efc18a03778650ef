"""A folder that cannot be written is refused before anything heavy is imported."""

import os
import subprocess
import sys

import pytest

from realm_jax.cli.model_dir import require_writable_folder
from realm_jax.errors import BadInputError
from tests import tiny_run

# Files cannot be made there, not even by root.
UNWRITABLE = "/proc"


def test_every_command_that_writes_one_refuses(inputs, refuse):
    for command in ("warm-start", "pretrain", "build-index", "finetune", "evaluate"):
        words = tiny_run.arguments(command, inputs, MODEL_DIR=f"{UNWRITABLE}/run")
        refuse(words, f"MODEL_DIR, got {UNWRITABLE}/run", "choose another")
    for words in ([f"--output={UNWRITABLE}/run"], ["--output", f"{UNWRITABLE}/run"]):
        refuse(["export", inputs, *words], f"--output, got {UNWRITABLE}/run")
    (inputs / "mine.gin").write_text(f'MODEL_DIR = "{UNWRITABLE}/run"\n')
    words = tiny_run.arguments("finetune", inputs)
    kept = [word for word in words if not word.startswith("--gin.MODEL_DIR")]
    refuse([*kept, f"--gin_file={inputs}/mine.gin"], f"{UNWRITABLE}/run")


def test_the_output_is_not_the_working_directory_for_want_of_a_name(refuse):
    for words in (["compare", "a", "b"], ["adapt", "text"], ["export", "runs/my"]):
        refuse([*words, "--output="], "expected a folder as --output, got an empty")


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
    assert list(tmp_path.iterdir()) == []
