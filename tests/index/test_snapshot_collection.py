"""What is deleted, and what never is."""

import os
from pathlib import Path

import numpy as np
import pytest

from realm_jax.index.builder import TRAINER_ROLE, collect_garbage
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    AlreadyCommittedError,
    SnapshotSeries,
)
from realm_jax.storage import MissingObjectError, open_store
from tests.index.snapshot_files import (
    CORPUS,
    LAYOUTS,
    ROWS,
    Killed,
    MortalStore,
    write_snapshot,
)


def test_killed_amid_collection_no_commit_is_broken(tmp_path):
    lives = 0
    while True:
        series = SnapshotSeries(open_store(tmp_path / f"{lives}"), "index")
        for step in (1, 2, 3):
            write_snapshot(series, step)
        killer = SnapshotSeries(MortalStore(series.store, lives), "index")
        try:
            killer.collect(keep=1)
            assert series.steps() == [3]
            break
        except Killed:
            for step in series.steps():
                series.verify(series.read_manifest(step))
            for step in {1, 2} - set(series.steps()):
                resumed = series.resume(
                    step, corpus_fingerprint=CORPUS, layouts=LAYOUTS
                )
                if resumed is not None:  # Then all of it must still be there.
                    resumed.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
                    again = resumed.commit()
                    read = series.read_array(again, EMBEDDINGS)
                    np.testing.assert_array_equal(read, ROWS)
        lives += 1
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
    writer = series.begin(2, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, ROWS.shape)
    assert series.collect(keep=1) == []
    writer.write_rows(EMBEDDINGS, 0, ROWS)
    series.verify(writer.commit())


def test_collection_removes_dead_attempts(local):
    write_snapshot(local, 1)
    dead = local.begin(2, corpus_fingerprint=CORPUS)
    dead.write_file("x", b"1")
    young = local.begin(3, corpus_fingerprint=CORPUS)
    for path in Path(local.store.url("index/data")).glob("2-*/progress/*"):
        os.utime(path, (0, 0))
    local.collect(keep=1, attempt_age_seconds=3600)
    assert local.steps() == [1]
    with pytest.raises(MissingObjectError):
        local.join(2, dead.attempt)
    local.join(3, young.attempt)


def test_collection_survives_a_damaged_manifest(local):
    for step in (1, 2):
        write_snapshot(local, step)
    local.store.write("index/commits/1.json", b"damaged")
    local.collect(keep=1)
    assert local.steps() == [2]
    local.verify(local.read_manifest(2))


def test_steps_that_are_taken_again_are_forgotten(series):
    for step in (1, 3, 10, 20):
        write_snapshot(series, step)
    series.forget_after(3)
    assert series.steps() == [1, 3]
    again = write_snapshot(series, 10, rows=ROWS + 1)
    series.verify(again)
    np.testing.assert_array_equal(series.read_array(again, EMBEDDINGS), ROWS + 1)
    series.collect(keep=3, attempt_age_seconds=0)
    assert series.steps() == [1, 3, 10]
    series.verify(again)
    assert not any("/20-" in name for name in series.store.list())


def test_a_discarded_attempt_is_gone(series):
    writer = series.begin(1, corpus_fingerprint=CORPUS)
    writer.write_file("x", b"1")
    writer.discard()
    assert series.store.list() == []
    assert series.resume(1, corpus_fingerprint=CORPUS) is None


def test_a_reader_keeps_the_index_that_its_heartbeat_names(model_store):
    # Reader and collector have clients of their own, as on two machines.
    reader = SnapshotSeries(open_store(model_store.url()), "index")
    collector = SnapshotSeries(model_store, "index")
    manifest = write_snapshot(collector, 1)
    Heartbeat(reader.store, TRAINER_ROLE).beat(1, index_step=1, kept_index_steps=[2])
    for step in range(2, 8):
        write_snapshot(collector, step)
        collect_garbage(model_store, keep=2)
        # Read in slices, now and then, as a searcher of many rows does.
        reader.verify(manifest)
        read = reader.read_array(manifest, EMBEDDINGS, slice(step, step + 9))
        np.testing.assert_array_equal(read, ROWS[step : step + 9])
    assert collector.steps() == [1, 2, 6, 7]
    Heartbeat(reader.store, TRAINER_ROLE).beat(7, index_step=7, kept_index_steps=[])
    collect_garbage(model_store, keep=2)
    assert collector.steps() == [6, 7]
    assert {name.split("/")[2][:2] for name in model_store.list("index/data")} == {
        "6-",
        "7-",
    }


def test_a_long_lived_reader_sees_every_commit_at_once(model_store):
    reader = SnapshotSeries(open_store(model_store.url()), "index")
    writer = SnapshotSeries(model_store, "index")
    assert reader.steps() == []
    for step in range(1, 8):
        manifest = write_snapshot(writer, step)
        assert reader.latest() == manifest
        reader.verify(manifest)
        # And what is deleted is not seen any longer.
        writer.collect(keep=1)
        assert reader.steps() == [step]


def test_collection_takes_what_lost_its_race_and_leaves_what_is_younger(model_store):
    series = SnapshotSeries(model_store, "index")
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
