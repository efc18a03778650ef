"""`status`: a run, read from what its launcher, workers and jobs wrote."""

import dataclasses
import io
import json
import math
import os
import pathlib
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
from rich.console import Console

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import MissingObjectError, UnavailableStoreError, open_store
from realm_jax.training.metrics import MetricsFile
from tests.tpu_launch import launching
from tests.tpu_launch.fake_tpu import MemoryStore, World, served
from tpu_launch import __main__ as tpu_launch
from tpu_launch import status as status_command
from tpu_launch import up, worker_state
from tpu_launch.attempts import Attempts, TakenOverError, read_launcher
from tpu_launch.backends.api import ApiBackend
from tpu_launch.cached_store import CachedStore
from tpu_launch.deleting import GaveUpError
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.reconcile import Reconciler
from tpu_launch.run_status import RoleState, find_run, read_status
from tpu_launch.status_table import as_json, duration, render
from tpu_launch.worker_state import Done, State, WorkerState

RUN = "realm-123456"
HOUR = 3600.0
# When the launcher took the run, and when it is looked at.
BEGAN, NOW = 1_000_000.0, 1_000_000.0 + 10 * HOUR


def written(store, url):
    """A run in its second attempt of the trainer, the builder's slice in the queue."""
    attempts = Attempts(store, RUN, BEGAN, total_steps=2000)
    first = attempts.begin(TRAINER, BEGAN, 100.0, "EUR")
    attempts.note_slices(TRAINER, first, "WAITING_FOR_RESOURCES", BEGAN)
    attempts.activate(TRAINER, first, BEGAN + HOUR)
    attempts.note_slices(TRAINER, first, "ACTIVE", BEGAN + HOUR)
    attempts.end(TRAINER, first, BEGAN + 3 * HOUR, "SUSPENDED: preempted")
    second = attempts.begin(TRAINER, BEGAN + 4 * HOUR, 100.0, "EUR")
    attempts.activate(TRAINER, second, BEGAN + 5 * HOUR)
    attempts.note_slices(TRAINER, second, "ACTIVE", BEGAN + 5 * HOUR)
    builder = attempts.begin(BUILDER, BEGAN, 10.0, "EUR")
    attempts.note_slices(BUILDER, builder, "WAITING_FOR_RESOURCES", NOW - 720)
    speak(store, TRAINER, 2, 0, State.RUNNING, NOW - 5, 1010)
    speak(store, TRAINER, 2, 1, State.RUNNING, NOW - 40)
    Heartbeat(store, "trainer").beat(1020, index_step=900, kept_index_steps=[])
    metrics = MetricsFile(url, "pretrain", 0)
    metrics.write(1000, {"loss": 5.0, "index_step": 900})
    metrics.write(
        1010,
        {
            "loss": 4.25,
            "retrieval_utility": 0.125,
            "steps_per_second": 0.5,
            "examples_per_second": 256.0,
            "index_step": 900,
            "index_age_steps": 110,
            "index_age_seconds": 220.0,
        },
    )
    return attempts


def speak(store, role, attempt, worker, state, time, step=-1, **more):
    word = WorkerState(state, time, step, **more)
    worker_state.write_worker(store, RUN, role, attempt, worker, word)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path)
    written(store, str(tmp_path))
    return store


def role(store, name, now=NOW):
    return next(one for one in read_status(store, RUN, now).roles if one.name == name)


def test_a_run_is_what_was_written_of_it(store):
    require_as_written(read_status(store, RUN, NOW))


def test_a_run_in_a_bucket_is_the_same(bucket):
    url = f"{bucket}/watched/pretrain"
    store = open_store(url)
    written(store, url)
    looked_at = CachedStore(store, f"launch/{find_run(store)}")
    looked_at.look()
    require_as_written(read_status(looked_at, RUN, NOW))


