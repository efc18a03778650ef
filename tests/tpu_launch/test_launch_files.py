"""What launcher and workers write into the model directory, and the bundle."""

import contextlib
import io
import json
import subprocess
import tarfile
import threading

import pytest

from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tests.tpu_launch import launching
from tpu_launch import diagnosis, worker_state
from tpu_launch.attempts import (
    Attempts,
    TakenOverError,
    cost,
    read_attempt,
    read_attempts,
)
from tpu_launch.backends.backend import FoundSlice, SliceState
from tpu_launch.bundle import make_bundle, require_shipped
from tpu_launch.diagnosis import BadInput, Failure, Lost
from tpu_launch.worker_state import Done, State, WorkerState


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def test_what_workers_say_is_read_as_it_was_written(store):
    said = {
        0: WorkerState(State.RUNNING, 12.5, 70),
        11: WorkerState(State.FAILED, 13.0, 70, "checkpoint 60", 139, "SIGSEGV"),
    }
    for worker, state in said.items():
        worker_state.write_worker(store, "run", "trainer", 3, worker, state)
    # Of the launcher, in the same folder.
    Attempts(store, "run", 0.0)
    store.write("launch/run/trainer/003/attempt.json", b"{}")
    assert worker_state.read_workers(store, "run", "trainer", 3) == said
    assert worker_state.read_workers(store, "run", "trainer", 4) == {}
    assert worker_state.read_done(store, "run", "trainer") is None
    assert not worker_state.mark_done(store, "run", "builder", Done(13.0, 1, 100))
    assert worker_state.read_done(store, "run", "builder") is None
    assert worker_state.mark_done(store, "run", "trainer", Done(14.0, 3, 100))
    assert worker_state.mark_done(store, "run", "builder", Done(15.0, 1, 100))
    assert worker_state.read_done(store, "run", "builder").time == 15.0
    assert worker_state.read_done(store, "run", "trainer") == Done(14.0, 3, 100)
    assert json.loads(store.read("launch/run/trainer/003/11.json"))["state"] == "failed"


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"state": "asleep", "time": 1}'])
def test_what_is_no_word_of_a_worker(store, data):
    store.write("launch/run/trainer/001/0.json", data)
    with pytest.raises(BadInputError, match=r"001/0.json"):
        worker_state.read_workers(store, "run", "trainer", 1)


