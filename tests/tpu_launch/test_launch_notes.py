"""What a launcher notes for whoever watches."""

import dataclasses

import pytest

from realm_jax.errors import BadInputError
from tests.tpu_launch import launching
from tests.tpu_launch.fake_tpu import MemoryStore
from tests.tpu_launch.watched_run import HOUR
from tpu_launch.attempts import Attempts, TakenOverError, read_launcher
from tpu_launch.deleting import GaveUpError
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.reconcile import Reconciler
from tpu_launch.watching.run_status import read_status


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
