"""What a TPU VM's worker says in the model directory, and what it hears there."""

import http.client
import os
import threading
import time

import pytest

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.snapshots import RETRIEVER_SERIES
from realm_jax.storage import open_store
from tests.waiting import wait_until
from tpu_launch import records, worker
from tpu_launch.identity import WorkerIdentity
from tpu_launch.processes import Command, Pace
from tpu_launch.records import Outcome
from tpu_launch.run import BUILDER, TRAINER
from tpu_launch.worker import Reporter

DONE, FAILED = Outcome(True, 0, "", 1.0), Outcome(False, 1, "no disk", 1.0)
AT_ONCE = Pace(backoff=0.0, longest_backoff=0.0, waiting=0.0, poll=0.01)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "model")


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").write_text("")
    return tmp_path / "log"


def reporter(store, log, role=TRAINER, host=0):
    identity = WorkerIdentity(host, 0, 2, 1, "a")
    return Reporter(store, role, f"run-{role}-1", identity, log, print)


def work(store, log, script, role=TRAINER, host=0, deadline=float("inf")):
    """Runs a worker's command, without the thread that reports every minute."""
    made = reporter(store, log, role, host)
    code = worker.work(
        *(Command(["sh", "-c", script], os.environ, log), made, store, role),
        deadline=deadline,
        max_restarts=2,
        stop=threading.Event(),
        say=lambda text: None,
        pace=AT_ONCE,
    )
    return code, records.read_outcome(store, role)


@pytest.mark.process("it runs a command")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", (True, 0, "")),
        ("echo 'error: expected a, got b'; exit 2", (False, 2, "expected a, got b")),
        ("echo Killed; exit 137", (False, 137, "Killed")),
    ],
)
def test_the_end_of_the_work_is_said(store, log, script, expected):
    code, outcome = work(store, log, script)
    assert (outcome.done, outcome.code, outcome.message) == expected
    assert code == outcome.code


@pytest.mark.process("it runs a command")
def test_the_deadline_is_no_end_of_the_work(store, log):
    code, outcome = work(store, log, "sleep 600", deadline=time.time())
    assert (code, outcome) == (1, None)


def test_only_the_first_worker_says_that_the_work_is_done(store, log):
    other = reporter(store, log, host=1)
    assert not other.end(0)
    assert records.outcomes(store) == {}
    assert reporter(store, log).end(0)
    assert other.end(0)
    # But each says that it has failed; the first to say so knows why.
    records.forget_outcomes(store)
    log.write_text("first\n")
    assert not other.end(1)
    log.write_text("second\n")
    assert not reporter(store, log).end(1)
    assert records.read_outcome(store, TRAINER).message == "first"


def test_a_builder_is_done_once_its_trainer_is(store, log):
    builder = reporter(store, log, BUILDER)
    assert not builder.end(0)
    records.write_outcome(store, TRAINER, DONE)
    assert builder.end(0)


def test_a_builder_is_over_once_the_last_retriever_has_its_index(store, log):
    builder = reporter(store, log, BUILDER)
    store.write(f"{RETRIEVER_SERIES}/commits/{7:08d}.json", b"{}")
    records.write_outcome(store, TRAINER, DONE)
    builder.report()
    assert builder.over == ""
    Heartbeat(store, "index_builder").beat(7, refused={"7": "damaged"})
    builder.report()
    assert builder.is_done
    assert builder.over == "the work is done"
    assert records.read_outcome(store, BUILDER).done


@pytest.mark.parametrize("role", [TRAINER, BUILDER])
def test_a_failure_of_one_ends_all(store, log, role):
    roles = (TRAINER, TRAINER, BUILDER, BUILDER)
    workers = [reporter(store, log, one, i % 2) for i, one in enumerate(roles)]
    records.write_outcome(store, role, FAILED)
    for one in workers:
        one.report()
        assert one.over == f"the {role} has failed: no disk"
        assert not one.is_done


def test_logs_are_kept_short_in_the_model_directory(store, log):
    log.write_bytes(b"0123456789\n" * 100_000)
    reporter(store, log, host=1).report()
    kept = store.read("launch/logs/run-trainer-1/1.log")
    assert len(kept) <= 256 << 10
    assert set(kept.splitlines()) == {b"0123456789"}


class Answer:
    def __init__(self, data):
        self._data = data

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        return self._data


def test_a_preemption_is_heard_whatever_the_server_answers(monkeypatch):
    answers = iter(
        [
            OSError("refused"),
            http.client.RemoteDisconnected("gone"),
            http.client.IncompleteRead(b""),
            Answer(b"FALSE"),
            Answer(b"TRUE\n"),
        ]
    )

    def ask(path, environment, seconds):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(worker, "open_metadata", ask)
    monkeypatch.setattr(worker, "_NOTICE_RETRY_SECONDS", 0.0)
    stop = threading.Event()
    thread = threading.Thread(target=worker.await_preemption, args=({}, stop))
    thread.start()
    wait_until(stop.is_set)
    thread.join()
