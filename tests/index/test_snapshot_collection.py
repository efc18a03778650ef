"""What is deleted, and what never is."""

import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from realm_jax.index.builder import TRAINER_ROLE, collect_garbage
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.manifest import (
    EMBEDDINGS,
    AlreadyCommittedError,
    MissingAttemptError,
)
from realm_jax.index.snapshot_writer import SnapshotWriter
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import MissingObjectError, open_store
from tests.index.snapshot_files import (
    CORPUS,
    LAYOUT,
    LAYOUTS,
    ROWS,
    Killed,
    SteppedStore,
    assert_whole,
    begin,
    mortal,
    write_rows,
    write_snapshot,
)
from tests.index.tiny_builder import IN_A_BUCKET
from tests.waiting import PATIENCE


def test_killed_amid_collection_no_commit_is_broken(tmp_path):
    for lives in itertools.count():
        series = SnapshotSeries(open_store(tmp_path / f"{lives}"), "index")
        for step in (1, 2):
            write_snapshot(series, step)
        killer = SnapshotSeries(mortal(series.store, lives), "index")
        try:
            killer.collect(keep=1)
            break
        except Killed:
            for step in series.steps():
                series.verify(series.read_manifest(step))
        if 1 not in series.steps():
            resumed = series.resume(1, corpus_fingerprint=CORPUS, layouts=LAYOUTS)
            if resumed is not None:  # Then all of it must still be there.
                resumed.create_array(EMBEDDINGS, *LAYOUT)
                assert_whole(series, resumed.commit())
    assert series.steps() == [2]
    assert lives > 3


def test_collection_keeps_the_newest_and_what_is_in_use(series):
    manifests = {step: write_snapshot(series, step) for step in (1, 2, 3, 4)}
    removed = series.collect(keep=2, in_use=[1, 99])
    assert series.steps() == [1, 3, 4]
    assert removed == [series.store.url(f"index/data/2-{manifests[2].attempt}")]
    for step in (1, 3, 4):
        series.verify(manifests[step])
    assert not any("/2-" in name for name in series.store.list())
    assert series.collect(keep=2, in_use=[1]) == []


def test_collection_keeps_attempts_that_are_being_written(series):
    write_snapshot(series, 1)
    # The first rows of the one may take long; nothing has come of the other for long.
    writer = series.begin(2, corpus_fingerprint=CORPUS)
    dead = begun_long_ago(series, 3)
    assert len(series.collect(keep=1, attempt_age_seconds=3600)) == 1
    with pytest.raises(MissingObjectError):
        series.join(3, dead.attempt)
    writer.create_array(EMBEDDINGS, *LAYOUT)
    write_rows(writer)
    series.verify(writer.commit())
    assert series.steps() == [1, 2]


def begun_long_ago(series, step):
    writer = series._begin(step, CORPUS, {}, began=0.0)
    writer.create_array(EMBEDDINGS, *LAYOUT)
    write_rows(writer)
    folder = Path(series.store.url(f"index/data/{step}-{writer.attempt}"))
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    return writer


def test_each_restart_of_a_builder_leaves_no_copy(series):
    for _ in range(2):
        begun_long_ago(series, 2)
    other = begun_long_ago(series, 1)
    resumed = series.resume(2, corpus_fingerprint=CORPUS, layouts=LAYOUTS)
    attempts = {name.split("/")[2] for name in series.store.list("index/data")}
    assert attempts == {f"1-{other.attempt}", f"2-{resumed.attempt}"}
    resumed.create_array(EMBEDDINGS, *LAYOUT)
    assert_whole(series, resumed.commit())


def test_collection_survives_a_damaged_manifest(series):
    for step in (1, 2):
        write_snapshot(series, step)
    series.store.write("index/commits/1.json", b"damaged")
    series.collect(keep=1)
    assert series.steps() == [2]
    series.verify(series.read_manifest(2))


def test_steps_that_are_taken_again_are_forgotten(series):
    for step in (1, 3, 10, 20):
        write_snapshot(series, step)
    series.forget_after(3)
    assert series.steps() == [1, 3]
    again = write_snapshot(series, 10, rows=ROWS + 1)
    assert_whole(series, again, ROWS + 1)
    series.collect(keep=3, attempt_age_seconds=0)
    assert series.steps() == [1, 3, 10]
    series.verify(again)
    assert not any("/20-" in name for name in series.store.list())


