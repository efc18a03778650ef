import dataclasses
import os
import socket
import time
import types

import pytest

from realm_jax.errors import BadInputError
from realm_jax.index import heartbeat
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.storage import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, moved by hand."""
    now = [1000.0]
    clocks = types.SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(heartbeat, "time", clocks)
    return now


def test_nobody_has_spoken(store):
    assert read_heartbeat(store, "trainer") is None


def test_another_job_hears_what_was_said(model_store):
    began = time.time()
    Heartbeat(model_store, "trainer").beat(40, index_step=20, kept=[10, 20])
    status = read_heartbeat(model_store, "trainer")
    assert dataclasses.replace(status, time=0.0) == heartbeat.JobStatus(
        role="trainer",
        step=40,
        state="running",
        time=0.0,
        pid=os.getpid(),
        host=socket.gethostname(),
        extra={"index_step": 20, "kept": [10, 20]},
    )
    assert began <= status.time <= time.time()
    assert read_heartbeat(model_store, "index_builder") is None


def test_the_last_word_counts(store):
    beats = Heartbeat(store, "trainer")
    beats.beat(1)
    beats.beat(2, "finished")
    status = read_heartbeat(store, "trainer")
    assert (status.step, status.state) == (2, "finished")


def test_is_alive_while_running_and_heard_of(store, clock):
    beats = Heartbeat(store, "trainer")
    beats.beat(1)
    clock[0] += 30
    status = read_heartbeat(store, "trainer")
    assert status.age_seconds() == 30
    assert status.is_alive(timeout_seconds=30)
    assert not status.is_alive(timeout_seconds=29)
    beats.beat(1, "failed")
    assert not read_heartbeat(store, "trainer").is_alive(timeout_seconds=30)


def test_a_clock_that_is_behind_makes_no_negative_age(store, clock):
    Heartbeat(store, "trainer").beat(1)
    clock[0] -= 5
    assert read_heartbeat(store, "trainer").age_seconds() == 0


def test_steps_alone_are_not_said_too_often(store, clock):
    beats = Heartbeat(store, "trainer", every_seconds=5)
    beats.beat(1, index_step=0)
    clock[0] += 4
    beats.beat(2, index_step=0)
    assert read_heartbeat(store, "trainer").step == 1
    clock[0] += 1
    beats.beat(3, index_step=0)
    assert read_heartbeat(store, "trainer").step == 3


@pytest.mark.parametrize("change", [{"state": "finished"}, {"index_step": 4}])
def test_anything_but_a_step_is_said_at_once(store, clock, change):
    # Garbage collection must know of the index in use before it is too late.
    beats = Heartbeat(store, "trainer", every_seconds=5)
    beats.beat(1, index_step=0)
    beats.beat(2, **({"index_step": 0} | change))
    assert read_heartbeat(store, "trainer").step == 2


@pytest.mark.parametrize("contents", [b"", b"[1]", b"{}", b'{"role": "trainer"}'])
def test_another_file_is_no_heartbeat(store, contents):
    store.write("jobs/trainer.json", contents)
    with pytest.raises(BadInputError, match=r"jobs/trainer\.json") as caught:
        read_heartbeat(store, "trainer")
    assert "\n" not in str(caught.value)


def test_an_unknown_state_is_refused(store):
    Heartbeat(store, "trainer").beat(1, "asleep")
    with pytest.raises(BadInputError, match="asleep"):
        read_heartbeat(store, "trainer")