def test_no_two_launchers_get_one_attempt(store):
    launchers = [Attempts(store, "run", float(i)) for i in range(4)]
    taken = []

    def take(launcher):
        for _ in range(5):
            # Only the last launcher has the run, but all of them claim numbers.
            with contextlib.suppress(TakenOverError):
                taken.append(launcher.begin("trainer", 1.0, 2.0))

    threads = [threading.Thread(target=take, args=(one,)) for one in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_attempts(store, "run", "trainer")
    assert [attempt.number for attempt in found] == list(range(1, 21))
    assert [attempt.launcher for attempt in taken] == [4] * 5
    # Those of the others are over before anything is created.
    left = [attempt.number for attempt in found if attempt.ended is None]
    assert left == sorted(attempt.number for attempt in taken)


def test_the_last_launcher_has_the_run(store):
    first = Attempts(store, "run", 1.0)
    first.require_ours()
    Attempts(store, "another-run", 2.0)
    first.require_ours()
    second = Attempts(store, "run", 2.0)
    second.require_ours()
    with pytest.raises(TakenOverError, match="run"):
        first.require_ours()


def test_an_attempt_from_its_beginning_to_its_end(store):
    attempts = Attempts(store, "run", 1.0)
    assert attempts.unended("trainer") is None
    attempts.begin("trainer", 5.0, None)
    second = attempts.begin("trainer", 6.0, 3.5)
    assert attempts.unended("trainer") == second
    assert attempts.unended("builder") is None
    attempts.activate("trainer", second, 6.5)
    attempts.activate("trainer", second, 7.5)
    attempts.end("trainer", second, 8.0, "preempted")
    assert attempts.unended("trainer") is None
    ended = read_attempt(store, "run", "trainer", 2)
    assert (ended.begun, ended.active, ended.ended) == (6.0, 6.5, 8.0)
    assert ended.price == 3.5
    assert ended.reason == "preempted"


CONFIG = launching.config(
    startup_minutes=20.0, silence_minutes=10.0, provisioning_minutes=60.0
)


ROLE = launching.job("v4-8", "").role("trainer")


def slices(state, expires="9999", reason="", machines="v4-8", number=1):
    labels = {"realm-expires": expires}
    return FoundSlice(
        "a", "us-central2-b", state, labels, 0.0, machines, number, reason
    )


def judged(found, since, now):
    return diagnosis.of_slices(found, ROLE, since, now, CONFIG)


@pytest.mark.parametrize("state", SliceState)
def test_anything_but_active_or_on_the_way_is_lost(state):
    fine = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"}
    found = judged(slices(state), 90.0, 100.0)
    assert (found is None) == (state.value in fine)


def test_slices_that_take_too_long_or_are_too_old_are_lost():
    waiting, coming = SliceState.WAITING, SliceState.PROVISIONING
    assert judged(slices(waiting), 0.0, 9000.0) is None
    assert judged(slices(coming), 0.0, 3600.0) is None
    assert judged(slices(coming), 0.0, 3601.0)
    active = slices(SliceState.ACTIVE, expires="100")
    assert judged(active, 0.0, 99.0) is None
    assert judged(active, 0.0, 100.0)
    failed = slices(SliceState.FAILED, reason="Quota 'TPUS' exhausted")
    assert judged(failed, 0.0, 1.0).quota


def test_slices_of_other_machines_are_not_kept():
    active = SliceState.ACTIVE
    assert judged(slices(active, machines="v4-8"), 0.0, 1.0) is None
    assert "other machines" in judged(slices(active, machines="v4-16"), 0.0, 1.0).reason
    assert "other machines" in judged(slices(active, number=2), 0.0, 1.0).reason


def test_attempts_cost_from_when_they_were_there(store):
    attempts = Attempts(store, "run", 0.0)
    for begun, active, ended in (
        (0, 600, 4200),
        (5000, None, 6000),
        (7000, 7200, None),
    ):
        attempt = attempts.begin("trainer", float(begun), 100.0)
        if active:
            attempts.activate("trainer", attempt, float(active))
        if ended:
            attempts.end("trainer", attempt, float(ended), "")
    found = read_attempts(store, "run", "trainer")
    assert [attempt.number for attempt in found] == [1, 2, 3]
    # An hour, nothing, and half an hour until now.
    assert cost(found, 7200.0 + 1800.0) == pytest.approx(150.0)
    assert read_attempts(store, "run", "builder") == []
    attempt = attempts.begin("builder", 0.0, None)
    attempts.activate("builder", attempt, 1.0)
    assert cost(read_attempts(store, "run", "builder"), 2.0) is None


RUNNING = WorkerState(State.RUNNING, 1000.0, 70)


@pytest.mark.parametrize(
    ("workers", "silent", "expected"),
    [
        ({0: RUNNING, 1: RUNNING}, (10.0, 10.0), None),
        ({0: RUNNING}, (10.0, 110.0), None),
        ({}, (1200.0, 1200.0), None),
        ({}, (1201.0, 1201.0), Failure),
        ({0: RUNNING}, (0.0, 1201.0), Failure),
        ({0: RUNNING}, (600.0, 700.0), None),
        ({0: RUNNING}, (601.0, 700.0), Lost),
        ({0: WorkerState(State.DONE, 10.0), 1: RUNNING}, (1000.0, 10.0), None),
        ({0: WorkerState(State.FAILED, 1000.0, 70, "", 1)}, (10.0, 10.0), Failure),
        ({0: WorkerState(State.FAILED, 1000.0, 70, "", 2)}, (10.0, 10.0), BadInput),
        ({0: WorkerState(State.FAILED, 1000.0, 70, "", 143)}, (10.0, 10.0), Lost),
        ({0: WorkerState(State.RESTARTING, 1000.0, 70, "", 1)}, (10.0, 10.0), None),
        ({0: WorkerState(State.STOPPED, 1000.0, 70, "", 143)}, (300.0, 10.0), None),
        ({0: WorkerState(State.STOPPED, 1000.0, 70, "", 143)}, (301.0, 10.0), Lost),
    ],
)
def test_what_workers_say_is_judged(workers, silent, expected):
    found = diagnosis.of_workers(workers, silent, CONFIG)
    assert found is None if expected is None else type(found) is expected
    if expected is Failure:
        assert found.place == ("step 70" if silent == (10.0, 10.0) else "the start")


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "kept.py").write_text("old")
    (folder / ".gitignore").write_text("*.log\n")
    for line in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    (folder / "kept.py").write_text("changed")
    (folder / "new.py").write_text("new")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "noise.log").write_text("ignored")
    return folder


