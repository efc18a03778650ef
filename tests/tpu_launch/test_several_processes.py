"""Training by a group of processes under the launcher, one of which is killed."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

import pytest

from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_run
from tests.soak.jobs import Run, make_world
from tests.tiny_world import assert_same_bits, read_item

pytestmark = pytest.mark.full

_PROCESSES = 4
_KILLED_AT = 12
_SECONDS = 400


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def write_chain(run: Run) -> pathlib.Path:
    """A chain of `pretrain` alone, by four processes."""
    arguments = run.arguments("pretrain")
    files = [a.partition("=")[2] for a in arguments if a.startswith("--gin_file=")]
    bindings = [a.removeprefix("--gin.") for a in arguments if a.startswith("--gin.")]
    path = run.scratch / "chain.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "from tpu_launch import local\n"
        f"local.Chain:\n    root = {str(run.scratch)!r}\n"
        "    stages = [@local.Stage()]\n"
        'local.Stage:\n    command = "pretrain"\n'
        f"    gin_files = {files!r}\n    bindings = {bindings!r}\n"
        f"    processes = {_PROCESSES}\n"
    )
    return path


def _last_step(run: Run) -> int:
    lines = list(read_metrics(run.model_dir))
    return lines[-1]["step"] if lines else 0


def _workers(run: Run) -> dict[int, int]:
    """Process ids of the commands of a run, by their numbers."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            told = (path / "environ").read_bytes().split(b"\0")
            if str(run.scratch) in line:
                for number in range(_PROCESSES):
                    if b"JAX_PROCESS_ID=%d" % number in told:
                        found[number] = int(path.name)
    return found


def _wait(launcher: subprocess.Popen[str], condition) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _kill_one(run: Run, launcher: subprocess.Popen[str]) -> float:
    """Kills a process amid training; returns seconds until training goes on."""
    metrics = pathlib.Path(run.model_dir, "metrics.jsonl")
    _wait(launcher, lambda: _last_step(run) >= _KILLED_AT)
    before = _workers(run)
    os.kill(before[2], signal.SIGKILL)
    killed = time.monotonic()

    def all_are_new():
        now = _workers(run)
        return len(now) == _PROCESSES and not set(now.values()) & set(before.values())

    # Only what the group of before cannot have written counts.
    _wait(launcher, all_are_new)
    written = metrics.stat().st_mtime_ns
    resumes = max(finished_steps(open_store(run.model_dir)), default=0)
    _wait(
        launcher,
        lambda: metrics.stat().st_mtime_ns != written and _last_step(run) > resumes,
    )
    return time.monotonic() - killed


def test_a_killed_worker_changes_no_bit(world, tmp_path, monkeypatch):
    """Prints how long training stood still: see docs/benchmarks.md."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    states = []
    for name in ("whole", "killed"):
        run = Run(
            str(tmp_path / name),
            tmp_path / f"{name}-logs",
            world.corpus,
            mode="blocking",
            steps=40,
            log_period=1,
        )
        launcher = tiny_run.launch(write_chain(run))
        try:
            if name == "killed":
                seconds = _kill_one(run, launcher)
                print(f"\nfrom the kill to the first step: {seconds:.1f} s")
            said, _ = launcher.communicate(timeout=_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        assert launcher.returncode == 0, said
        # The code is of the killed one or of those that it left waiting.
        assert ("starting again" in said) == (name == "killed")
        store = open_store(run.model_dir)
        assert finished_steps(store)[-1] == run.steps
        states.append([read_item(store, run.steps, i) for i in ("params", "rest")])
    assert_same_bits(*states)
