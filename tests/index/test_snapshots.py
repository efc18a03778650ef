"""What is committed is read back, damage is found, and a killed writer taken over."""

import itertools
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.errors import BadInputError
from realm_jax.index.manifest import (
    EMBEDDINGS,
    AlreadyCommittedError,
    DamagedSnapshotError,
    Expectation,
    MismatchedSnapshotError,
)
from realm_jax.index.retrievers import read_params, write_params
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import MissingObjectError, open_store
from tests.flipped import flip
from tests.index.snapshot_files import (
    CORPUS,
    LAYOUT,
    LAYOUTS,
    ROWS,
    Killed,
    assert_whole,
    begin,
    data_files,
    lengthen,
    mortal,
    no_fixture_check,
    remove,
    truncate,
    write_rows,
    write_snapshot,
)
from tests.index.tiny_builder import IN_A_BUCKET, IN_BOTH
from tests.refused import refused


@IN_BOTH
def test_reads_back_what_was_committed(series):
    written = write_snapshot(series, 7, note="kept", nested={"a": [1, 2]})
    manifest = SnapshotSeries(series.store, "index").latest()
    assert manifest == written
    assert_whole(series, manifest)
    assert series.read_file(manifest, "scann/assets.bin") == b"assets of step 7"
    assert (manifest.step, manifest.count, manifest.dimension) == (7, 23, 4)
    assert manifest.metadata == {"note": "kept", "nested": {"a": [1, 2]}}
    assert 0 <= manifest.build_seconds < 60
    assert manifest.began == pytest.approx(manifest.committed - manifest.build_seconds)


def test_keeps_every_dtype(series):
    for step, dtype in enumerate(("float32", "bfloat16", "int32")):
        rows = np.asarray(jnp.asarray(ROWS * 100, dtype))
        read = series.read_array(write_snapshot(series, step, rows=rows), EMBEDDINGS)
        np.testing.assert_array_equal(read, rows, strict=True)


@given(start=st.integers(-30, 30), stop=st.none() | st.integers(-30, 30))
@no_fixture_check
def test_reads_any_slice_like_numpy(series, start, stop):
    manifest = series.latest() or write_snapshot(series)
    read = series.read_array(manifest, EMBEDDINGS, slice(start, stop))
    np.testing.assert_array_equal(read, ROWS[start:stop])


def test_nothing_is_seen_before_the_commit(series):
    writer = begin(series)
    write_rows(writer)
    assert series.steps() == []
    assert series.latest() is None
    with pytest.raises(MissingObjectError):
        series.read_manifest(7)
    writer.commit()
    assert series.steps() == [7]
    for other in ("retriever", "inde"):
        assert SnapshotSeries(series.store, other).steps() == []


def test_the_latest_is_the_highest_number(series):
    for step in (100, 9, 20):
        write_snapshot(series, step)
    # Other files beside the commits are ignored.
    series.store.write("index/commits/800.json.backup", b"")
    series.store.write("index/commits/notes/900.json", b"")
    assert series.steps() == [9, 20, 100]
    assert series.latest_step() == series.latest().step == 100


def test_the_second_commit_of_a_step_is_refused(series):
    late = series.begin(7, corpus_fingerprint=CORPUS)
    late.write_file("x", b"late")
    first = write_snapshot(series, 7)
    with pytest.raises(AlreadyCommittedError, match=r"commits/7\.json"):
        late.commit()
    assert series.read_manifest(7) == first
    series.verify(first)
    with pytest.raises(AlreadyCommittedError):
        series.begin(7, corpus_fingerprint=CORPUS)
    assert series.resume(7, corpus_fingerprint=CORPUS) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=4))
@no_fixture_check
def test_commits_only_when_every_row_was_written(tmp_path_factory, ranges):
    series = SnapshotSeries(open_store(tmp_path_factory.mktemp("s")), "index")
    writer = begin(series, 1, (13, 4), chunk_rows=5)
    written = np.zeros(13, bool)
    for first, last in ranges:
        rows = slice(5 * first, min(5 * max(first, last), 13))
        writer.write_rows(EMBEDDINGS, rows.start, ROWS[rows])
        written[rows] = True
    if written.all():
        series.verify(writer.commit())
        return
    with pytest.raises(BadInputError, match=f"row {int(written.argmin())} is missing"):
        writer.commit()
    assert series.latest() is None


