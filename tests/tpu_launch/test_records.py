"""What a model directory says of a launch, and the commands that show it."""

import dataclasses
import json
import os
import threading
import time

import pytest
from rich.console import Console

from realm_jax.errors import StoppedError
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import open_store
from tests.flipped import read_flipped
from tests.refused import refused
from tpu_launch import logs, records, status
from tpu_launch.gke import Gke
from tpu_launch.logs import MISSING, Tail, stored_lines
from tpu_launch.records import GKE, LaunchRecord
from tpu_launch.run import BUILDER, TRAINER

ROLES = {TRAINER: "2 processes", BUILDER: "1 process"}


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "model")
    where = {"logs": str(tmp_path / "logs")}
    record = LaunchRecord("run-0a", "local", ROLES, 5.0, None, 100, where)
    records.write_record(store, record)
    assert records.read_record(store) == record
    return store


@pytest.fixture
def shown(launcher):
    """Runs a command; returns its output, or its error if it has to fail."""

    def run(store, command, *more, code=0):
        given = f'--gin.MODEL_DIR="{store.url()}"'
        out, err = launcher(command, given, *more, code=code)
        return err if code else out

    return run


def test_what_is_no_record(store):
    kept = store.read("launch/run.json")
    for name in ("launch/trainer.json", "launch/run.json"):
        for data in (b"{", b"[]", b'{"state": "asleep"}'):
            store.write("launch/run.json", kept)
            store.write(name, data)
            with refused("delete the file"):
                status.read_status(store, 0.0)
        store.delete(name)


def test_no_changed_bit_of_what_was_launched_is_believed(store, tmp_path, shown):
    path, record = tmp_path / "model/launch/run.json", records.read_record(store)
    read = read_flipped(path, lambda: records.find_record(store))
    # Without the key of its checksum it is not as any version has written it.
    assert read == []
    # Those of earlier releases have none.
    path.write_text(json.dumps(dataclasses.asdict(record), indent=1))
    assert records.read_record(store) == record
    path.write_bytes(path.read_bytes()[:-1])
    for command in ("status", "logs", "down"):
        (said,) = shown(store, command, code=2).splitlines()
        assert f"{path}, got something else" in said


def test_a_run_is_shown_as_it_goes_on(store, shown):
    def state(*names):
        found = json.loads(shown(store, "status", "--json"))
        roles = [(role["state"], role["step"]) for role in found["roles"]]
        return roles, *(found[name] for name in names)

    assert state() == ([("starting", None)] * 2,)
    Heartbeat(store, "trainer").beat(70, index_step=60)
    Heartbeat(store, "index_builder").beat(
        60, activity="embedding", blocks_done=30, num_blocks=120
    )
    store.write(
        "metrics.jsonl",
        b'{"step": 69, "stage": "pretrain", "loss": 1.5, "steps_per_second": 2.0}\n',
    )
    names = ("total_steps", "index_step", "index_age_steps", "is_over", "metrics")
    roles, *others, metrics = state(*names)
    assert roles == [("running", 70), ("running", 60)]
    assert (others, metrics["loss"]) == ([100, 60, 10, False], 1.5)
    text = shown(store, "status")
    for part in ("70 of 100", "loss 1.500", "10 steps old", "embeds 25 %: 30 of 120"):
        assert part in text
    line = status.in_one_line(status.read_status(store, time.time()))
    assert line == (
        "step 70 of 100, 70 %, 15.0 s left   loss 1.500   2 steps/s   "
        "index of step 60, 10 steps old   trainer running   "
        "builder embeds 25 %: 30 of 120"
    )
    # Words of an earlier launch do not count.
    record = records.read_record(store)
    records.write_record(store, dataclasses.replace(record, time=time.time() + 60))
    assert state()[0][0] == ("starting", 69)  # Of the metrics.
    records.write_record(store, record)
    # Nobody has said a word for an hour.
    late = status.read_status(store, time.time() + 3600)
    assert [role.state for role in late.roles] == ["silent", "silent"]
    records.write_outcome(store, TRAINER, 0)
    records.write_outcome(store, BUILDER, 2, "expected a")
    assert state("is_over") == ([("done", 70), ("failed", 60)], True)
    assert "builder: expected a" in shown(store, "status", "--once")


