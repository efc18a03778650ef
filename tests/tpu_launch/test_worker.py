"""What a TPU VM's worker says in the model directory, and what it hears there."""

import itertools
import os
import threading
import time
from unittest import mock

import pytest
from jax._src.clusters import cloud_tpu_cluster

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.snapshots import RETRIEVER_SERIES
from realm_jax.storage import UnavailableStoreError, open_store
from tests.flipped import flipped
from tests.refused import refused
from tests.tpu_launch.serving import served
from tests.tpu_launch.working import make_worker
from tpu_launch import records, worker
from tpu_launch.processes import Command
from tpu_launch.run import BUILDER, TRAINER, outcome_name
from tpu_launch.worker import find_place


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "model")


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").write_text("")
    return tmp_path / "log"


def make(store, log, role=TRAINER, number=0, script="", deadline=float("inf")):
    command = Command(["sh", "-c", script], os.environ, log)
    where = {"number": number, "name": f"run-{role}-1", "deadline": deadline}
    return make_worker(store, [command], role, **where)


@pytest.mark.process("it runs a command")
def test_the_end_of_the_work_is_said(store, log):
    for script, *expected in (
        ("exit 0", True, 0, ""),
        ("echo 'error: expected a, got b'; exit 2", False, 2, "expected a, got b"),
        ("echo Killed; exit 137", False, 137, "Killed"),
    ):
        records.forget_outcomes(store)
        code = make(store, log, script=script).run()
        outcome = records.outcomes(store)[TRAINER]
        assert [outcome.done, outcome.code, outcome.message] == expected
        assert code == outcome.code
    # The deadline is no end of the work.
    records.forget_outcomes(store)
    assert make(store, log, script="sleep 600", deadline=time.time()).run() == 1
    assert records.outcomes(store) == {}


def test_only_the_first_worker_says_that_the_work_is_done(store, log):
    other = make(store, log, number=1)
    assert not other.end(0)
    assert records.outcomes(store) == {}
    assert make(store, log).end(0)
    assert other.end(0)
    # But each says that it has failed; the first to say so knows why.
    records.forget_outcomes(store)
    log.write_text("first\n")
    assert not other.end(1)
    log.write_text("second\n")
    assert not make(store, log).end(1)
    assert records.outcomes(store)[TRAINER].message == "first"


def test_work_whose_end_cannot_be_said_is_not_done(store, log, monkeypatch):
    """Else a builder would wait for it until its deadline."""
    away = mock.Mock(side_effect=UnavailableStoreError("the bucket is away"))
    one = make(store, log)
    with monkeypatch.context() as patch:
        patch.setattr(records, "write_outcome", away)
        with pytest.raises(UnavailableStoreError):
            one.end(0)
    assert not one.is_done
    assert one.end(0)
    assert records.outcomes(store)[TRAINER].done


def test_whichever_bit_changes_a_worker_that_is_done_is_done(store, log):
    """Else it would run its command again, and again, until its deadline."""
    records.write_outcome(store, TRAINER, 0)
    name = outcome_name(TRAINER)
    for data in [*flipped(store.read(name)), b"", b"[1]", b"{}"]:
        store.write(name, data)
        # Any worker says it again, for the first one may have gone.
        one = make(store, log, number=1)
        assert one.end(0)
        assert one.is_done
        assert records.outcomes(store)[TRAINER].done
    # So is a builder, whatever is left of its trainer's end.
    store.write(name, b"damaged")
    builder = make(store, log, BUILDER)
    builder.report()
    assert builder.is_done
    # A startup script seals nothing.
    said = b'{"done": false, "code": 1, "message": "no code", "time": 5}'
    store.write(name, said)
    assert not make(store, log).end(1)
    assert records.outcomes(store)[TRAINER].message == "no code"


