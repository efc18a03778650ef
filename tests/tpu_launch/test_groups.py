"""A group of processes: one that dies, hangs, cannot work, or is asked to stop."""

import os
import signal
import sys
import time

import pytest

from tpu_launch.groups import Group, Job, Pace

PACE = Pace(backoff=0.01, longest_backoff=0.02, mourning=0.5, stopping=10.0)

# Notes its attempt, and where it is to listen, in a file of its own.
_BEGIN = """
import os, pathlib, signal, sys, time
number = int(os.environ.get("JAX_PROCESS_ID", "0"))
notes = pathlib.Path(f"{number}.notes")
with notes.open("a") as file:
    file.write(os.environ.get("JAX_COORDINATOR_ADDRESS", "alone") + "\\n")
def lines(number):
    found = pathlib.Path(f"{number}.notes")
    return len(found.read_text().splitlines()) if found.exists() else 0
attempt = lines(number)
# Nobody dies before all have begun.
processes = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
while any(lines(i) < attempt for i in range(processes)):
    time.sleep(0.01)
def hang():
    while True:
        time.sleep(60)
def stop(*_):
    sys.exit(143)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts `program` as a group, which ends with the test."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(program, processes=2, said=None, **changes):
        arguments = [sys.executable, "-c", _BEGIN + program]
        job = Job("work", arguments, tmp_path, processes, **changes)
        say = print if said is None else said.append
        started.append(Group(job, say, PACE))
        return started[-1]

    yield start
    for group in started:
        group.end()


def wait(group, until=lambda: False, seconds=30.0):
    deadline = time.monotonic() + seconds
    while (code := group.check()) is None and not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def attempts(tmp_path, processes=2):
    """Where the processes were told to meet, at each attempt."""
    found = [
        (tmp_path / f"{number}.notes").read_text().split()
        for number in range(processes)
    ]
    assert all(notes == found[0] for notes in found)
    return found[0]


def test_an_ordinary_end_is_the_end(start, tmp_path):
    assert wait(group := start("print('said by', number)", processes=3)) == 0
    assert len(attempts(tmp_path, 3)) == 1
    assert (tmp_path / "work.log").read_text() == "said by 0\n"
    assert (tmp_path / "work-2.log").read_text() == "said by 2\n"
    assert group.failure == ""
    assert group.end() == 0


def test_a_single_process_is_told_nothing(start, tmp_path, monkeypatch):
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    program = "print(sorted(n for n in os.environ if n.startswith('JAX_')))"
    assert wait(start(program, processes=1)) == 0
    assert (tmp_path / "work.log").read_text() == "[]\n"
    assert attempts(tmp_path, 1) == ["alone"]
    assert wait(start(program, processes=1, devices=4)) == 0
    told = "['JAX_NUM_CPU_DEVICES', 'JAX_PLATFORMS']\n"
    assert (tmp_path / "work.log").read_text() == told


@pytest.mark.parametrize(
    "death",
    [
        "raise RuntimeError('out of luck')",
        "print('out of luck'); sys.stdout.flush(); os.kill(os.getpid(), 9)",
        "print('out of luck'); sys.exit(7)",
    ],
)
def test_one_that_dies_ends_those_that_hang_and_all_start_again(start, tmp_path, death):
    program = f"if attempt < 3 and number == 1:\n    {death}\nif attempt < 3: hang()"
    said = []
    assert wait(start(program, processes=3, said=said, restarts=2)) == 0
    ports = attempts(tmp_path, 3)
    assert len(ports) == len(set(ports)) == 3
    assert len(said) == 2
    assert all("process 1 of work ended with code" in line for line in said)
    assert all("out of luck" in line for line in said)


def test_one_that_does_not_listen_is_killed(start, tmp_path):
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if attempt == 1:\n"
        "    if number == 0: hang()\n"
        "    time.sleep(0.2); sys.exit(1)"
    )
    assert wait(start(program)) == 0
    assert len(attempts(tmp_path)) == 2


def test_bad_input_is_not_tried_again(start, tmp_path):
    program = "if number == 1: print('error: expected more'); sys.exit(2)\nhang()"
    group = start(program)
    assert wait(group) == 2
    assert len(attempts(tmp_path)) == 1
    log = tmp_path / "work-1.log"
    said = f"process 1 of work ended with code 2: expected more (see {log})"
    assert group.failure == said
    assert group.pids == []


def test_a_failure_that_repeats_is_given_up_and_named(start, tmp_path):
    program = "print('attempt', attempt); sys.exit(3)"
    group = start(program, processes=1, reached=lambda: "checkpoint 4", restarts=2)
    assert wait(group) == 3
    assert group.failure == (
        "work ended with code 3, 3 times in a row at checkpoint 4: attempt 3 "
        f"(see {tmp_path / 'work.log'})"
    )
    assert len(attempts(tmp_path, 1)) == 3


def test_a_failure_after_progress_is_another_one(start, tmp_path):
    reached = iter([1, 1, 2, 2, 3, 4])
    program = "if attempt < 7: sys.exit(3)"
    group = start(program, processes=1, reached=lambda: next(reached), restarts=2)
    assert wait(group) == 0
    assert len(attempts(tmp_path, 1)) == 7


def test_one_that_was_preempted_lets_the_others_save(start, tmp_path):
    program = (
        "signal.signal(signal.SIGTERM, stop if number else signal.SIG_IGN)\n"
        "pathlib.Path(f'{number}.ready').touch()\n"
        "if attempt == 1:\n"
        "    if number: hang()\n"
        # Longer than a group waits where all is lost.
        "    time.sleep(1.0); pathlib.Path('saved').touch(); sys.exit(143)"
    )
    group = start(program, restarts=1)
    ready = [tmp_path / f"{number}.ready" for number in range(2)]
    assert wait(group, lambda: all(path.exists() for path in ready)) is None
    os.kill(group.pids[1], signal.SIGTERM)
    assert wait(group) == 0
    assert (tmp_path / "saved").exists()
    assert len(attempts(tmp_path)) == 2


def test_a_group_that_is_asked_to_end_does_not_start_again(start, tmp_path):
    program = (
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(f'{number}.ready').touch()\n"
        "hang()"
    )
    group = start(program)
    ready = [tmp_path / f"{number}.ready" for number in range(2)]
    assert wait(group, lambda: all(path.exists() for path in ready)) is None
    pids = group.pids
    assert len(pids) == 2
    assert group.end() == group.check() == 143
    assert len(attempts(tmp_path)) == 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
