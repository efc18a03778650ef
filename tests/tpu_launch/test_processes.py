"""The restart loop: which exit codes start processes again, and what is left."""

import dataclasses
import os
import pathlib
import threading

import psutil
import pytest

from realm_jax import errors
from tests.refused import refused
from tests.waiting import wait_until
from tpu_launch.processes import Command, Ended, Group, Pace, keep_running
from tpu_launch.records import last_line

pytestmark = pytest.mark.process("the loop is about processes")

AT_ONCE = Pace(
    backoff=0.0, longest_backoff=0.0, waiting=0.0, saving=30.0, settling=5.0, poll=0.01
)


def command(folder: pathlib.Path, script: str, number: int = 0) -> Command:
    return Command(["sh", "-c", script], os.environ, folder / f"{number}.log")


def codes_in_turn(folder: pathlib.Path, *codes: int) -> Command:
    """A program that ends with these codes, one at each start."""
    cases = "".join(f"{i}) exit {code};; " for i, code in enumerate(codes, start=1))
    count = "echo started; n=$(grep -c started $LOG)"
    made = command(folder, f"{count}; case $n in {cases} esac")
    return Command(made.arguments, {**os.environ, "LOG": str(made.log)}, made.log)


def run(*commands: Command, is_over=lambda: False, **others) -> int:
    others = {
        "is_done": lambda: True,
        "reached": lambda: 0,
        "stop": threading.Event(),
        "max_restarts": 2,
        "pace": AT_ONCE,
        **others,
    }
    return keep_running(commands, is_over=is_over, say=lambda text: None, **others)


def starts(command: Command) -> int:
    return command.log.read_text().count("started")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0,), 0),
        ((2,), 2),
        # At the same place, three times at most.
        ((1, 134, 0), 0),
        ((1, 1, 1), 1),
        # What waits, or was asked to stop by others, has not failed.
        ((75, 75, 75, 75, 143, 143, 143, 0), 0),
        ((1, 75, 1, 143, 1), 1),
    ],
)
def test_what_an_exit_code_leads_to(tmp_path, codes, expected):
    one = codes_in_turn(tmp_path, *codes)
    assert run(one) == expected
    assert starts(one) == len(codes)


def test_who_gets_further_is_not_given_up(tmp_path):
    one = codes_in_turn(tmp_path, *[1] * 6, 0)
    assert run(one, reached=lambda: starts(one)) == 0


def test_crashes_while_nobody_knows_how_far_it_is_do_not_count(tmp_path):
    one = codes_in_turn(tmp_path, *[1] * 6, 0)

    def away():
        raise OSError("the bucket is away")

    assert run(one, reached=away) == 0


def test_code_0_is_not_the_end_before_the_work_is_done(tmp_path):
    one = codes_in_turn(tmp_path, 0, 0, 0)
    assert run(one, is_done=lambda: starts(one) == 3) == 0


def test_processes_are_started_again_together(tmp_path):
    first = codes_in_turn(tmp_path, 1, 0)
    log = tmp_path / "1.log"
    # It would wait for the other for ever.
    other = command(tmp_path, f"echo started; grep -c started {log} | grep 2", 1)
    waiting = f"{other.arguments[2]} || sleep 600"
    other = Command(["sh", "-c", waiting], os.environ, log)
    quick = dataclasses.replace(AT_ONCE, settling=0.1)
    assert run(first, other, pace=quick) == 0
    assert (starts(first), starts(other)) == (2, 2)


def test_the_code_that_tells_most(tmp_path):
    for codes, expected in (
        ((134, 2), 2),
        ((137, 143), 143),
        ((134, 75), 75),
        ((1, 0), 1),
    ):
        commands = [command(tmp_path, f"exit {c}", i) for i, c in enumerate(codes)]
        group = Group(commands)
        assert group.wait(30.0)
        assert group.kill() == expected


@pytest.mark.parametrize("how", ["asked to stop", "over"])
def test_who_must_end_saves_first_and_leaves_no_child(tmp_path, how):
    stop, ready = threading.Event(), tmp_path / "ready"
    saves = "trap 'echo saved; exit 143' TERM; sleep 600 & echo $! > $READY; wait"
    environment = {**os.environ, "READY": str(ready)}
    one = Command(["sh", "-c", saves], environment, tmp_path / "0.log")
    looked = threading.Event()

    def is_ready():
        if not (ready.exists() and ready.read_text().strip()):
            return False
        if how == "over":
            # Once: who looks seldom says no between two looks.
            first = not looked.is_set()
            looked.set()
            return first
        stop.set()
        return False

    assert run(one, is_over=is_ready, stop=stop) == 143
    assert last_line(one.log) == "saved"
    child = int(ready.read_text())
    wait_until(lambda: not is_at_work(child))


def is_at_work(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_who_is_asked_before_it_starts_does_not_start(tmp_path):
    stop = threading.Event()
    stop.set()
    one = codes_in_turn(tmp_path, 0)
    assert run(one, stop=stop) == 143
    assert not one.log.exists()


def test_a_program_that_is_not_there_leaves_the_others_ended(tmp_path):
    there = command(tmp_path, "echo $$; sleep 600")
    missing = Command([str(tmp_path / "nothing")], {}, tmp_path / "1.log")
    with refused("expected a program that can be run"):
        run(there, missing)
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert not [p for p in sleeping if p.info["cmdline"][-1:] == ["echo $$; sleep 600"]]


def test_of_crashes_the_first_one_is_named(tmp_path):
    """The others end because of it, with codes of their own."""
    gate = tmp_path / "gate"
    waiting = f"until [ -e {gate} ]; do sleep 0.01; done; exit 134"
    group = Group([command(tmp_path, waiting), command(tmp_path, "exit 137", 1)])
    wait_until(lambda: group.code() == 137)
    gate.touch()
    assert group.wait(30.0)
    assert group.kill() == 137


def test_exit_codes_are_those_of_the_command_line():
    from realm_jax.cli import main

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
