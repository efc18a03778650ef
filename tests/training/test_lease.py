"""Two trainers of one model directory: real processes, stopped, killed and at once."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from realm_jax.storage import open_store
from realm_jax.training import lease, warm_start
from realm_jax.training.lease import Lease
from tests import tiny_world
from tests.flipped import flipped
from tests.refused import refused
from tests.tiny_world import NEVER
from tests.training.runs import run_to_end
from tests.waiting import Clock, wait_until

# Holds a lease until it is asked, by a line on its input, whether it still does.
HOLDER = """
import sys
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from realm_jax.training import lease
lease._BEAT_SECONDS = 0.1
try:
    held = lease.Lease(open_store(sys.argv[1]), stale_seconds=1.0)
except BadInputError as error:
    sys.exit(f"refused: {error}")
print("held", flush=True)
for line in sys.stdin:
    if line == "release\\n":
        held.release()
    try:
        if line == "lately\\n":
            print("held lately" if held.is_held(lately=True) else "lost", flush=True)
            continue
        held.require_held()
        print("still held", flush=True)
    except BadInputError as error:
        print(error, flush=True)
"""


class Holder(subprocess.Popen):
    def __init__(self, folder):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = [sys.executable, "-c", HOLDER, str(folder)]
        super().__init__(program, text=True, **pipes)

    def line(self):
        return self.stdout.readline().strip()

    def ask(self, what=""):
        self.stdin.write(f"{what}\n")
        self.stdin.flush()
        return self.line()

    def end(self):
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self.communicate()


@pytest.fixture
def holders(tmp_path):
    started = []

    def start():
        started.append(Holder(tmp_path))
        return started[-1]

    yield start
    for holder in started:
        holder.end()


@pytest.mark.full
@pytest.mark.parametrize("end", ["release", "kill"])
def test_the_next_trainer_does_not_wait_for_one_that_has_ended(holders, tmp_path, end):
    first = holders()
    assert first.line() == "held"
    if end == "kill":
        first.end()
    else:
        first.ask("release")
    began = time.monotonic()
    held = Lease(open_store(tmp_path))
    assert time.monotonic() - began < 5
    held.require_held()
    held.release()
    assert open_store(tmp_path).list() == []


@pytest.mark.full
def test_a_suspended_trainer_is_replaced_and_then_keeps_out(holders, tmp_path):
    first = holders()
    assert first.line() == "held"
    first.send_signal(signal.SIGSTOP)
    held = Lease(open_store(tmp_path), stale_seconds=1.0)
    first.send_signal(signal.SIGCONT)
    assert first.ask("lately") == "lost"
    assert f"process {os.getpid()} on" in (said := first.ask())
    assert "has taken over" in said
    held.require_held()
    held.release()


@pytest.mark.full
def test_of_trainers_that_come_at_once_one_gets_in_and_goes_on(holders, tmp_path):
    started = [holders() for _ in range(3)]
    said = [holder.line() for holder in started]
    assert sorted(said) == ["", "", "held"]
    first = started[said.index("held")]
    for holder in started:
        if holder is not first:
            assert "refused: expected no other trainer" in holder.stderr.read()
    with refused(f"process {first.pid} on .* at wo"):
        Lease(open_store(tmp_path))
    assert first.ask() == "still held"
    assert first.ask("lately") == "held lately"


class Sleep(Clock):
    """Takes the place of `time` in the lease; `during` is called in every sleep."""

    CLOCK_BOOTTIME = 0

    def __init__(self, monkeypatch, during=lambda: None):
        super().__init__()
        self.slept = []
        self._during = during
        monkeypatch.setattr(lease, "time", self)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.seconds += seconds
        self._during()

    def clock_gettime(self, which):
        return self.time()


def foreign_holder(root, beat):
    """Files of a trainer on another machine."""
    store = open_store(root)
    store.write("lease/7.json", json.dumps({"host": "elsewhere", "pid": 1}).encode())
    store.write("lease/7.beat.json", beat.encode())


def test_a_silent_trainer_of_another_machine_is_replaced(tmp_path, monkeypatch):
    for beat in ('{"beat": 3}', "\x00 no JSON"):
        foreign_holder(tmp_path, beat)
        sleep = Sleep(monkeypatch)
        held = Lease(open_store(tmp_path), stale_seconds=30.0)
        assert sum(sleep.slept) == 30.0
        held.require_held()
        held.release()


def test_a_trainer_in_another_container_here_is_not_gone(tmp_path, monkeypatch):
    """Its number is that of another process here, or of none."""
    held = Lease(open_store(tmp_path))
    monkeypatch.setattr(lease, "_pid_namespace", lambda: "of another container")
    beat = itertools.count(100)
    Sleep(monkeypatch, lambda: held._beat(next(beat)))
    with refused("is at work there"):
        Lease(open_store(tmp_path))
    held.require_held()
    held.release()


def test_whichever_bit_changes_the_lease_is_held(tmp_path):
    held = Lease(open_store(tmp_path))
    path = tmp_path / "lease/1.json"
    sound, rewritten = path.read_bytes(), 0
    for data in flipped(sound):
        path.write_bytes(data)
        held.require_held()
        rewritten += path.read_bytes() == sound
    # But for those in the name of the checksum, as if there were none.
    assert rewritten > 8 * (len(sound) - len("crc32c"))
    for data in (b"", b"[1]", sound[:-9]):
        path.write_bytes(data)
        assert held.is_held()
    # A successor deletes it, and one that has a newer number has taken over.
    path.unlink()
    assert not held.is_held()
    path.write_bytes(b"")
    foreign_holder(tmp_path, '{"beat": 0}')
    with refused("elsewhere.* has taken over"):
        held.require_held()
    held.release()
    assert not path.exists()


def test_a_lease_of_an_earlier_release_is_read(tmp_path):
    held = Lease(open_store(tmp_path))
    path = tmp_path / "lease/1.json"
    said = json.loads(path.read_bytes())
    del said["crc32c"]
    path.write_text(json.dumps(said))
    held.require_held()
    assert json.loads(path.read_bytes()) == said
    held.release()


def test_a_stage_refuses_and_saves_nothing(world, tmp_path, monkeypatch):
    def beat():
        """The other trainer beats less often than is looked for it."""
        count = len(sleep.slept) // 8
        foreign_holder(tmp_path, json.dumps({"beat": count}))

    foreign_holder(tmp_path, '{"beat": 0}')
    sleep = Sleep(monkeypatch, beat)
    with refused(r"process 1 on elsewhere\) is at work"):
        run_to_end(warm_start, world, tmp_path)
    assert len(sleep.slept) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_a_stage_that_was_replaced_saves_nothing_more(world, tmp_path, quick_updates):
    quick_updates(warm_start, "WarmStartLoss")

    def replace(step, total, values, what=""):
        if step == 2:
            wait_until((tmp_path / "checkpoints" / "1.json").exists)
            foreign_holder(tmp_path, '{"beat": 0}')

    config = tiny_world.warm_start_config(
        world, tmp_path, train_steps=4, checkpoint_period=1
    )
    with refused(r"elsewhere.* has taken over"):
        warm_start.run(config, replace, NEVER)
    steps = {path.name for path in (tmp_path / "checkpoints").glob("*.json")}
    assert "1.json" in steps
    assert not steps & {"3.json", "4.json"}
    assert lease._STALE_SECONDS > 2 * lease._BEAT_SECONDS
