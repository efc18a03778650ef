"""Every user of SeqIO has a `tasks.py`; it stands in the way of nothing."""

import os
import subprocess
import sys

import pytest

from tests import tiny_run


@pytest.mark.full
def test_prepare_beside_a_users_own_tasks(tmp_path):
    tiny_run.make_inputs(tmp_path)
    (tmp_path / "tasks.py").write_text(
        "raise RuntimeError('the tasks of someone else')\n"
    )
    environment = tiny_run.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(tiny_run.ROOT)])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "realm_jax.cli.main", "prepare"),
            "--gin_file=gin/runs/prepare.gin",
            "--gin.CORPUS='corpus'",
            "--gin.SOURCE='articles.jsonl'",
            "--gin.NAME='mine'",
            "--gin.prepare.PrepareConfig.validation_fraction=0.1",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "corpus" / "examples" / "mine_salient" / "train").is_dir()
