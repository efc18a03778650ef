"""`status` as it is typed, and what a person and a program read."""

import dataclasses
import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from realm_jax.errors import StoppedError
from realm_jax.metrics.metrics_file import MetricsFile
from tests import tiny_run
from tests.tpu_launch import watched_run
from tests.tpu_launch.watched_run import NOW, RUN, AwayStore, shown, speak
from tests.waiting import wait_until
from tpu_launch import __main__ as tpu_launch
from tpu_launch.attempts import Attempts
from tpu_launch.job import TRAINER
from tpu_launch.watching import status as status_command
from tpu_launch.watching.run_status import RoleState, read_status
from tpu_launch.watching.status_table import as_json, duration
from tpu_launch.worker_state import State


@pytest.fixture
def store(tmp_path):
    return watched_run.make(tmp_path)


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
    page = (tiny_run.ROOT / "docs" / "pods.md").read_text()
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
    "no value": (["--gin.MODEL_DIR="], "expected MODEL_DIR, a text"),
    "no quotes": (["--gin.MODEL_DIR={empty}"], "a launched run in {empty}, found none"),
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


@pytest.fixture
def at_looks(monkeypatch, screen):
    """What happens at the second look, the third …; a list of what each begins with.

    Args:
      actions: one for each look but the first.
    """
    look = status_command._look

    def set_actions(*actions):
        remaining, shown = iter((lambda: None, *actions)), []

        def look_after_action(*arguments):
            shown.append(screen.getvalue())
            next(remaining)()
            return look(*arguments)

        monkeypatch.setattr(status_command, "_look", look_after_action)
        return shown

    return set_actions


def test_the_live_view_outlives_a_store_and_ends_with_the_run(
    store, said, screen, at_looks, monkeypatch
):
    away = AwayStore(store)
    # Looked up at each read; the stub's own address is that of the folder.
    monkeypatch.setattr(status_command, "open_store", lambda url: away)

    def leave():
        away.is_away = True

    def come_back():
        attempts = Attempts(store, RUN, NOW)
        attempts.close(NOW, "everything broke")
        away.is_away = False

    shown = at_looks(leave, come_back)
    assert said("status", model_dir(store))[0] == 0
    assert len(shown) == 3
    assert "step 1,020" in shown[1]
    assert "does not answer" not in shown[1]
    assert "does not answer" in shown[2]
    assert "everything broke" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")


def test_in_a_log_a_run_of_this_machine_has_a_line_now_and_then(store, monkeypatch):
    monkeypatch.setattr(status_command, "_LINE_SECONDS", 0.05)
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with status_command.LiveView(store, RUN, console):
        wait_until(lambda: console.file.getvalue().count("\n") >= 2)
    lines = console.file.getvalue().splitlines()
    assert len(lines) >= 2
    # Not wrapped, and without the marks of a terminal.
    for line in lines:
        assert line.startswith("step 1,020/2,000  loss 4.250  index @900  trainer")
        assert line.endswith("builder queued")
        assert "\x1b" not in line


def test_ctrl_c_ends_the_view(store, screen, at_looks):
    stop = threading.Event()
    shown = at_looks(stop.set)
    with pytest.raises(StoppedError, match=r"^stopped looking; the run goes on$"):
        status_command.main([model_dir(store)], stop)
    assert "step 1,020" in shown[1]
    assert screen.getvalue().endswith("\x1b[?25h")


@pytest.mark.full
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
