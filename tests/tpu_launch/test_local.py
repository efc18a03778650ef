"""The launcher: the whole chain, run again, interrupted, killed."""

import ast
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from realm_jax import settings
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_run
from tpu_launch import local, records
from tpu_launch.local import TOKEN, Chain, Runner, Stage, token_of
from tpu_launch.run import BUILDER, TRAINER, run_id

_SECONDS = 240


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of a chain that the launcher has run; read only."""
    root = tmp_path_factory.mktemp("launched")
    tiny_run.make_inputs(root)
    launcher = tiny_run.launch(
        tiny_run.write_chain(root, list(tiny_run.CHAIN), processes=2)
    )
    said, _ = launcher.communicate(timeout=2 * _SECONDS)
    assert launcher.returncode == 0, said
    (root / "said.txt").write_text(said)
    return root


@pytest.mark.full
def test_chain_ends_with_a_report(launched):
    said = (launched / "said.txt").read_text()
    page = (launched / "evaluate" / "report.html").read_text()
    assert "Town" in page
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
    started = {start.command: start for start in settings.read_starts(store)}
    assert set(started) == {"pretrain", "build-index"}
    assert started["build-index"].settings["builder"]["poll_seconds"] == 0.05


@pytest.mark.full
def test_run_again_says_that_it_is_done(launched, tmp_path):
    root = tiny_run.copy(launched, tmp_path, "corpus", "warm_start", "pretrain")
    before = _contents(root / "pretrain" / "checkpoints")
    chain = tiny_run.write_chain(root, ["prepare", "pretrain"])
    token = token_of(Chain(str(root), ()))
    # As of a launcher that was killed.
    leftover = subprocess.Popen(["sleep", "600"], env={**os.environ, TOKEN: token})
    launcher = tiny_run.launch(chain)
    assert leftover.wait(_SECONDS) == -signal.SIGTERM
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 0, said
    assert f"ending process {leftover.pid}, whose launcher is gone" in said
    assert "prepare: done" in said
    assert "trainer: done" in said
    (log,) = (root / "launched").glob("pretrain-*/trainer-1/0.log")
    assert "pretrain: done, 12 steps" in log.read_text()
    assert _contents(root / "pretrain" / "checkpoints") == before


@pytest.mark.full
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_two_trainers_and_a_builder_whatever_is_killed(
    place, finished, tmp_path, request
):
    """One of each kind, the launcher and all together, in an order of chance."""
    model_dir = str(tmp_path / "pretrain")
    if place == "bucket":
        model_dir = f"{request.getfixturevalue('bucket')}/killed"
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    run = _Run(root, model_dir)
    run.write(steps=200)
    chance = random.Random(5)
    kinds = ["trainer", "builder", "launcher", "all"]
    order = chance.sample(kinds, len(kinds))
    for kind in order:
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
    launcher = run.launcher()
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 0, said
    assert "trainer: done" in said
    store = open_store(model_dir)
    assert finished_steps(store)[-1] == 200
    assert SnapshotSeries(store, INDEX_SERIES).latest_step() == 200
    steps = [line["step"] for line in read_metrics(model_dir)]
    assert steps == sorted(set(steps))
    assert run.processes() == []


@pytest.mark.full
def test_an_interrupted_run_goes_on_and_one_that_is_done_may_be_prolonged(
    finished, tmp_path
):
    root = tiny_run.copy(finished, tmp_path, "corpus", "warm_start")
    run = _Run(root, str(root / "pretrain"))
    run.write(steps=1_000_000)
    launcher = run.launcher()
    _wait(launcher, lambda: run.checkpoint() > 0)
    os.killpg(launcher.pid, signal.SIGINT)
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    assert "run the same command again to go on" in said
    assert run.processes() == []

    for more in (4, 8):
        reached = run.checkpoint()
        run.write(steps=reached + more)
        launcher = run.launcher()
        said, _ = launcher.communicate(timeout=_SECONDS)
        assert launcher.returncode == 0, said
        assert "trainer: done" in said
        assert max(_indexes(root)) == reached + more


class _Run:
    """Pre-training by two processes, with a builder beside them."""

    def __init__(self, root: pathlib.Path, model_dir: str):
        self._root, self._model_dir = root, model_dir
        self._chain = root / "chain.gin"
        self._launcher: subprocess.Popen[str] | None = None

    def write(self, steps: int) -> None:
        tiny_run.write_sizes(self._root, pretrain_steps=steps, refresh_period=20)
        sizes = self._root / "sizes.gin"
        text = sizes.read_text()
        sizes.write_text(
            text.replace("checkpoint_period = 100", "checkpoint_period = 10")
        )
        tiny_run.write_chain(
            self._root, ["pretrain"], processes=2, model_dir=self._model_dir
        )

    def launcher(self) -> subprocess.Popen[str]:
        """The launcher that runs; another one if it was killed."""
        if self._launcher is None or self._launcher.poll() is not None:
            self._launcher = tiny_run.launch(self._chain)
        return self._launcher

    def checkpoint(self) -> int:
        return max(finished_steps(open_store(self._model_dir)), default=0)

    def processes(self, *words: str) -> list[int]:
        """What of this run is at work, by words of the command line."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().replace(b"\0", b" ").decode()
                if str(self._chain) in line and all(word in line for word in words):
                    found.append(int(path.parent.name))
        return found

    def victims(self, kind: str, chance: random.Random | None = None) -> list[int]:
        """Processes to be killed; one of them by chance, or all of this kind."""
        words = {
            "trainer": ["main pretrain"],
            "builder": ["main build-index"],
            "launcher": ["tpu_launch local"],
            "all": [],
        }[kind]
        found = self.processes(*words)
        if kind == "all" or chance is None:
            return found
        return [chance.choice(found)]


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 4])
def test_a_stage_that_keeps_the_terminal_has_its_devices(
    devices, tmp_path, monkeypatch
):
    told = tmp_path / "told"
    program = f"import os; open({str(told)!r}, 'w').write(str(dict(os.environ)))"
    monkeypatch.setattr(
        local, "_program", lambda arguments: [sys.executable, "-c", program]
    )
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    chain = Chain(str(tmp_path), [Stage("warm-start", devices=devices)])
    assert Runner(chain, [], threading.Event()).run() == 0
    found = ast.literal_eval(told.read_text()).get("JAX_NUM_CPU_DEVICES")
    assert found == {1: None, 4: "4"}[devices]


@pytest.mark.full
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
    companion = "build-index"
    companion_gin_files = {files!r}
    companion_bindings = {tiny_run.bindings("build-index", root, CORPUS="nowhere")!r}
"""
    )
    launcher = tiny_run.launch(chain)
    said, _ = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 2
    error = said.strip().splitlines()[-1]
    assert error.startswith("error: builder: expected")
    assert "nowhere" in error
    assert _Run(root, "").processes() == []


def _wait(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)


def _indexes(root: pathlib.Path) -> list[int]:
    return SnapshotSeries(open_store(root / "pretrain"), INDEX_SERIES).steps()


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