def require_as_written(status):
    assert (status.run, status.time, status.is_over) == (RUN, NOW, False)
    assert (status.launcher.time, status.launcher.process) == (BEGAN, os.getpid())
    # The heartbeat is newer than the metrics.
    assert (status.step, status.total_steps) == (1020, 2000)
    assert (status.loss, status.retrieval_utility) == (4.25, 0.125)
    assert (status.steps_per_second, status.examples_per_second) == (0.5, 256.0)
    assert (status.index_step, status.index_age_steps) == (900, 120)
    assert status.index_age_seconds == 220.0
    trainer, builder = status.roles
    assert (trainer.name, trainer.state) == (TRAINER, "running")
    assert (trainer.attempt, trainer.num_attempts) == (2, 2)
    assert (trainer.slices, trainer.active_since) == ("ACTIVE", BEGAN + 5 * HOUR)
    assert trainer.ended_reason == "SUSPENDED: preempted"
    assert trainer.step == 1020
    assert [one.silent_seconds for one in trainer.workers] == [5.0, 40.0]
    assert (builder.name, builder.state) == (BUILDER, "queued")
    assert (builder.slices, builder.slices_since) == (
        "WAITING_FOR_RESOURCES",
        NOW - 720,
    )
    assert (builder.step, builder.share, builder.active_since) == (None, None, None)
    # Two hours of the first attempt and five of the second; the queue is free.
    assert (trainer.cost, builder.cost) == (700.0, 0.0)
    assert (status.cost, status.currency) == (700.0, "EUR")


def test_the_builder_says_what_it_embeds_while_it_runs(store):
    attempts = Attempts(store, RUN, BEGAN)
    attempt = attempts.unended(BUILDER)
    beat = {"activity": "embedding", "blocks_done": 250, "num_blocks": 1000}
    Heartbeat(store, "index_builder").beat(1000, **beat)
    # Of before it was preempted.
    assert role(store, BUILDER).share is None
    attempts.activate(BUILDER, attempt, NOW - HOUR)
    attempts.note_slices(BUILDER, attempt, "ACTIVE", NOW - HOUR)
    assert role(store, BUILDER).state == "starting"
    speak(store, BUILDER, 1, 0, State.RUNNING, NOW)
    builder = role(store, BUILDER)
    assert (builder.state, builder.step, builder.share) == ("running", 1000, 0.25)
    assert (builder.blocks_done, builder.num_blocks) == (250, 1000)
    assert builder.cost == 10.0
    assert "embeds 25 %: 250 of 1,000" in shown(store)
    Heartbeat(store, "index_builder").beat(1000, activity="waiting", num_blocks=1000)
    assert (role(store, BUILDER).activity, role(store, BUILDER).share) == (
        "waiting",
        None,
    )


SLICES = {
    "CREATING": "queued",
    "ACCEPTED": "queued",
    "PROVISIONING": "starting",
    "SUSPENDING": "lost",
    "FAILED": "lost",
    "DELETING": "lost",
    "ACTIVE": "running",
    "SOMETHING_NEW": "lost",
}


@pytest.mark.parametrize("slices", SLICES)
def test_a_role_is_as_its_slices_are(store, slices):
    attempts = Attempts(store, RUN, BEGAN)
    attempts.note_slices(TRAINER, attempts.unended(TRAINER), slices, NOW)
    assert role(store, TRAINER).state == SLICES[slices]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (State.STARTING, "starting"),
        (State.RESTARTING, "restarting"),
        (State.FAILED, "failed"),
        (State.STOPPED, "stopped"),
        (State.DONE, "running"),
    ],
)
def test_a_role_on_its_slices_is_as_the_worst_worker(store, said, state):
    speak(store, TRAINER, 2, 1, said, NOW - 1, exit_code=1, message="code 1:\n boom")
    trainer = role(store, TRAINER)
    assert trainer.state == state
    worker = trainer.workers[1]
    assert (worker.state, worker.exit_code) == (said, 1)
    assert worker.message == "code 1: boom"


def test_between_two_attempts_a_role_waits_and_costs_nothing(store):
    attempts = Attempts(store, RUN, BEGAN)
    attempt = attempts.unended(TRAINER)
    attempts.end(TRAINER, attempt, BEGAN + 6 * HOUR, "worker 0 fell silent")
    trainer = role(store, TRAINER)
    assert (trainer.state, trainer.cost) == ("waiting", 300.0)
    assert (trainer.slices, trainer.active_since) == ("", None)
    assert trainer.ended_reason == "worker 0 fell silent"
    assert role(store, TRAINER, NOW + 10 * HOUR).cost == 300.0


def test_it_is_over_when_all_roles_are_done(store):
    worker_state.mark_done(store, RUN, TRAINER, Done(NOW, 2, 2000))
    assert role(store, TRAINER).state == "done"
    assert role(store, TRAINER).step == 2000
    assert not read_status(store, RUN, NOW).is_over
    worker_state.mark_done(store, RUN, BUILDER, Done(NOW, 1, 2000))
    assert read_status(store, RUN, NOW).is_over