def test_a_run_that_its_engine_has_forgotten_is_over_once_its_trainer_is_done(
    store, monkeypatch
):
    record = dataclasses.replace(
        records.read_record(store), backend=GKE, where={"namespace": "default"}
    )
    monkeypatch.setattr(Gke, "state", lambda engine, run_id: [])
    for state in ("running", "finished"):
        Heartbeat(store, "trainer").beat(100, state)
        found = status._with_engine(status.read_status(store, time.time()), record)
        assert found.is_over == (state == "finished")


def test_no_line_is_wrapped(store):
    Heartbeat(store, "trainer").beat(70)
    records.write_outcome(store, BUILDER, 2, "expected " * 40)
    for width in (40, 80, 160):
        console = Console(width=width)
        with console.capture() as written:
            console.print(status.render(status.read_status(store, time.time())))
        lines = written.get().splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) < 12


def test_what_was_never_launched_is_one_line(store, tmp_path, shown):
    nothing = open_store(tmp_path / "nothing")
    for command in ("status", "logs", "down"):
        assert "expected a launched run in" in shown(nothing, command, code=2)
    # Nor is `down` for runs of no engine.
    assert "got one of this machine" in shown(store, "down", code=2)


def test_logs_are_those_of_the_last_machines(store, tmp_path, shown):
    for name, text in (
        # Numbers begin anew when nothing of a run is left.
        ("trainer-2/0", "old\n"),
        ("trainer-1/0", "new\n"),
        ("trainer-2/1", "no end"),
        ("builder-1/0", "beside\n"),
        ("trainer-2/notes", "none\n"),
    ):
        path = tmp_path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1e9, 1e9 if text == "old\n" else 2e9))
    lines = ["builder/0 | beside", "trainer/0 | new", "trainer/1 | no end"]
    assert shown(store, "logs").splitlines() == lines
    assert shown(store, "logs", "--role=trainer", "--worker=1") == f"{lines[2]}\n"


def test_followed_logs_end_with_what_is_written_last(store, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.0)
    launched, store = store, open_store(tmp_path)
    ends = iter([b"a\nb\n", b"a\nb\nc", b"a\nb\nc\nd"])
    over = iter([False, False, True])

    def is_over():
        store.write("launch/logs/run-trainer-1/0.log", next(ends))
        return next(over)

    wanted = None, None, True, threading.Event()
    lines = stored_lines(store, "launch/logs", *wanted, is_over)
    assert [line for _, line in lines] == ["a", "b", "c", "d"]
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="the run goes on"):
        logs.main([f'--gin.MODEL_DIR="{launched.url()}"', "--follow"], stop)


def test_a_log_is_put_together_from_its_ends():
    """Against the log itself, of which each look sees the end, cut at a line."""
    lines = [f"line {n % 3} of {n // 7}".encode() for n in range(300)]
    whole, tail, found, written = b"\n".join(lines) + b"\n", Tail(), [], 0
    for written in [*range(0, len(whole), 97), len(whole)]:
        end = whole[max(0, written - 400) : written]
        if written > 400:
            end = end[end.find(b"\n") + 1 :]
        found += tail.see(end, is_last=written == len(whole))
    assert found == [line.decode() for line in lines]
    # What was overwritten between two looks is marked.
    tail = Tail()
    assert tail.see(b"a\nb\n", is_last=False) == ["a", "b"]
    assert tail.see(b"x\ny\n", is_last=False) == [MISSING, "x", "y"]
    # The end of a line is no line.
    tail = Tail()
    tail.see(b"ab\n", is_last=False)
    assert tail.see(b"b\nc\n", is_last=False) == [MISSING, "b", "c"]