@pytest.mark.process("git")
def test_a_bundle_is_the_checkout_as_it_is(checkout, store):
    bundle = make_bundle(checkout)
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
        found = {one.name: archive.extractfile(one).read() for one in archive}
        modes = {one.name: one.mode for one in archive}
    assert found.keys() == {".gitignore", "kept.py", "new.py", "run.sh"}
    assert found["kept.py"] == b"changed"
    assert modes["run.sh"] == 0o755
    operation = bundle.operation("gs://bucket/run/")
    name = operation.url.removeprefix("gs://bucket/run/")
    bundle.ship(store)
    bundle.ship(store)
    assert store.read(name) == bundle.data
    assert bundle.sha256 in name


@pytest.mark.process("git")
def test_a_bundle_is_named_by_what_it_holds(checkout):
    first = make_bundle(checkout)
    (checkout / "noise.log").write_text("more")
    (checkout / "new.py").touch()
    assert make_bundle(checkout) == first
    (checkout / "new.py").write_text("newer")
    assert make_bundle(checkout).sha256 != first.sha256


@pytest.mark.process("git")
@pytest.mark.parametrize("name", ["server.pem", "my-credentials.json", ".env"])
def test_a_bundle_holds_no_secret(checkout, name):
    (checkout / name).write_text("secret")
    with pytest.raises(BadInputError, match=f"{name}, which looks like a secret"):
        make_bundle(checkout)


@pytest.mark.process("git")
@pytest.mark.parametrize(
    "words",
    [
        # In two parts each, for this file is shipped too.
        ("-----BEGIN RSA PRIV", "ATE KEY-----"),
        ('{"type": "service_account", "private_key": "-----BEGIN PRIV', "ATE KEY-----"),
        ("token = 'hf", "_" + 34 * "a" + "'"),
        ("GITHUB_TOKEN=ghp", "_" + 36 * "A"),
        ("AKIA", 16 * "Z"),
        ("Bearer ya29", "." + 40 * "b"),
    ],
)
def test_a_bundle_holds_nothing_that_reads_like_a_secret(checkout, words):
    (checkout / "notes.txt").write_text(f"first line\n{''.join(words)}\n")
    with pytest.raises(BadInputError, match=r"notes\.txt, which looks like a secret"):
        make_bundle(checkout)
    (checkout / "notes.txt").write_text(f"first line\n{' '.join(words)}\n")
    assert make_bundle(checkout)


@pytest.mark.process("git")
def test_an_installation_ships_no_modules_of_its_user(checkout, tmp_path):
    installed = tmp_path / "site-packages"
    (installed / "realm_jax" / "gin").mkdir(parents=True)
    require_shipped(installed, ["tasks.corpora"])
    with pytest.raises(BadInputError, match=r"got my\.tasks; launch from a clone"):
        require_shipped(installed, ["tasks.corpora", "my.tasks"])
    require_shipped(checkout, ["my.tasks"])


@pytest.mark.process("git")
def test_a_bundle_is_code(checkout, tmp_path):
    with (checkout / "data.bin").open("wb") as file:
        file.truncate(11 << 20)
    with pytest.raises(BadInputError, match=r"data.bin of 11,534,336"):
        make_bundle(checkout)
    with pytest.raises(BadInputError, match="expected a git checkout"):
        make_bundle(tmp_path)
