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

MINILM = ".cache/data/minilm-l6"
# The chains are those that `realm init` writes, of a few updates a stage.
SHORTER = [
    f"--gin.{stage}/{macro}={value}"
    for stage, steps in {"warm_start": 4, "pretrain": 8, "finetune": 4}.items()
    for macro, value in {"TRAIN_STEPS": steps, "WARMUP_STEPS": 1}.items()
]
OF_FINE_TUNING = [setting for setting in SHORTER if "finetune" in setting]


def commands(heading):
    """Returns the indented lines of a section."""
    text = (tiny_run.ROOT / "README.md").read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


def run(line, clone, more=()):
    """Runs a command in a clone; returns what it prints."""
    words = [*shlex.split(line, comments=True), *more]
    environment = {
        **tiny_run.environment(),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        # What is installed is another checkout.
        "PYTHONPATH": str(clone),
    }
    with subprocess.Popen(
        words,
        cwd=clone,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def test_own_text_is_trained_on_in_a_clone(tmp_path):
    """The first chain is the one without `--start`; it makes a model to start with."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", tiny_run.ROOT, clone], check=True)
    (clone / MINILM).parent.mkdir(parents=True)
    (clone / MINILM).symlink_to(tiny_run.ROOT / MINILM)
    tiny_run.make_inputs(clone)
    init, chain, ask = commands("Your own text")
    first, start = init.rsplit(" ", 1)
    assert start == "--start=runs/quickstart"
    run(first.replace("runs/my", "runs/quickstart"), clone)
    run(chain.replace("runs/my", "runs/quickstart"), clone, SHORTER)
    assert "60 documents" in run(init, clone)
    assert "finetune" in run(chain, clone, OF_FINE_TUNING)
    assert not (clone / "runs/my/pretrain").exists()
    assert (clone / "runs/my/evaluate/report.html").exists()
    said = run(ask, clone)
    assert "p(y|x)" in said
    assert "Town" in said
