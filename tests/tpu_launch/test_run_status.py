"""A run, read from what its launcher, workers and jobs wrote."""

import json
import os

import pytest

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import MissingObjectError, UnavailableStoreError, open_store
from tests.tpu_launch import watched_run
from tests.tpu_launch.watched_run import (
    BEGAN,
    HOUR,
    NOW,
    RUN,
    AwayStore,
    role,
    shown,
    speak,
    text,
    written,
)
from tpu_launch import worker_state
from tpu_launch.attempts import Attempts
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.watching.cached_store import CachedStore
from tpu_launch.watching.run_status import find_run, read_status
from tpu_launch.watching.status_table import as_json, render
from tpu_launch.worker_state import Done, State


@pytest.fixture
def store(tmp_path):
    return watched_run.make(tmp_path)


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


def test_a_new_launcher_does_not_forget_since_when(store):
    attempts = Attempts(store, RUN, NOW)
    attempt = attempts.unended(BUILDER)
    attempts.note_slices(BUILDER, attempt, "WAITING_FOR_RESOURCES", NOW)
    assert role(store, BUILDER).slices_since == NOW - 720
    attempts.note_slices(BUILDER, attempt, "PROVISIONING", NOW)
    assert role(store, BUILDER).slices_since == NOW