def test_a_builder_is_over_once_the_last_retriever_has_its_index(store, log):
    first, second = (make(store, log, BUILDER, number) for number in (0, 1))
    # Nor is it done by ending before its trainer, though with code 0.
    assert not first.end(0)
    store.write(f"{RETRIEVER_SERIES}/commits/{7:08d}.json", b"{}")
    records.write_outcome(store, TRAINER, 0)
    first.report()
    assert first.over == ""
    Heartbeat(store, "index_builder").beat(7, refused={"7": "damaged"})
    # Only the first says so, and the others learn it from what it said.
    second.report()
    assert second.over == ""
    for builder in (first, second):
        builder.report()
        assert builder.is_done
        assert builder.over == "the work is done"
    assert records.outcomes(store)[BUILDER].done
    assert make(store, log, BUILDER).end(0)


def test_a_failure_of_one_ends_all(store, log):
    for failed in (TRAINER, BUILDER):
        records.forget_outcomes(store)
        records.write_outcome(store, failed, 1, "no disk")
        for role, number in itertools.product((TRAINER, BUILDER), (0, 1)):
            one = make(store, log, role, number)
            one.report()
            assert one.over == f"the {failed} has failed: no disk"
            assert not one.is_done


def test_logs_are_kept_short_in_the_model_directory(store, log):
    log.write_bytes(b"0123456789\n" * 100_000)
    make(store, log, number=1).report()
    kept = store.read("launch/logs/run-trainer-1/1.log")
    assert len(kept) <= 256 << 10
    assert set(kept.splitlines()) == {b"0123456789"}


def test_a_preemption_is_heard_whatever_the_server_answers(monkeypatch):
    """An error, no such value, no answer, and what is no preemption."""
    answers = [(503, "TRUE"), (404, "TRUE"), None, (200, "FALSE"), (200, "TRUE\n")]
    waiting = iter(answers)
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.0)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", mock.Mock(wraps=stop.wait))
    with served(lambda *_: next(waiting)) as host:
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        worker.await_preemption(stop)
    assert stop.is_set()
    assert not [*waiting]
    # It waits wherever the server did not.
    assert stop.wait.call_count == 3


TPU_ENV = """MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'
MEGASCALE_NUM_SLICES: '3'
MEGASCALE_SLICE_ID: '2'
"""


@pytest.fixture
def stop():
    """Of a process that was asked to stop: it does not wait."""
    stop = threading.Event()
    stop.set()
    return stop


@pytest.fixture
def place(metadata, monkeypatch):
    """Attributes of the second host of two, in the third slice of three."""
    monkeypatch.setenv("GCE_METADATA_HOST", metadata["host"])
    endpoints = "unknown:unknown:10.0.2.1,unknown:unknown:10.0.2.2"
    metadata |= {"agent-worker-number": "1", "worker-network-endpoints": endpoints}
    metadata["tpu-env"] = TPU_ENV
    return metadata


def test_the_place_is_that_which_jax_finds(place, stop, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", place["host"])
    for name in ("ADDRESS", "NUM_SLICES", "SLICE_ID"):
        monkeypatch.delenv(f"MEGASCALE_{name}", raising=False)
    number, environment = find_place(3, 2, stop)
    jax = cloud_tpu_cluster.GceTpuCluster
    assert number == jax.get_process_id() == 5
    assert jax.get_process_count() == 6
    # And what JAX finds in the environment of the command leads to the same.
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert jax.get_process_id() == 5
    address = cloud_tpu_cluster.get_tpu_env_value("MEGASCALE_COORDINATOR_ADDRESS")
    assert address == "10.0.0.1:8080"
    assert find_place(1, 2, stop) == (1, {})


def test_what_is_missing_is_named(place, stop):
    for name, value, named in (
        ("agent-worker-number", None, "agent-worker-number"),
        ("agent-worker-number", "2", "a number below 2"),
        ("tpu-env", None, "MEGASCALE_COORDINATOR_ADDRESS"),
        ("tpu-env", TPU_ENV.replace("'2'", "'3'"), "MEGASCALE_SLICE_ID"),
        ("tpu-env", TPU_ENV.replace("10.0.0.1:8080", ""), "COORDINATOR_ADDRESS"),
    ):
        with pytest.MonkeyPatch.context() as patch, refused(named):
            patch.delitem(place, name)
            place.update({name: value} if value else {})
            find_place(3, 2, stop)
    with pytest.MonkeyPatch.context() as patch, refused("metadata server"):
        patch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
        find_place(1, 1, stop)
