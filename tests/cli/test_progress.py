"""What a stage and the chain say while a step takes long, and while none begins."""

import io
import shlex
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from realm_jax.cli import configuration, progress, stages
from realm_jax.cli.build_index import BuildIndexConfig
from realm_jax.cli.progress import StageProgress
from realm_jax.cli.stages import BuilderWatch, builder_command
from realm_jax.index.builder import BUILDER_ROLE, BuilderConfig
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import open_store
from realm_jax.training import loop
from realm_jax.training.step_timing import Accounting, Stopwatch
from tests import tiny_run
from tests.waiting import Clock, wait_until


def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_a_minute_has_sixty_seconds():
    seconds = (0, 59.6, 119.6, 3599)
    assert [progress._clock(s) for s in seconds] == ["0:00", "1:00", "2:00", "59:59"]


class WatchedClock(Clock):
    """Counts how often a thread other than the test's looks at it."""

    def __init__(self):
        super().__init__()
        self._looks = 0
        self._test = threading.current_thread()

    def monotonic(self):
        if threading.current_thread() is not self._test:
            self._looks += 1
        return super().monotonic()

    def advance(self, seconds):
        """Returns once the other thread has acted on the new time."""
        self.seconds += seconds
        before = self._looks
        # What the first of two looks led to is done when the second begins.
        wait_until(lambda: self._looks >= before + 2)


@pytest.fixture
def clock(monkeypatch):
    clock = WatchedClock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(stages, "time", clock)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(stages, "_POLL_SECONDS", 0.001)
    return clock


def test_a_long_step_is_not_silent_in_a_log(clock):
    console = pipe()
    threads = threading.enumerate()
    with StageProgress("pretrain", console=console) as shown:
        shown(3, 15, {"loss": 4.5})
        clock.advance(29)
        assert console.file.getvalue() == ""
        clock.advance(1)
        clock.advance(29)
        clock.advance(1)
    assert console.file.getvalue().splitlines() == [
        "pretrain 3/15  loss 4.500  0:30 so far",
        "pretrain 3/15  loss 4.500  1:00 so far",
    ]
    # Nobody is left who could say more.
    assert set(threading.enumerate()) <= set(threads)


def test_what_compiles_before_the_first_step_is_not_silent(clock):
    console = pipe()
    with StageProgress("finetune", console=console):
        clock.advance(30)
    assert console.file.getvalue() == "finetune starting  0:30 so far\n"


def test_a_clock_decides_when_a_line_is_due_not_the_number_of_steps(clock):
    console = pipe()
    with StageProgress("warm-start", console=console) as shown:
        for done in range(1, 1000):
            shown(done, 10_000)
        assert console.file.getvalue() == ""
        clock.advance(10)
        for done in range(1000, 2000):
            shown(done, 10_000)
        (line,) = console.file.getvalue().splitlines()
        shown(10_000, 10_000)
    # Nine times as many are left as were done in ten seconds.
    assert line == "warm-start 1,000/10,000  1:30 left"
    assert console.file.getvalue().splitlines()[1:] == ["warm-start 10,000/10,000"]


class Update:
    """In place of an array: an update that the devices have or have not finished."""

    def __init__(self):
        self.is_finished = False

    def is_ready(self):
        return self.is_finished


class WaitsForUpdates(Stopwatch):
    """Waiting for an update finishes it."""

    def wait_for(self, arrays):
        for update in jax.tree.leaves(arrays):
            update.is_finished = True


def reports_of(updates, stopwatch):
    """What is told of each of a hundred updates, which are handed over in turn."""
    reports = []
    log = loop.MetricsLog(
        [],
        lambda *line: reports.append(line[:2]),
        Accounting(stopwatch, None, 1, jax.devices()),
        every=100,
        total_steps=100,
    )
    for step, update in enumerate(updates, start=1):
        log.add({"loss": update})
        log.show_progress(step)
    return reports


def test_steps_that_the_devices_have_not_finished_are_not_shown(monkeypatch):
    arrays = [jax.block_until_ready(jnp.float32(step)) for step in range(6)]
    finished = [(step, 100) for step in range(1, 7)]
    assert reports_of(arrays, Stopwatch()) == finished
    fake_jax = SimpleNamespace(Array=Update, tree=jax.tree)
    monkeypatch.setattr(loop, "jax", fake_jax)
    updates = [Update() for _ in range(6)]
    shown = reports_of(updates, WaitsForUpdates())
    assert shown == [(step, 100) for step in (0, 0, 1, 2, 3, 4)]
    # No more than two were ever handed over and unfinished.
    assert [update.is_finished for update in updates] == [True] * 4 + [False] * 2


class PolledProgress(StageProgress):
    """Counts how often the builder was looked for."""

    looks = 0

    def show_builder(self, share):
        self.looks += 1
        super().show_builder(share)


def follow(tmp_path, console):
    shown = PolledProgress("pretrain", console=console)
    return shown, BuilderWatch(str(tmp_path), shown, "realm build-index --the-command")


def look_for_builder(shown):
    """Returns once what there is now has been seen and told of."""
    before = shown.looks
    # What the first of two looks led to is done when the second begins.
    wait_until(lambda: shown.looks >= before + 2)


def publish(tmp_path, series, step):
    store = open_store(tmp_path)
    store.write(f"{series}/commits/{step}.json", b"{}")


def test_without_a_builder_its_command_is_told_at_once_and_again(tmp_path, clock):
    console = pipe()

    def times_told():
        look_for_builder(shown)
        return console.file.getvalue().count("waiting for an index")

    shown, watch = follow(tmp_path, console)
    with shown, watch:
        assert times_told() == 0  # Nothing is published yet.
        publish(tmp_path, "retriever", 0)
        assert times_told() == 1
        assert "realm build-index --the-command" in console.file.getvalue()
        clock.advance(59)
        assert times_told() == 1
        clock.advance(1)
        assert times_told() == 2
        publish(tmp_path, "index", 0)
        look_for_builder(shown)
        clock.advance(60)
        assert times_told() == 2
        # A run that goes on waits for the index of where it goes on.
        publish(tmp_path, "retriever", 4)
        assert times_told() == 3


def test_while_a_builder_is_alive_no_command_is_told(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(stages, "_ALIVE_SECONDS", float("inf"))
    heartbeat = Heartbeat(open_store(tmp_path), BUILDER_ROLE)
    heartbeat.beat(0, activity="waiting")
    publish(tmp_path, "retriever", 0)
    console = pipe()
    shown, watch = follow(tmp_path, console)
    with shown, watch:
        look_for_builder(shown)
        assert "waiting for an index" not in console.file.getvalue()
        heartbeat.beat(0, activity="embedding", blocks_done=3, num_blocks=12)
        look_for_builder(shown)
        clock.advance(30)
        assert "waiting for the first index, 25% built" in console.file.getvalue()
        monkeypatch.setattr(stages, "_ALIVE_SECONDS", float("-inf"))
        look_for_builder(shown)
        assert "waiting for an index" in console.file.getvalue()


def test_the_command_that_is_told_starts_a_builder(tmp_path):
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
