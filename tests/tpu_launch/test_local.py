"""The launcher: the whole chain, run again, interrupted, killed."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from realm_jax import run_record
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_run
from tests.prepare.folders import contents
from tests.tiny_world import assert_same_bits, read_item
from tests.waiting import PATIENCE
from tpu_launch import records
from tpu_launch.local import TOKEN, Chain, token_of
from tpu_launch.run import BUILDER, TRAINER, run_id

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of a chain that the launcher has run; read only."""
    root = tmp_path_factory.mktemp("launched")
    tiny_run.make_inputs(root)
    launcher = tiny_run.launch(
        tiny_run.write_chain(root, list(tiny_run.CHAIN), processes=2)
    )
    (root / "said.txt").write_text(_end(launcher))
    return root


def test_chain_ends_with_a_report(launched):
    said = (launched / "said.txt").read_text()
    assert "Town" in (launched / "evaluate" / "report.html").read_text()
    assert json.loads((launched / "evaluate" / "report.json").read_text())
    assert len(_indexes(launched)) >= 2
    for number, stage in enumerate(tiny_run.CHAIN, start=1):
        assert f"{number}/5 {stage}" in said
    assert "error" not in said.lower()
    for log in (launched / "launched").rglob("*.log"):
        assert "Traceback" not in log.read_text()
    store = open_store(launched / "pretrain")
    folder = launched / "launched" / run_id("pretrain", str(launched / "pretrain"))
    for role, workers in ((TRAINER, 2), (BUILDER, 1)):
        assert records.outcomes(store)[role].done
        assert len(list((folder / f"{role}-1").glob("*.log"))) == workers
    assert not list(launched.rglob("*.partial"))
    started = {start.command: start for start in run_record.read_records(store)}
    assert set(started) == {"pretrain", "build-index"}
    assert started["build-index"].settings["builder"]["poll_seconds"] == 0.05


def test_run_again_says_that_it_is_done(launched, tmp_path):
    root = tiny_run.copy(launched, tmp_path, "corpus", "warm_start", "pretrain")
    before = contents(root / "pretrain" / "checkpoints")
    chain = tiny_run.write_chain(root, ["prepare", "pretrain"])
    token = token_of(Chain(str(root), ()))
    # As of a launcher that was killed.
    leftover = subprocess.Popen(["sleep", "600"], env={**os.environ, TOKEN: token})
    launcher = tiny_run.launch(chain)
    assert leftover.wait() == -signal.SIGTERM
    said = _end(launcher)
    assert f"ending process {leftover.pid}, whose launcher is gone" in said
    assert "prepare: done" in said
    assert "trainer: done" in said
    (log,) = (root / "launched").glob("pretrain-*/trainer-1/0.log")
    assert "pretrain: done, 12 steps" in log.read_text()
    assert contents(root / "pretrain" / "checkpoints") == before


def test_two_trainers_and_a_builder_whatever_is_killed(finished, tmp_path, bucket):
    """One of each kind, the launcher and all together, in an order of chance."""
    model_dir = f"{bucket}/killed"
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    run = _Run(root, model_dir)
    run.write(steps=200)
    chance = random.Random(5)
    kinds = ["trainer", "builder", "launcher", "all"]
    for kind in chance.sample(kinds, len(kinds)):
        launcher = run.launcher()
        # A failure at one place four times in a row is one that repeats.
        reached = run.checkpoint()
        _wait(launcher, lambda reached=reached: run.checkpoint() > reached)
        _wait(launcher, lambda kind=kind: run.victims(kind))
        for pid in run.victims(kind, chance):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind in ("launcher", "all"):
            launcher.wait(10)
        print(f"killed {kind} after step {run.checkpoint()}")
    assert "trainer: done" in _end(run.launcher())
    store = open_store(model_dir)
    assert finished_steps(store)[-1] == 200
    assert SnapshotSeries(store, INDEX_SERIES).latest_step() == 200
    steps = [line["step"] for line in read_metrics(model_dir)]
    assert steps == sorted(set(steps))
    assert run.processes() == []


def test_an_interrupted_run_goes_on_and_one_that_is_done_may_be_prolonged(
    finished, tmp_path
):
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    run = _Run(root, str(root / "pretrain"))
    run.write(steps=1_000_000)
    launcher = run.launcher()
    _wait(launcher, lambda: run.checkpoint() > 0)
    os.killpg(launcher.pid, signal.SIGINT)
    said = _end(launcher, code=128 + signal.SIGINT)
    assert "Traceback" not in said
    assert "run the same command again to go on" in said
    assert run.processes() == []
    for more in (4, 8):
        reached = run.checkpoint()
        run.write(steps=reached + more)
        assert "trainer: done" in _end(run.launcher())
        assert max(_indexes(root)) == reached + more