def test_snapshots_of_something_else_are_refused(series):
    manifest = write_snapshot(series)
    series.verify(manifest, Expectation(CORPUS, dimension=4, count=23))
    for expected, message in (
        (Expectation(corpus_fingerprint="ffff"), "corpus_fingerprint ffff"),
        (Expectation(CORPUS, dimension=128), "dimension 128, step 7 has 4"),
        (Expectation(CORPUS, dimension=4, count=24), "count 24, step 7 has 23"),
    ):
        with pytest.raises(MismatchedSnapshotError, match=message):
            series.verify(manifest, expected)
    writer = series.begin(1, corpus_fingerprint=CORPUS)
    write_params(writer, {"a": np.ones(2, np.float32)})
    with pytest.raises(MismatchedSnapshotError, match="embeddings"):
        series.verify(writer.commit(), Expectation(CORPUS, dimension=4))


def test_parameters_come_back_as_they_were(series):
    params = {
        "tower": {
            "kernel": jax.random.normal(jax.random.key(0), (3, 5)).T,
            "layers": {"scale": np.float32(2.5), "empty": np.zeros((0, 4))},
        },
        "step": np.asarray([1, 2], np.int32),
    }
    writer = series.begin(5, corpus_fingerprint=CORPUS)
    write_params(writer, params)
    read = read_params(series, writer.commit())
    assert jax.tree.structure(read) == jax.tree.structure(params)
    for leaves in zip(*map(jax.tree.leaves, (read, params)), strict=True):
        np.testing.assert_array_equal(*leaves, strict=True)


def test_rows_and_arrays_that_do_not_fit_are_refused(series):
    writer = begin(series)
    for start, rows in (
        (16, ROWS[:8]),  # Beyond the end.
        (-8, ROWS[:8]),
        (4, ROWS[:4]),  # Not from the beginning of a chunk.
        (0, ROWS[:7]),  # Not to the end of one.
        (0, ROWS[:8, :3]),
        (0, ROWS[:8].astype(np.float64)),
    ):
        with pytest.raises(BadInputError, match=r"8 rows .* float32\[23, 4\]"):
            writer.write_rows(EMBEDDINGS, start, rows)
    assert writer.completed_rows(EMBEDDINGS) == []
    other = series.join(7, writer.attempt)
    with pytest.raises(BadInputError, match="embeddings"):
        other.create_array(EMBEDDINGS, (24, 4), "float32", 8)


def test_damage_to_any_file_is_found_and_named(series):
    manifest = write_snapshot(series)
    files = data_files(series)
    assert len(files) == 5  # Metadata and three chunks of the array, and a file.

    def read_all():
        series.read_array(manifest, EMBEDDINGS)
        series.read_file(manifest, "scann/assets.bin")

    read_all()
    for path, damage in itertools.product(files, (flip, truncate, lengthen, remove)):
        sound = path.read_bytes()
        damage(path)
        with pytest.raises(DamagedSnapshotError) as caught:
            series.verify(manifest)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        # Readers find it without verifying.
        if path.name != "zarr.json" and damage is not lengthen:
            with pytest.raises(DamagedSnapshotError, match=str(path)):
                read_all()
        path.write_bytes(sound)
    series.verify(manifest)


def test_a_lost_chunk_of_zeros_is_an_error_too(series):
    manifest = write_snapshot(series, rows=np.zeros((16, 4), np.float32))
    assert not series.read_array(manifest, EMBEDDINGS).any()
    next(path for path in data_files(series) if path.name == "0").unlink()
    with pytest.raises(DamagedSnapshotError):
        series.read_array(manifest, EMBEDDINGS)