@IN_A_BUCKET
def test_a_reader_keeps_the_index_that_its_heartbeat_names(store):
    # Reader and collector have clients of their own, as on two machines.
    reader = SnapshotSeries(open_store(store.url()), "index")
    collector = SnapshotSeries(store, "index")
    assert reader.steps() == []
    manifest = write_snapshot(collector, 1)
    Heartbeat(reader.store, TRAINER_ROLE).beat(1, index_step=1, kept_index_steps=[2])
    for step in range(2, 6):
        assert write_snapshot(collector, step) == reader.latest()
        collect_garbage(store, keep=1)
        # Read in slices, now and then, as a searcher of many rows does.
        reader.verify(manifest)
        read = reader.read_array(manifest, EMBEDDINGS, slice(step, step + 9))
        np.testing.assert_array_equal(read, ROWS[step : step + 9])
    assert reader.steps() == [1, 2, 5]
    Heartbeat(reader.store, TRAINER_ROLE).beat(7, index_step=5, kept_index_steps=[])
    collect_garbage(store, keep=1)
    assert reader.steps() == [5]
    assert {name.split("/")[2][:2] for name in store.list("index/data")} == {"5-"}


def test_collection_takes_what_lost_its_race_and_leaves_what_is_younger(series):
    late = series.begin(1, corpus_fingerprint=CORPUS)
    write_snapshot(series, 1)
    series.collect(keep=1)
    with pytest.raises(MissingObjectError):
        series.join(1, late.attempt)
    with pytest.raises(AlreadyCommittedError):
        late.commit()
    # Withdrawn while collection looks on: another attempt has begun.
    lost = series.read_manifest(1)
    series.forget(1)
    again = series.begin(1, corpus_fingerprint=CORPUS)
    assert not series._is_settled(1, again.attempt, lost)


_OPERATIONS = "create", "delete", "exists", "list", "read", "stats", "sync", "write"


def race(store, writer_stops, collector_stops, dies=False):
    """Stops the commit at an operation, collects up to another one, and goes on.

    Returns:
      Whether the commit succeeded, and the numbers of operations done by both.
    """
    series = SnapshotSeries(store, "index")
    begun = begin(series, chunk_rows=32)
    begun.write_rows(EMBEDDINGS, 0, ROWS)
    stopped, goes_on = threading.Event(), threading.Event()
    outcome = []

    def wait():
        stopped.set()
        assert goes_on.wait(PATIENCE)
        if dies:
            raise Killed

    slow = SteppedStore(store, writer_stops, wait, _OPERATIONS)
    writer = SnapshotWriter(
        slow,
        "index",
        step=7,
        attempt=begun.attempt,
        header={"corpus_fingerprint": CORPUS, "metadata": {}, "began": begun.began},
    )
    writer.create_array(EMBEDDINGS, ROWS.shape, "float32", 32)
    slow.done = 0

    def commit():
        try:
            writer.commit()
            outcome.append(True)
        except (MissingAttemptError, Killed):
            outcome.append(False)
        finally:
            stopped.set()

    thread = threading.Thread(target=commit)

    def resume():
        goes_on.set()
        thread.join()

    thread.start()
    assert stopped.wait(PATIENCE)
    collector = SteppedStore(store, collector_stops, resume, _OPERATIONS)
    SnapshotSeries(collector, "index").collect(keep=2, attempt_age_seconds=0.0)
    resume()
    (committed,) = outcome
    return committed, slow.done, collector.done


@pytest.mark.full
@pytest.mark.parametrize("dies", [False, True])
def test_no_commit_is_left_without_its_data(tmp_path, dies):
    """Neither stops at any operation of its own with a broken commit in the end."""
    outcomes, most = set(), np.zeros(2, int)
    for stops in itertools.product(range(11), range(20)):
        store = open_store(tmp_path / "{}-{}".format(*stops))
        committed, *done = race(store, *stops, dies)
        most = np.maximum(most, done)
        series = SnapshotSeries(store, "index")
        if dies:
            # What a writer left that was killed is for the next collection.
            series.collect(keep=2, attempt_age_seconds=0.0)
        assert not committed or series.steps() == [7]
        for step in series.steps():
            series.verify(series.read_manifest(step))
        outcomes.add(committed)
    # All operations were stops.
    assert 5 < most[0] < 11
    assert 8 < most[1] < 20
    assert outcomes == {True, False}


def test_a_commit_whose_data_is_gone_is_withdrawn(series):
    """As a writer leaves it that is killed right after its commit."""
    for step in (7, 8, 9):
        writer = series.begin(step, corpus_fingerprint=CORPUS)
        writer.write_file("x", b"1")
        writer.write_file("y", b"1")
        writer.commit()
        folder = f"index/data/{step}-{writer.attempt}"
        if step == 8:
            series.store.delete(f"{folder}/x")
        if step == 9:
            series.store.delete_folder(folder)
    series.collect(keep=3)
    assert series.steps() == [7]
