import dataclasses
import json
import os
import socket
import threading
import time
from unittest import mock

import pytest

from realm_jax.index import builder, heartbeat
from realm_jax.index.build import IndexBuild
from realm_jax.index.builder import IndexBuilder
from realm_jax.index.heartbeat import Heartbeat, Listener, read_heartbeat
from realm_jax.storage import UnavailableStoreError, open_store
from tests.flipped import read_flipped
from tests.index.tiny_builder import SCANN, publish
from tests.refused import refused
from tests.waiting import Clock, wait_until


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, moved by hand."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_another_job_hears_what_was_said(store):
    assert read_heartbeat(store, "trainer") is None
    began = time.time()
    Heartbeat(store, "trainer").beat(40, index_step=20, kept=[10, 20])
    status = read_heartbeat(store, "trainer")
    assert status == heartbeat.JobStatus(
        "trainer",
        40,
        "running",
        status.time,
        os.getpid(),
        socket.gethostname(),
        {"index_step": 20, "kept": [10, 20]},
    )
    assert began <= status.time <= time.time()
    assert read_heartbeat(store, "index_builder") is None
    # A job of another release may say more, and gives no checksum.
    said = json.loads(store.read("jobs/trainer.json"))
    del said["crc32c"]
    store.write("jobs/trainer.json", json.dumps({**said, "chips": 8}).encode())
    assert read_heartbeat(store, "trainer") == status


def test_is_alive_while_running_and_heard_of(store, clock):
    beats = Heartbeat(store, "trainer")
    beats.beat(1)
    clock.seconds += 30
    status = read_heartbeat(store, "trainer")
    assert status.age_seconds() == 30
    assert status.is_alive(timeout_seconds=30)
    assert not status.is_alive(timeout_seconds=29)
    beats.beat(2, "failed")
    status = read_heartbeat(store, "trainer")
    assert status.step == 2
    assert not status.is_alive(timeout_seconds=30)
    # A clock that is behind makes no negative age.
    clock.seconds -= 5
    assert status.age_seconds() == 0


def test_steps_alone_are_not_said_too_often_and_anything_else_at_once(store, clock):
    beats = Heartbeat(store, "trainer", every_seconds=5)
    beats.beat(1, index_step=0)
    clock.seconds += 4
    beats.beat(2, index_step=0)
    assert read_heartbeat(store, "trainer").step == 1
    clock.seconds += 1
    beats.beat(3, index_step=0)
    assert read_heartbeat(store, "trainer").step == 3
    # Garbage collection must know of the index in use before it is too late.
    beats.beat(4, index_step=4)
    assert read_heartbeat(store, "trainer").step == 4
    beats.beat(5, "finished", index_step=4)
    assert read_heartbeat(store, "trainer").step == 5


def test_another_file_is_no_heartbeat(store):
    for contents in (b"", b"[1]", b"{}", b'{"role": "trainer"}'):
        store.write("jobs/trainer.json", contents)
        with refused(r"jobs/trainer\.json"):
            read_heartbeat(store, "trainer")
    Heartbeat(store, "trainer").beat(1, "asleep")
    with refused("asleep"):
        read_heartbeat(store, "trainer")


def test_whichever_bit_changes_nothing_else_is_read(tmp_path):
    """Garbage collection would delete what a changed number no longer names."""
    store = open_store(tmp_path)
    Heartbeat(store, "trainer").beat(40, index_step=20, kept_index_steps=[10, 20])
    said = read_heartbeat(store, "trainer")
    read = read_flipped(
        tmp_path / "jobs/trainer.json", lambda: read_heartbeat(store, "trainer")
    )
    # Those in the name of the checksum, as if there were none.
    assert read
    assert all(status == said for status in read)


def test_a_builder_beats_while_scann_trains(store, blocks, retriever_at, monkeypatch):
    """Training ScaNN has no moment at which the builder could say anything."""
    monkeypatch.setattr(builder, "_REPEAT_SECONDS", 0.02)
    times = set()

    def train(self, assets):
        listener = Listener(store, builder.BUILDER_ROLE)

        def is_heard_of_often():
            said, _ = listener.listen()
            if said is not None:
                assert (said.state, said.extra["activity"]) == ("running", "embedding")
                times.add(said.time)
            return len(times) == 4

        wait_until(is_heard_of_often)
        return {}

    monkeypatch.setattr(IndexBuild, "write_scann_assets", train)
    publish(store, blocks, retriever_at(3))
    Heartbeat(store, builder.TRAINER_ROLE).beat(3)
    job = IndexBuilder(store, blocks, SCANN)
    Heartbeat(store, builder.TRAINER_ROLE).beat(3, "finished")
    assert job.run(threading.Event())
    assert len(times) == 4
    # Its last word is not repeated.
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "finished"
    running = {thread.name for thread in threading.enumerate()}
    assert f"{builder.BUILDER_ROLE}-heartbeat" not in running


def test_a_store_that_is_away_does_not_end_the_repeating(store, monkeypatch):
    beats = Heartbeat(store, "trainer")
    with beats.repeated(0.05):
        beats.beat(1, index_step=7)
        with monkeypatch.context() as patched:
            away = mock.Mock(side_effect=UnavailableStoreError("503"))
            patched.setattr(store, "write", away)
            wait_until(lambda: away.called)
        before = read_heartbeat(store, "trainer")
        wait_until(lambda: read_heartbeat(store, "trainer") != before)
    after = read_heartbeat(store, "trainer")
    assert dataclasses.replace(after, time=before.time) == before