def test_it_is_over_when_its_launcher_has_ended(store):
    attempts = Attempts(store, RUN, NOW - HOUR)
    assert not read_status(store, RUN, NOW).is_over
    speak(store, TRAINER, 2, 1, State.FAILED, NOW, exit_code=1)
    attempts.close(NOW, "trainer failed twice")
    status = read_status(store, RUN, NOW + HOUR)
    assert status.is_over
    assert (status.launcher.ended, status.launcher.reason) == (
        NOW,
        "trainer failed twice",
    )
    assert [one.state for one in status.roles] == ["failed", "stopped"]
    assert status.cost == 700.0
    # Another one takes it up.
    Attempts(store, RUN, NOW + HOUR)
    assert not read_status(store, RUN, NOW + HOUR).is_over


def test_prices_that_are_not_known_or_differ_leave_a_gap(store):
    attempts = Attempts(store, RUN, BEGAN)
    attempts.begin(BUILDER, NOW, None, "EUR")
    status = read_status(store, RUN, NOW)
    assert [one.cost for one in status.roles] == [700.0, None]
    assert status.cost is None
    attempts.begin(TRAINER, NOW, 100.0, "USD")
    assert role(store, TRAINER).cost is None
    assert "at prices on demand" not in shown(store)


def test_without_prices_there_is_no_column_of_money(tmp_path):
    store = open_store(tmp_path)
    speak(store, TRAINER, 1, 0, State.RUNNING, NOW, 5)
    status = read_status(store, RUN, NOW)
    assert (status.launcher, status.cost, status.step) == (None, None, 5)
    assert [one.state for one in status.roles] == ["running"]
    lines = shown(store)
    assert "USD" not in lines
    assert "launch" not in lines


def test_notes_of_an_older_launcher_are_of_dollars(store):
    """Before the note said so."""
    for name in store.list(f"launch/{RUN}"):
        if name.endswith("attempt.json"):
            note = json.loads(store.read(name))
            del note["currency"]
            store.write(name, json.dumps(note).encode())
    status = read_status(store, RUN, NOW)
    assert (status.cost, status.currency) == (700.0, "USD")


FILES = [
    f"launch/{RUN}/launchers/001.json",
    f"launch/{RUN}/trainer/001/attempt.json",
    f"launch/{RUN}/trainer/002/active.json",
    f"launch/{RUN}/trainer/001/ended.json",
    f"launch/{RUN}/trainer/002/slices.json",
    f"launch/{RUN}/trainer/002/0.json",
    f"launch/{RUN}/trainer/done.json",
    "jobs/trainer.json",
    "metrics.jsonl",
]
DAMAGE = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b"\xff\xfe",
    b'{"state": "running", "time": "noon", "step": "many"}',
    b'{"host": 1, "process": "x", "time": [], "begun": "x", "active": {}, "step": {}}',
]


@pytest.mark.parametrize("name", FILES)
def test_what_is_damaged_leaves_a_gap(store, name):
    for data in DAMAGE:
        store.write(name, data)
        status = read_status(store, RUN, NOW)
        assert len(status.roles) == 2
        text(render(status))
        json.loads(as_json(status))
    # Never less than what it is.
    if name.endswith("attempt.json"):
        assert status.roles[0].cost is None
        assert status.cost is None


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_leaves_a_gap(store, name):
    store.delete(name)
    status = read_status(store, RUN, NOW)
    assert len(status.roles) == 2
    text(render(status))
    if name == "metrics.jsonl":
        assert (status.loss, status.step) == (None, 1020)
    if name == "jobs/trainer.json":
        assert (status.step, status.index_step) == (1010, 900)


def test_before_anything_was_asked_for(tmp_path):
    store = open_store(tmp_path)
    Attempts(store, RUN, NOW)
    status = read_status(store, RUN, NOW)
    assert (status.roles, status.cost, status.is_over) == ((), None, False)
    assert "nothing was asked for yet" in text(render(status))


def test_the_run_is_the_one_that_was_launched_last(store):
    assert find_run(store) == RUN
    Attempts(store, "copied-abcdef", BEGAN - 1)
    assert find_run(store) == RUN
    Attempts(store, "another-abcdef", BEGAN + 1)
    assert find_run(store) == "another-abcdef"
    Attempts(store, RUN, BEGAN + 2)
    assert find_run(store) == RUN
    store.write("launch/bundles/0123.tar.gz", b"code")
    store.write(f"launch/{RUN}/launchers/002.json", b"damaged")
    assert find_run(store) == "another-abcdef"


