"""What a stage and the chain say while a step takes long, and while none begins."""

import io
import re
import shlex
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from realm_jax.cli import builder_watch, progress
from realm_jax.cli.builder_watch import BuilderWatch, builder_command
from realm_jax.cli.progress import StageProgress
from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.metrics.means import mean_of
from realm_jax.storage import open_store
from realm_jax.training.loop import LogMetrics
from realm_jax.training.step_timing import Accounting, Stopwatch
from tests import tiny_run

PATIENCE_SECONDS = 30.0


def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def fast_clock(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.02)


def test_a_long_step_is_not_silent_in_a_log(fast_clock):
    console = pipe()
    with StageProgress("pretrain", console=console) as shown:
        shown(3, 15, {"loss": 4.5})
        wait_until(lambda: console.file.getvalue().count("so far") >= 2)
    lines = console.file.getvalue().splitlines()
    for line in lines:
        assert re.fullmatch(r"pretrain 3/15  loss 4\.500  \d+:\d\d so far", line), line
    before = len(lines)
    time.sleep(0.5)
    assert len(console.file.getvalue().splitlines()) == before


def test_what_compiles_before_the_first_step_is_not_silent(fast_clock):
    console = pipe()
    with StageProgress("finetune", console=console):
        wait_until(lambda: "so far" in console.file.getvalue())
    assert console.file.getvalue().startswith("finetune starting")


def test_a_clock_decides_when_a_line_is_due_not_the_number_of_steps(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 1e6)
    console = pipe()
    with StageProgress("warm-start", console=console) as shown:
        for done in range(1, 1000):
            shown(done, 1000)
        assert console.file.getvalue() == ""


def test_steps_that_the_devices_have_not_finished_are_not_shown():
    release = threading.Event()

    @jax.jit
    def slow(x):
        def wait(x):
            release.wait(PATIENCE_SECONDS)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)

    reports = []
    log = LogMetrics(
        [],
        lambda *line: reports.append(line[:2]),
        Accounting(Stopwatch(), None, 1, jax.devices()),
        every=100,
        total_steps=100,
    )
    dispatching = threading.Thread(
        target=lambda: [
            log(step, None, {"loss": mean_of(slow(jnp.float32(step)), 1.0)})
            for step in range(1, 7)
        ]
    )
    dispatching.start()
    time.sleep(0.5)
    during = list(reports)
    release.set()
    dispatching.join()
    # No more than two are handed over while none is finished.
    assert during in ([], [(0, 100)], [(0, 100)] * 2)
    assert len(reports) == 6
    assert reports[-1][0] >= 4


def follow(tmp_path, monkeypatch, console):
    monkeypatch.setattr(builder_watch, "_POLL_SECONDS", 0.02)
    shown = StageProgress("pretrain", console=console)
    return shown, BuilderWatch(str(tmp_path), shown, "realm build-index --the-command")


def publish(tmp_path, series, step):
    store = open_store(tmp_path)
    store.write(f"{series}/commits/{step}.json", b"{}")


def test_without_a_builder_its_command_is_told_at_once_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(builder_watch, "_REMIND_SECONDS", 0.2)
    console = pipe()
    shown, watch = follow(tmp_path, monkeypatch, console)
    with shown, watch:
        time.sleep(0.2)
        assert "waiting" not in console.file.getvalue()  # Nothing is published yet.
        publish(tmp_path, "retriever", 0)
        wait_until(lambda: console.file.getvalue().count("waiting for an index") >= 2)
        assert "realm build-index --the-command" in console.file.getvalue()
        publish(tmp_path, "index", 0)
        time.sleep(0.3)
        before = console.file.getvalue()
        time.sleep(0.5)
        assert console.file.getvalue() == before


def test_while_a_builder_is_alive_no_command_is_told(tmp_path, monkeypatch):
    Heartbeat(open_store(tmp_path), BUILDER_ROLE).beat(0, activity="waiting")
    publish(tmp_path, "retriever", 0)
    console = pipe()
    shown, watch = follow(tmp_path, monkeypatch, console)
    with shown, watch:
        time.sleep(0.5)
    assert "waiting for an index" not in console.file.getvalue()


def test_the_command_that_is_told_starts_a_builder(tmp_path, monkeypatch):
    from realm_jax.cli import configuration
    from realm_jax.cli.build_index import BuildIndexConfig
    from realm_jax.index.builder import BuilderConfig

    config = SimpleNamespace(
        model_dir=f"{tmp_path}/my run",
        corpus=f"{tmp_path}/corpus",
        searcher="scann",
        models=SimpleNamespace(lengths=SimpleNamespace(document=96)),
    )
    files = ["gin/models/minilm_l6.gin", str(tiny_run.GIN / "hardware" / "cpu.gin")]
    words = shlex.split(builder_command(config, files))
    assert words[:2] == ["realm", "build-index"]
    parser = configuration.make_parser("realm build-index", "")
    configuration.parse(parser, words[2:])
    run = configuration.configured(BuildIndexConfig)
    assert (run.model_dir, run.corpus) == (config.model_dir, config.corpus)
    builder = configuration.configured(BuilderConfig)
    assert builder.embed.document_length == 96
    assert builder.embed.batch_size == 32  # What the file of the hardware says.
    assert builder.scann is not None
