"""The restart loop: which exit codes start processes again, and what is left."""

import dataclasses
import os
import pathlib
import threading

import psutil
import pytest

from realm_jax import errors
from realm_jax.cli import main
from realm_jax.storage import open_store
from tests.refused import refused
from tests.tpu_launch.working import AT_ONCE, make_worker
from tests.waiting import wait_until
from tpu_launch import records
from tpu_launch.processes import Command, Ended, Group
from tpu_launch.records import last_line
from tpu_launch.roles import Worker

pytestmark = pytest.mark.process("the loop is about processes")


def command(folder: pathlib.Path, script: str, number: int = 0, **more: str) -> Command:
    log = folder / f"{number}.log"
    return Command(["sh", "-c", script], {**os.environ, **more, "LOG": str(log)}, log)


def codes_in_turn(folder: pathlib.Path, *codes: int) -> Command:
    """A program that ends with these codes, one at each start."""
    cases = "".join(f"{i}) exit {code};; " for i, code in enumerate(codes, start=1))
    count = "echo started; n=$(grep -c started $LOG)"
    return command(folder, f"{count}; case $n in {cases} esac")


@pytest.fixture
def run(tmp_path):
    """Runs commands of a trainer; returns their exit code."""

    def run(*commands, stop=None, pace=AT_ONCE):
        store = open_store(tmp_path / "model")
        return make_worker(store, commands, stop=stop, pace=pace).keep_running()

    return run


def starts(command: Command) -> int:
    return command.log.read_text().count("started")


def away():
    raise OSError("the bucket is away")


@pytest.mark.parametrize(
    ("codes", "reached", "expected"),
    [
        ((0,), None, 0),
        ((2,), None, 2),
        # At the same place, three times at most.
        ((1, 134, 0), None, 0),
        ((1, 1, 1), None, 1),
        # What waits, or was asked to stop by others, has not failed.
        ((75, 75, 75, 75, 143, 143, 143, 0), None, 0),
        ((1, 75, 1, 143, 1), None, 1),
        # Who gets further is not given up, nor is one of whom nobody knows.
        ((1, 1, 1, 1, 1, 1, 0), starts, 0),
        ((1, 1, 1, 1, 1, 1, 0), lambda one: away(), 0),
    ],
)
def test_what_an_exit_code_leads_to(
    tmp_path, run, monkeypatch, codes, reached, expected
):
    one = codes_in_turn(tmp_path, *codes)
    if reached:
        monkeypatch.setattr(records, "reached", lambda *_: reached(one))
    assert run(one) == expected
    assert starts(one) == len(codes)


def test_code_0_is_not_the_end_before_the_work_is_done(tmp_path, run, monkeypatch):
    one = codes_in_turn(tmp_path, 0, 0, 0)
    monkeypatch.setattr(Worker, "await_end", lambda _: starts(one) == 3)
    assert run(one) == 0


def test_processes_are_started_again_together(tmp_path, run):
    first, log = codes_in_turn(tmp_path, 1, 0), tmp_path / "1.log"
    # It would wait for the other for ever.
    script = f"echo started; grep -c started {log} | grep 2 || sleep 600"
    other = command(tmp_path, script, 1)
    quick = dataclasses.replace(AT_ONCE, settling=0.1)
    assert run(first, other, pace=quick) == 0
    assert (starts(first), starts(other)) == (2, 2)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((134, 2), 2), ((137, 143), 143), ((134, 75), 75), ((1, 0), 1)],
)
def test_the_code_that_tells_most(tmp_path, codes, expected):
    commands = [command(tmp_path, f"exit {c}", i) for i, c in enumerate(codes)]
    group = Group(commands)
    assert group.wait(30.0)
    assert group.kill() == expected


def test_of_crashes_the_first_one_is_named(tmp_path):
    """The others end because of it, with codes of their own."""
    gate = tmp_path / "gate"
    waiting = f"until [ -e {gate} ]; do sleep 0.01; done; exit 134"
    group = Group([command(tmp_path, waiting), command(tmp_path, "exit 137", 1)])
    wait_until(lambda: group.code() == 137)
    gate.touch()
    assert group.wait(30.0)
    assert group.kill() == 137


def test_who_must_end_saves_first_and_leaves_no_child(tmp_path, run, monkeypatch):
    ready, looked = tmp_path / "ready", []
    saves = "trap 'echo saved; exit 143' TERM; sleep 600 & echo $! > $READY; wait"
    one = command(tmp_path, saves, READY=str(ready))

    def must_end(_):
        if not (ready.exists() and ready.read_text().strip()):
            return False
        # Once: who looks seldom says no between two looks.
        looked.append(one)
        return len(looked) == 1

    monkeypatch.setattr(Worker, "must_end", must_end)
    assert run(one) == 143
    assert last_line(one.log) == "saved"
    child = int(ready.read_text())
    wait_until(lambda: not is_at_work(child))


def is_at_work(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_who_is_asked_before_it_starts_does_not_start(tmp_path, run):
    stop = threading.Event()
    stop.set()
    one = codes_in_turn(tmp_path, 0)
    assert run(one, stop=stop) == 143
    assert not one.log.exists()


def test_a_program_that_is_not_there_leaves_the_others_ended(tmp_path, run):
    # Without `exec` the shell has a child, which is killed and ends when it likes.
    there = command(tmp_path, "exec sleep 600")
    missing = Command([str(tmp_path / "nothing")], {}, tmp_path / "1.log")
    before = psutil.Process().children()
    with refused("expected a program that can be run"):
        run(there, missing)
    assert set(psutil.Process().children()) <= set(before)


def test_exit_codes_are_those_of_the_command_line():
    assert Ended.by(errors.BAD_INPUT) is Ended.BAD_INPUT
    assert Ended.by(errors.NOT_READY) is Ended.NOT_READY
    for number in main.STOP_SIGNALS:
        assert Ended.by(128 + number) is Ended.STOPPED
    assert Ended.by(errors.BUG) is Ended.by(128 + 9) is Ended.CRASHED


def test_the_last_line_is_short_of_its_prefix(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("a\n" * 100_000 + "error: expected b, got c\n\n")
    assert last_line(log) == "expected b, got c"