class AwayStore:
    """A store that is away when told so, and counts what is read."""

    def __init__(self, store):
        self.store, self.is_away, self.reads = store, False, []

    def __getattr__(self, name):
        if self.is_away:
            raise UnavailableStoreError("gs://bucket: 503")
        if name == "read":
            return self._read
        return getattr(self.store, name)

    def _read(self, name):
        self.reads.append(name)
        return self.store.read(name)


def test_what_has_not_changed_is_read_once(store):
    counted = AwayStore(store)
    looked_at = CachedStore(counted, f"launch/{RUN}")
    looked_at.look()
    first = read_status(looked_at, RUN, NOW)
    assert first == read_status(store, RUN, NOW)
    counted.reads.clear()
    looked_at.look()
    assert read_status(looked_at, RUN, NOW) == first
    assert {name for name in counted.reads if name.startswith("launch/")} == set()
    speak(store, TRAINER, 2, 0, State.FAILED, NOW)
    store.delete(f"launch/{RUN}/trainer/002/1.json")
    # As it was at the last look.
    assert read_status(looked_at, RUN, NOW) == first
    looked_at.look()
    [worker] = read_status(looked_at, RUN, NOW).roles[0].workers
    assert worker.state == "failed"
    with pytest.raises(MissingObjectError):
        looked_at.read(f"launch/{RUN}/trainer/002/1.json")
    counted.is_away = True
    with pytest.raises(UnavailableStoreError):
        looked_at.look()


