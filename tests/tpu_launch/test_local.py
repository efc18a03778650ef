"""The launcher: the whole chain, run again, interrupted, killed."""

import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from realm_jax.training.metrics import read_metrics
from tests import tiny_run

_SECONDS = 240


def test_chain_ends_with_a_report(finished):
    said = (finished / "said.txt").read_text()
    page = (finished / "evaluate" / "report.html").read_text()
    assert "Town" in page
    assert json.loads((finished / "evaluate" / "report.json").read_text())
    assert len(_indexes(finished)) >= 2
    for number, stage in enumerate(tiny_run.CHAIN, start=1):
        assert f"{number}/5 {stage}" in said
    assert "error" not in said.lower()
    assert "Traceback" not in (finished / "build-index.log").read_text()
    assert not list(finished.rglob("*.partial"))


def test_run_again_says_that_it_is_done(finished, tmp_path):
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start", "pretrain")
    before = _contents(root / "pretrain" / "checkpoints")
    began = time.monotonic()
    launcher = tiny_run.launch(tiny_run.write_chain(root, ["prepare", "pretrain"]))
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 0, said
    assert "prepare: done" in said
    assert "pretrain: done, 12 steps" in said
    assert _contents(root / "pretrain" / "checkpoints") == before
    # The builder beside it has nothing to do, and sees that.
    assert time.monotonic() - began < 100


@pytest.mark.long
def test_killed_and_interrupted_runs_go_on(finished, tmp_path):
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    tiny_run.write_sizes(root, pretrain_steps=1_000_000, refresh_period=100)
    chain = tiny_run.write_chain(root, ["pretrain"])

    launcher = tiny_run.launch(chain)
    _wait(launcher, lambda: _index_in_use(root) > 0)
    first_builder = _pid(root, "index_builder")
    os.kill(first_builder, signal.SIGKILL)
    built = max(_indexes(root))
    _wait(launcher, lambda: _pid(root, "index_builder") != first_builder)
    _wait(launcher, lambda: max(_indexes(root)) > built)
    _wait(launcher, lambda: _checkpoints(root))
    os.kill(_pid(root, "trainer"), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 128 + signal.SIGKILL, said
    assert "pretrain ended with code 137" in said
    assert _processes_of(launcher.pid) == []

    killed_at = max(_checkpoints(root))
    launcher = tiny_run.launch(chain)
    _wait(launcher, lambda: max(_checkpoints(root)) > killed_at)
    os.killpg(launcher.pid, signal.SIGINT)
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    assert "run the same command again" in said
    assert _processes_of(launcher.pid) == []

    reached = max(_checkpoints(root))
    tiny_run.write_sizes(root, pretrain_steps=reached + 4)
    launcher = tiny_run.launch(tiny_run.write_chain(root, ["pretrain"]))
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 0, said
    assert f"done, {reached + 4:,} steps" in said
    assert max(_indexes(root)) == reached + 4
    steps = [line["step"] for line in read_metrics(str(root / "pretrain"))]
    assert steps == sorted(set(steps))


def test_names_what_a_builder_that_cannot_work_said(finished, tmp_path):
    root = tiny_run.copy(finished, tmp_path, "corpus")
    files = tiny_run.gin_files("build-index")
    chain = root / "chain.gin"
    # A trainer would do as well; this one waits for its retrievers and costs nothing.
    chain.write_text(
        f"""{(root / "sizes.gin").read_text()}
from tpu_launch import local
local.Chain:
    root = {str(root)!r}
    stages = [@local.Stage()]
local.Stage:
    command = "build-index"
    gin_files = {files!r}
    bindings = {tiny_run.bindings("build-index", root)!r}
    beside = "build-index"
    beside_gin_files = {files!r}
    beside_bindings = {tiny_run.bindings("build-index", root, CORPUS="nowhere")!r}
"""
    )
    launcher = tiny_run.launch(chain)
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 2
    error = said.strip().splitlines()[-1]
    assert error.startswith("error: build-index ended with code 2: expected")
    assert "nowhere" in error
    assert _processes_of(launcher.pid) == []


def _wait(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)


def _commits(folder: pathlib.Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("[0-9]*.json")]


def _indexes(root: pathlib.Path) -> list[int]:
    return _commits(root / "pretrain" / "index" / "commits")


def _checkpoints(root: pathlib.Path) -> list[int]:
    return _commits(root / "pretrain" / "checkpoints")


def _index_in_use(root: pathlib.Path) -> float:
    lines = list(read_metrics(str(root / "pretrain")))
    return lines[-1]["index_step"] if lines else -1


def _pid(root: pathlib.Path, role: str) -> int:
    return json.loads((root / "pretrain" / "jobs" / f"{role}.json").read_text())["pid"]


def _processes_of(session: int) -> list[str]:
    """Command lines of the processes of a session that still run."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except OSError:  # It ended meanwhile.
            continue
        state, its_session = fields[0], int(fields[3])
        if its_session == session and state != "Z":
            found.append(command)
    return found


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