def test_a_killed_worker_of_four_changes_no_bit(finished, tmp_path):
    """Prints how long training stood still: see docs/benchmarks.md."""
    states = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        root = tiny_run.copy(finished, tmp_path / name, "corpus", "warm_start")
        run = _Run(root, str(root / "pretrain"), processes=4)
        run.write(steps=40, mode="blocking")
        launcher = run.launcher()
        if name == "killed":
            seconds = _kill_one_of_four(run, launcher)
            print(f"\nfrom the kill to the first step: {seconds:.1f} s")
        said = _end(launcher)
        # The code is of the killed one or of those that it left waiting.
        assert ("starting again" in said) == (name == "killed")
        store = open_store(root / "pretrain")
        states.append([read_item(store, 40, item) for item in ("params", "rest")])
    assert_same_bits(*states)


def _kill_one_of_four(run: "_Run", launcher: subprocess.Popen[str]) -> float:
    """Kills a process amid training; returns seconds until training goes on."""
    _wait(launcher, lambda: run.last_step() >= 12)
    before = set(run.processes("main pretrain"))
    os.kill(sorted(before)[2], signal.SIGKILL)
    killed = time.monotonic()

    def all_are_new():
        now = set(run.processes("main pretrain"))
        return len(now) == 4 and not now & before

    # Only what the group of before cannot have written counts.
    _wait(launcher, all_are_new)
    written, resumes = run.metrics_time(), run.checkpoint()
    _wait(launcher, lambda: run.metrics_time() != written and run.last_step() > resumes)
    return time.monotonic() - killed


class _Run:
    """Pre-training by several processes, with a builder beside them."""

    def __init__(self, root: pathlib.Path, model_dir: str, processes: int = 2):
        self._root, self._model_dir, self._processes = root, model_dir, processes
        self._chain = root / "chain.gin"
        self._launcher: subprocess.Popen[str] | None = None

    def write(self, steps: int, mode: str = "async") -> None:
        tiny_run.write_sizes(self._root, pretrain_steps=steps, refresh_period=20)
        sizes = self._root / "sizes.gin"
        text = sizes.read_text()
        sizes.write_text(
            text.replace("checkpoint_period = 100", "checkpoint_period = 10")
        )
        tiny_run.write_chain(
            self._root,
            ["pretrain"],
            processes=self._processes,
            model_dir=self._model_dir,
        )
        if mode == "blocking":
            text = self._chain.read_text().replace('companion = "build-index"', "")
            text = text.replace("    bindings = [", f"    bindings = [{_BLOCKING!r}, ")
            self._chain.write_text(text)

    def launcher(self) -> subprocess.Popen[str]:
        """The launcher that runs; another one if it was killed."""
        if self._launcher is None or self._launcher.poll() is not None:
            self._launcher = tiny_run.launch(self._chain)
        return self._launcher

    def checkpoint(self) -> int:
        return max(finished_steps(open_store(self._model_dir)), default=0)

    def last_step(self) -> int:
        return max((line["step"] for line in read_metrics(self._model_dir)), default=0)

    def metrics_time(self) -> int:
        return pathlib.Path(self._model_dir, "metrics.jsonl").stat().st_mtime_ns

    def processes(self, *words: str) -> list[int]:
        """What of this run is at work, by words of the command line."""
        lines = {
            process.pid: " ".join(process.info["cmdline"] or ())
            for process in psutil.process_iter(["cmdline"])
        }
        sought = str(self._chain), *words
        return [pid for pid in lines if all(word in lines[pid] for word in sought)]

    def victims(self, kind: str, chance: random.Random | None = None) -> list[int]:
        """Processes to be killed; one of them by chance, or all of this kind."""
        jobs = {"trainer": "main pretrain", "builder": "main build-index"}
        words = {**jobs, "launcher": "tpu_launch local", "all": ""}[kind]
        found = self.processes(words)
        return found if kind == "all" or chance is None else [chance.choice(found)]


_BLOCKING = 'REFRESH_MODE="blocking"'


def test_names_what_a_builder_that_cannot_work_said(finished, tmp_path):
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    chain = tiny_run.write_chain(root, ["pretrain"])
    of_builder = tiny_run.bindings("build-index", root)
    nowhere = tiny_run.bindings("build-index", root, CORPUS="nowhere")
    chain.write_text(chain.read_text().replace(repr(of_builder), repr(nowhere)))
    error = _end(tiny_run.launch(chain), code=2).strip().splitlines()[-1]
    assert error.startswith("error: builder: expected")
    assert "nowhere" in error
    assert _Run(root, "").processes() == []


def _end(launcher: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for the end of a launcher; returns what it has said."""
    said, _ = launcher.communicate()
    assert launcher.returncode == code, said
    return said


def _wait(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)


def _indexes(root: pathlib.Path) -> list[int]:
    return SnapshotSeries(open_store(root / "pretrain"), INDEX_SERIES).steps()
