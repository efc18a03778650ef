"""A run that does not move ends itself. A look of these watchdogs is a second."""

import contextlib
import threading

import pytest

from realm_jax.storage import UnavailableStoreError, open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.step_timing import Part, Stopwatch
from realm_jax.training.watchdog import STALLED, Watchdog
from tests import groups
from tests.flipped import read_flipped
from tests.training.hosts_program import arguments

SHORTEST = 60.0
# Of the first updates, which are compiled.
AT_FIRST = 3600


class Run:
    """A training thread, and seconds that pass."""

    def __init__(self, store, done=100):
        self.codes = []
        self.stopwatch = Stopwatch()
        self.done = done
        self.watchdog = Watchdog(
            store, self.stopwatch, done, SHORTEST, self.codes.append
        )

    def wait(self, seconds):
        for _ in range(seconds):
            if not self.codes:
                self.watchdog.look()

    def updates(self, count, seconds):
        for _ in range(count):
            self.wait(seconds)
            self.done += 1
            self.watchdog(self.done)

    def stall(self):
        """Returns the exit code of a run whose first update never comes."""
        self.wait(AT_FIRST + 1)
        (code,) = self.codes
        return code


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def run(store):
    return Run(store)


def test_a_part_that_does_not_end_is_named(store, capfd):
    for part in (Part.HOST, Part.DEVICE, Part.SEARCH):
        run = Run(store)
        run.updates(50, seconds=2)
        with run.stopwatch.part(part):
            run.wait(60)
            assert run.codes == []
            run.wait(2)
        # The second at the same checkpoint is not started again.
        assert run.codes == [1 if part is Part.HOST else 2]
        *stacks, last = capfd.readouterr().err.splitlines()
        assert last.startswith(
            "error: expected update 151 within 60 s (one took 2 s before)"
        )
        assert f"the training thread is in '{part.value}', at training/" in last
        assert any("test_a_part_that_does_not_end" in line for line in stacks)


def test_an_update_may_take_twenty_times_as_long_however_it_is_waited_for(store):
    """Of every few, a line of metrics waits for all; the two after it come at once."""
    for waits in ([50], [0, 100], [0, 0, 50, 50, 150]):
        run = Run(store)
        for seconds in 20 * waits:
            run.updates(1, seconds)
        assert run.codes == []
        assert run.watchdog.bound == pytest.approx(20 * 50, rel=0.05)


def test_the_first_updates_may_be_compiled(run, capfd):
    run.updates(2, seconds=1)
    run.wait(AT_FIRST)
    assert run.codes == []
    run.wait(2)
    assert run.codes == [1]
    assert (
        "expected update 103 within 3600 s (compiling included)"
        in capfd.readouterr().err
    )


def test_compiling_makes_no_update_slow(run):
    """Several updates come between two looks."""
    run.updates(1, seconds=300)
    run.updates(4, seconds=0)
    run.wait(65)
    assert run.codes == [1]


def test_saving_and_indexes_take_as_long_as_they_need(run):
    run.updates(10, seconds=1)
    run.wait(50)
    for part in (Part.CHECKPOINT, Part.SWAP):
        with run.stopwatch.part(part):
            run.wait(10_000)
        assert run.codes == []
    run.wait(20)
    assert run.codes == [1]


def test_the_second_stall_at_a_checkpoint_ends_the_run(store, capfd):
    def save(step):
        store.write(f"checkpoints/{step}.json", b"{}")

    codes = []
    for step in (None, None, 100, 100, 200, 200, 200):
        if step is not None:
            save(step)
        codes.append(Run(store).stall())
    assert codes == [1, 2, 1, 2, 1, 2, 2]
    assert "for the second time since the last checkpoint" in capfd.readouterr().err


def test_processes_that_stall_together_stall_once(store):
    together = [Run(store) for _ in range(3)]
    assert [run.stall() for run in together] == [1, 1, 1]
    assert [run.stall() for run in [Run(store) for _ in range(3)]] == [2, 2, 2]


class Away:
    """A bucket that does not answer any more, or whose record is damaged."""

    def __init__(self, contents):
        self.contents = contents

    def read(self, name):
        assert name == STALLED
        return self.contents

    def list(self, folder):
        raise UnavailableStoreError("no answer")


def test_a_store_that_is_away_or_damaged_keeps_no_run_alive():
    for contents in (b"", b"[1]", b'{"step": 3}', b"\xff"):
        assert Run(Away(contents)).stall() == 1, contents


def test_no_changed_bit_of_a_stall_is_believed(store, tmp_path):
    store.write("checkpoints/100.json", b"{}")
    Run(store).stall()
    read = read_flipped(tmp_path / STALLED, lambda: Run(store).watchdog._stalled_at)
    assert set(read) == {100, None}


def test_its_thread_ends_with_training(run):
    def threads():
        return [one for one in threading.enumerate() if one.name == "watchdog"]

    with contextlib.suppress(KeyError), run.watchdog:
        assert len(threads()) == 1
        raise KeyError
    assert threads() == []
    assert run.codes == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_trainer_that_waits_for_its_data_is_started_again_once(world, tmp_path):
    settings = {"train_steps": 12, "stall_seconds": 15.0, "refresh_mode": "off"}
    ended = []
    for hangs_after in (7, None):
        train = arguments(world, tmp_path, **settings, hangs_after=hangs_after)
        with groups.started(train, num_processes=1) as job:
            ended += job.codes()
            (said,) = job.said()
        if hangs_after is not None:
            assert "error: expected update 8 within" in said.splitlines()[-1]
            assert "'host', at training/pretrain.py:" in said.splitlines()[-1]
            # The one that it would have saved is of update 8.
            assert finished_steps(open_store(tmp_path)) == [4]
    assert ended == [1, 0]
    assert finished_steps(open_store(tmp_path))[-1] == 12
