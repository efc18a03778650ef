"""The commands of README's "Your own text", as they stand there, in a clone."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import tiny_run

pytestmark = pytest.mark.full

# The chain is the one that `realm init` writes, of a few updates a stage.
SHORTER = [
    f"--gin.{stage}/{macro}={value}"
    for stage, steps in {"warm_start": 4, "pretrain": 8, "finetune": 4}.items()
    for macro, value in {"TRAIN_STEPS": steps, "WARMUP_STEPS": 1}.items()
]


def commands(heading):
    """Returns the indented lines of a section."""
    text = (tiny_run.ROOT / "README.md").read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


def test_own_text_is_trained_on_in_a_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", tiny_run.ROOT, clone], check=True)
    tiny_run.make_inputs(clone)
    environment = {
        **tiny_run.environment(),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        # What is installed is another checkout.
        "PYTHONPATH": str(clone),
    }
    lines = commands("Your own text")
    assert [line.split()[0] for line in lines] == ["realm", "python", "realm"]
    said = []
    for line in lines:
        words = shlex.split(line)
        words += SHORTER if "tpu_launch" in words else []
        with subprocess.Popen(
            words,
            cwd=clone,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            said.append(process.communicate()[0])
        assert process.returncode == 0, said[-1]
    assert "60 documents" in said[0]
    assert (clone / "runs" / "my" / "evaluate" / "report.html").exists()
    assert "p(y|x)" in said[2]
    assert "Town" in said[2]