def text(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def shown(store, width=80):
    return text(render(read_status(store, RUN, NOW)), width)


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_no_line_is_wrapped(store, width):
    speak(store, TRAINER, 2, 1, State.RESTARTING, NOW, message="code 1: " + "x" * 200)
    lines = shown(store, width).splitlines()
    wide = shown(store, 400).splitlines()
    assert len(lines) == len(wide)
    assert all(len(line) <= width for line in lines)


def test_what_a_person_reads(store):
    lines = shown(store)
    assert f"{RUN} " in lines
    assert "step 1,020 of 2,000" in lines
    assert "51 %   33 min left" in lines
    assert "loss 4.250   utility +0.125 nats   0.50 steps/s   256 examples/s" in lines
    assert "index of step 900, 120 steps and 4 min old" in lines
    assert re.search(r"trainer +running +5\.0 h +2 +1,020 +700\.00 +2 workers", lines)
    assert re.search(
        r"builder +queued +12 min +1 +- +0\.00 +WAITING_FOR_RESOURCES", lines
    )
    assert "trainer before: SUSPENDED: preempted" in lines
    assert "700.00 EUR so far" in lines
    assert "process" in lines
    assert "10.0 h ago" in lines


def test_workers_in_trouble_are_named(store):
    for worker in range(2, 20):
        speak(store, TRAINER, 2, worker, State.RESTARTING, NOW, exit_code=139)
    speak(store, TRAINER, 2, 0, State.RUNNING, NOW - 1000)
    lines = shown(store)
    assert re.search(r"trainer/0 +running +17 min ago +says nothing", lines)
    assert re.search(r"trainer/2 +restarting +0 s ago +code 139", lines)
    assert "trainer/1 " not in lines
    assert "and 11 more" in lines


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (99, "99 s"), (720, "12 min"), (7200, "2.0 h"), (259200, "3.0 days")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def strict(constant):
    raise AssertionError(constant)


def test_json_holds_all_that_is_known(store):
    MetricsFile(store.url(), "pretrain", 5000).write(1011, {"loss": math.nan})
    status = read_status(store, RUN, NOW)
    assert math.isnan(status.loss)
    values = json.loads(as_json(status), parse_constant=strict)
    assert values.pop("loss") is None
    assert values.pop("is_over") is False
    plain = dataclasses.asdict(status)
    del plain["loss"]
    assert values == json.loads(json.dumps(plain))
    assert values["roles"][0]["state"] == "running"


def test_every_field_of_json_is_documented(store):
    page = pathlib.Path(up._CHECKOUT, "docs", "pods.md").read_text()
    section = page.partition("### Watching")[2].partition("\n### ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))

    def names(value):
        if isinstance(value, list):
            return {name for one in value for name in names(one)}
        if isinstance(value, dict):
            inner = {name for one in value.values() for name in names(one)}
            return inner | set(value)
        return set()

    assert names(json.loads(as_json(read_status(store, RUN, NOW)))) <= documented
    assert {state.value for state in RoleState} <= documented


# The command as it is typed.


@pytest.fixture
def said(capsys):
    """Runs a command; returns its exit code, and what it printed."""

    def run(*arguments):
        code = tpu_launch.main(arguments)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


def model_dir(store):
    return f'--gin.MODEL_DIR="{store.url()}"'


def test_once_prints_one_table(store, said):
    code, out, err = said("status", model_dir(store), "--once")
    assert (code, err) == (0, "")
    assert out.count("step 1,020 of 2,000") == 1
    # Nobody is there to watch.
    assert said("status", model_dir(store))[1].count("step 1,020") == 1


def test_once_in_json(store, said):
    code, out, _ = said("status", model_dir(store), "--once", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 1020
    assert json.loads(said("status", model_dir(store), "--json")[1])["step"] == 1020


def test_the_gin_files_of_the_run_name_its_directory(store, said, tmp_path):
    files = ["--gin_file=gin/models/tiny.gin", "--gin_file=gin/runs/pretrain.gin"]
    line = [*files, model_dir(store), '--gin.PROJECT="p"']
    assert said("status", *line, "--once")[0] == 0
    mine = tmp_path / "mine.gin"
    # CORPUS and TASK are not needed here.
    mine.write_text(f'include "gin/runs/pretrain.gin"\nMODEL_DIR = "{store.url()}"\n')
    assert said("status", files[0], f"--gin_file={mine}", "--once")[0] == 0


BAD_LINES = {
    "no directory": ([], "expected MODEL_DIR, a text, got none; add --gin.MODEL_DIR="),
    "a chain": (
        ["--gin_file=gin/runs/quickstart.gin"],
        "expected MODEL_DIR, a text, got none; add --gin.MODEL_DIR=",
    ),
    "one that is required": (
        ["--gin_file=gin/models/tiny.gin", "--gin_file=gin/runs/pretrain.gin"],
        "expected MODEL_DIR, a text, got none; add --gin.MODEL_DIR=",
    ),
    "no quotes": (["--gin.MODEL_DIR=runs/x"], "a text is written --gin.MODEL_DIR="),
    "a number": (["--gin.MODEL_DIR=7"], "expected MODEL_DIR, a text"),
    "nothing launched": (
        ['--gin.MODEL_DIR="{empty}"'],
        "expected a launched run in {empty}, found none",
    ),
    "another scheme": (['--gin.MODEL_DIR="s3://x"'], "expected a folder or gs://"),
    "an unknown flag": (
        ['--gin.MODEL_DIR="{empty}"', "--forever"],
        "unrecognized arguments: --forever",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_input_is_one_line(said, tmp_path, case):
    arguments, expected = BAD_LINES[case]
    code, out, err = said("status", *(a.format(empty=tmp_path) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected.format(empty=tmp_path) in err


def test_a_directory_that_is_away_is_one_line(store, said, monkeypatch):
    away = AwayStore(store)
    away.is_away = True
    monkeypatch.setattr(status_command, "open_store", lambda url: away)
    code, out, err = said("status", model_dir(store), "--once")
    assert (code, out) == (1, "")
    assert err == "error: the model directory does not answer: gs://bucket: 503"


@pytest.fixture
def screen(monkeypatch):
    """A terminal in memory; what was said on it."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr(status_command, "Console", lambda: console)
    monkeypatch.setattr(status_command, "_FOLDER_SECONDS", 0.01)
    return console.file


def when(condition, then):
    """Does something once something is so, in another thread."""

    def wait():
        for _ in range(1000):
            if condition():
                return then()
            never.wait(0.01)
        # What waits for it ends too.
        return os.kill(os.getpid(), signal.SIGINT)

    never = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_the_live_view_outlives_a_store_and_ends_with_the_run(
    store, said, screen, monkeypatch
):
    away = AwayStore(store)
    # Looked up at each read; the stub's own address is that of the folder.
    monkeypatch.setattr(status_command, "open_store", lambda url: away)

    def is_shown(words):
        return lambda: words in screen.getvalue()

    def leave():
        away.is_away = True
        when(is_shown("does not answer"), come_back).join()

    def come_back():
        attempts = Attempts(store, RUN, NOW)
        attempts.close(NOW, "everything broke")
        away.is_away = False

    watcher = when(is_shown("step 1,020"), leave)
    assert said("status", model_dir(store))[0] == 0
    watcher.join()
    assert "everything broke" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")


def test_ctrl_c_ends_the_view(store, said, screen):
    watcher = when(
        lambda: "step 1,020" in screen.getvalue(),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    code, _, err = said("status", model_dir(store))
    watcher.join()
    assert (code, err) == (130, "stopped looking; the run goes on")


def test_on_a_terminal_the_program_watches(store):
    """The program itself."""
    controller, terminal = pty.openpty()
    line = [sys.executable, "-m", "tpu_launch", "status", model_dir(store)]
    process = subprocess.Popen(line, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen = b""
    try:
        while b"Ctrl-C ends the view" not in seen:
            seen += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(controller)
    assert b"step 1,020" in seen


def test_documented_command_lines(store, said):
    page = pathlib.Path(up._CHECKOUT, "docs", "pods.md").read_text()
    lines = re.sub(r" *\\\n *", " ", page).splitlines()
    start = "    .venv/bin/python -m tpu_launch"
    found = [
        line for line in lines if line.startswith((f"{start} status", f"{start} logs"))
    ]
    assert len(found) >= 3
    for line in found:
        words = [one for one in shlex.split(line)[3:] if one not in ("-f", "--follow")]
        given = [one for one in words if not one.startswith("--gin.MODEL_DIR")]
        assert given != words
        code, _, err = said(*given, model_dir(store))
        assert code == 0, err


# What the launcher notes.


@pytest.fixture
def world():
    return World()


@pytest.fixture
def backend(world):
    with served(world) as address:
        host = address.removeprefix("http://").rstrip("/")
        transport = TpuRestTransport(
            host=host, url_scheme="http", credentials=AnonymousCredentials()
        )
        yield ApiBackend("p", tpu_v2.TpuClient(transport=transport))


def reconciler(world, backend, job):
    prices = {TRAINER: 3.0, BUILDER: 1.0}
    return Reconciler(
        job, launching.BUNDLE, backend, world.store, world, print, prices, "EUR"
    )


def test_a_launched_run_from_its_queue_to_its_end(world, backend):
    job = dataclasses.replace(launching.job(), total_steps=world.steps)
    seen = []

    def watch(world):
        status = read_status(world.store, job.run, world.time)
        states = [(one.name, one.state.value) for one in status.roles]
        seen.extend(one for one in states if one not in seen)
        assert not status.launcher.ended

    world.on_tick = watch
    reconciler(world, backend, job).run()
    trainer = [state for name, state in seen if name == TRAINER]
    assert trainer[:3] == ["queued", "starting", "running"]
    assert trainer[-1] == "done"
    status = read_status(world.store, job.run, world.time)
    assert status.is_over
    assert (status.launcher.reason, status.total_steps) == ("done", world.steps)
    assert status.currency == "EUR"
    # 100 steps, ten in a minute.
    assert 3.0 / 6 < status.roles[0].cost < 3.0 / 3
    # By itself, whatever happens later.
    later = read_status(world.store, job.run, world.time + 10 * HOUR)
    assert later.cost == status.cost


def test_why_a_launch_was_given_up_is_noted(world, backend):
    world.steps = 10**6
    job = launching.job(deadline_hours=1.0)
    with pytest.raises(GaveUpError):
        reconciler(world, backend, job).run()
    launcher = read_launcher(world.store, job.run)
    assert "the deadline of 1 hours has come" in launcher.reason
    assert read_status(world.store, job.run, world.time).is_over


def test_a_launcher_that_lost_the_run_notes_no_end(world, backend):
    job = launching.job()
    loop = reconciler(world, backend, job)
    Attempts(world.store, job.run, world.time)
    with pytest.raises(TakenOverError):
        loop.run()
    assert read_launcher(world.store, job.run).ended is None
    assert not any(name.endswith("-ended.json") for name in world.store.list("launch"))


def test_a_note_of_slices_that_cannot_be_written_ends_nothing(world, backend):
    class Forgetful(MemoryStore):
        def write(self, name, data):
            if name.endswith("slices.json"):
                raise BadInputError("the disk is full")
            super().write(name, data)

    world.store = Forgetful()
    reconciler(world, backend, launching.job()).run()
    assert world.resources == {}


def test_a_new_launcher_does_not_forget_since_when(store):
    attempts = Attempts(store, RUN, NOW)
    attempt = attempts.unended(BUILDER)
    attempts.note_slices(BUILDER, attempt, "WAITING_FOR_RESOURCES", NOW)
    assert role(store, BUILDER).slices_since == NOW - 720
    attempts.note_slices(BUILDER, attempt, "PROVISIONING", NOW)
    assert role(store, BUILDER).slices_since == NOW
