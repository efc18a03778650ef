"""Attempts that were killed are taken over."""

import resource
import threading

import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.index.snapshots import EMBEDDINGS, SnapshotSeries
from realm_jax.storage import MissingObjectError, open_store
from tests.index.snapshot_files import (
    CORPUS,
    LAYOUTS,
    ROWS,
    Killed,
    MortalStore,
    write_snapshot,
)
from tests.index.tiny_builder import IN_A_BUCKET


def test_resumes_the_newest_attempt_of_the_same_settings(series):
    metadata = {"towers": ("query", "document")}
    same = {"corpus_fingerprint": CORPUS, "metadata": metadata}
    series.begin(7, **same)
    newest = series.begin(7, **same)
    series.begin(7, corpus_fingerprint="other", metadata=metadata)
    series.begin(7, corpus_fingerprint=CORPUS, metadata={})
    series.begin(8, **same)
    newest.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    newest.write_rows(EMBEDDINGS, 8, ROWS[8:16])

    resumed = series.resume(7, **same, layouts=LAYOUTS)
    # The other writer may be alive, and write on.
    assert resumed.attempt != newest.attempt
    resumed.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    assert resumed.completed_rows(EMBEDDINGS) == [(8, 16)]
    resumed.write_rows(EMBEDDINGS, 0, ROWS[:8])
    resumed.write_rows(EMBEDDINGS, 16, ROWS[16:])
    manifest = resumed.commit()
    series.verify(manifest)
    np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), ROWS)


def test_an_attempt_deleted_under_its_writer_is_missing_not_bad_input(series):
    writer = series.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    stop = threading.Event()

    def delete():
        while not stop.is_set():
            series.store.delete_folder(f"index/data/7-{writer.attempt}")

    thread = threading.Thread(target=delete)
    thread.start()
    missing = 0
    try:
        for _ in range(100):
            try:
                writer.write_rows(EMBEDDINGS, 0, ROWS[:8])
            except MissingObjectError:
                missing += 1
    finally:
        stop.set()
        thread.join()
    assert missing


def test_nothing_to_resume(series):
    assert series.resume(7, corpus_fingerprint=CORPUS) is None
    series.begin(8, corpus_fingerprint=CORPUS)
    assert series.resume(7, corpus_fingerprint=CORPUS) is None


def test_killed_anywhere_it_resumes_to_the_same_snapshot(tmp_path):
    whole = MortalStore(open_store(tmp_path / "whole"), 1000)
    write_snapshot(SnapshotSeries(whole, "index"))
    writes = 1000 - whole.lives
    assert writes > 5
    for lives in range(writes):
        store = open_store(tmp_path / f"killed{lives}")
        with pytest.raises(Killed):
            write_snapshot(SnapshotSeries(MortalStore(store, lives), "index"))
        series = SnapshotSeries(store, "index")
        assert series.latest() is None
        writer = series.resume(7, corpus_fingerprint=CORPUS, layouts=LAYOUTS)
        if writer is None:
            assert lives == 0
            writer = series.begin(7, corpus_fingerprint=CORPUS)
        writer.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
        writer.write_file("scann/assets.bin", b"assets of step 7")
        done = {start for start, _ in writer.completed_rows(EMBEDDINGS)}
        for start in {0, 8, 16} - done:
            writer.write_rows(EMBEDDINGS, start, ROWS[start : start + 8])
        manifest = writer.commit()
        series.verify(manifest)
        np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), ROWS)


@IN_A_BUCKET
def test_several_hosts_write_one_array(series):
    rows = np.arange(120, dtype=np.float32).reshape(60, 2)
    first = series.begin(7, corpus_fingerprint=CORPUS)
    errors = []

    def host(index):
        try:
            writer = series.join(7, first.attempt)
            writer.create_array(EMBEDDINGS, rows.shape, chunk_rows=8)
            for start in range(index * 8, 60, 24):
                writer.write_rows(EMBEDDINGS, start, rows[start : start + 8])
        except Exception as error:
            errors.append(error)

    hosts = [threading.Thread(target=host, args=(i,)) for i in range(3)]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join()
    assert not errors
    first.create_array(EMBEDDINGS, rows.shape, chunk_rows=8)
    manifest = first.commit()
    series.verify(manifest)
    np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), rows)


def test_a_full_disk_leaves_a_resumable_attempt(series, tmp_path):
    writer = series.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, (2000, 4), chunk_rows=1000)
    rows = np.ones((1000, 4), np.float32)
    writer.write_rows(EMBEDDINGS, 0, rows)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file-size limit stops a write in its middle, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(BadInputError, match="room for 16,000 bytes") as caught:
            writer.write_rows(EMBEDDINGS, 1000, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert writer.completed_rows(EMBEDDINGS) == [(0, 1000)]
    writer.write_rows(EMBEDDINGS, 1000, rows)
    series.verify(writer.commit())