def test_another_file_is_no_manifest(series):
    write_snapshot(series, 7)
    of_step_7 = series.store.read("index/commits/7.json")
    for contents in (b"", b"[]", b"{}", b"\xff", b'{"crc32c": 1}', of_step_7):
        series.store.write("index/commits/8.json", contents)
        with pytest.raises(DamagedSnapshotError, match=r"commits/8\.json"):
            series.latest()


def test_what_changed_before_the_commit_is_not_committed(series):
    writer = series.begin(7, corpus_fingerprint=CORPUS)
    writer.write_file("x", b"1234")
    [path] = data_files(series)
    flip(path)
    with pytest.raises(DamagedSnapshotError, match=str(path)):
        writer.commit()
    writer = begin(series, 8)
    write_rows(writer)
    data_files(series)[2].unlink()
    with pytest.raises(DamagedSnapshotError, match="2 of its 3 chunks"):
        writer.commit()
    assert series.latest() is None


def test_resumes_the_newest_attempt_of_the_same_settings(series):
    metadata = {"towers": ("query", "document")}
    same = {"corpus_fingerprint": CORPUS, "metadata": metadata}
    series.begin(7, **same)
    newest = series.begin(7, **same)
    series.begin(7, corpus_fingerprint="other", metadata=metadata)
    series.begin(7, corpus_fingerprint=CORPUS, metadata={})
    series.begin(8, **same)
    newest.create_array(EMBEDDINGS, *LAYOUT)
    newest.write_rows(EMBEDDINGS, 8, ROWS[8:16])

    resumed = series.resume(7, **same, layouts=LAYOUTS)
    # The other writer may be alive, and write on.
    assert resumed.attempt != newest.attempt
    resumed.create_array(EMBEDDINGS, *LAYOUT)
    assert resumed.completed_rows(EMBEDDINGS) == [(8, 16)]
    write_rows(resumed, (0, 16))
    assert_whole(series, resumed.commit())


def test_an_attempt_deleted_under_its_writer_is_missing_not_bad_input(series):
    writer = begin(series)
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


def test_killed_anywhere_it_resumes_to_the_same_snapshot(tmp_path):
    whole = mortal(open_store(tmp_path / "whole"), 1000)
    write_snapshot(SnapshotSeries(whole, "index"))
    assert whole.done > 5
    for lives in range(whole.done):
        store = open_store(tmp_path / f"killed{lives}")
        with pytest.raises(Killed):
            write_snapshot(SnapshotSeries(mortal(store, lives), "index"))
        series = SnapshotSeries(store, "index")
        assert series.latest() is None
        writer = series.resume(7, corpus_fingerprint=CORPUS, layouts=LAYOUTS)
        if writer is None:
            assert lives == 0
            writer = series.begin(7, corpus_fingerprint=CORPUS)
        writer.create_array(EMBEDDINGS, *LAYOUT)
        writer.write_file("scann/assets.bin", b"assets of step 7")
        done = {start for start, _ in writer.completed_rows(EMBEDDINGS)}
        write_rows(writer, {0, 8, 16} - done)
        assert_whole(series, writer.commit())


@IN_A_BUCKET
def test_several_hosts_write_one_array(series):
    rows = np.arange(120, dtype=np.float32).reshape(60, 2)
    first = begin(series, 7, rows.shape)

    def host(start):
        writer = series.join(7, first.attempt)
        writer.create_array(EMBEDDINGS, rows.shape, "float32", 8)
        write_rows(writer, range(start, 60, 24), rows)

    with ThreadPoolExecutor(3) as hosts:
        list(hosts.map(host, (0, 8, 16)))
    assert_whole(series, first.commit(), rows)


def test_a_full_disk_leaves_a_resumable_attempt(series):
    writer = begin(series, 7, (2000, 4), chunk_rows=1000)
    rows = np.ones((1000, 4), np.float32)
    writer.write_rows(EMBEDDINGS, 0, rows)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file-size limit stops a write in its middle, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with refused("room for 16,000 bytes"):
            writer.write_rows(EMBEDDINGS, 1000, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.completed_rows(EMBEDDINGS) == [(0, 1000)]
    writer.write_rows(EMBEDDINGS, 1000, rows)
    series.verify(writer.commit())
