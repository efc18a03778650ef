"""What is committed is read back; nothing else is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.errors import BadInputError
from realm_jax.index.retrievers import read_params, write_params
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    AlreadyCommittedError,
    Expectation,
    MismatchedSnapshotError,
    SnapshotSeries,
)
from realm_jax.storage import MissingObjectError, open_store
from tests.index.snapshot_files import (
    CORPUS,
    ROWS,
    no_fixture_check,
    write_snapshot,
)


def test_reads_back_what_was_committed(series):
    written = write_snapshot(series, 7, note="kept", nested={"a": [1, 2]})
    manifest = SnapshotSeries(series.store, "index").latest()
    assert manifest == written
    series.verify(manifest, Expectation(CORPUS, dimension=4, count=23))
    np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), ROWS)
    assert series.read_file(manifest, "scann/assets.bin") == b"assets of step 7"
    assert (manifest.step, manifest.count, manifest.dimension) == (7, 23, 4)
    assert manifest.dtype == "float32"
    assert manifest.metadata == {"note": "kept", "nested": {"a": [1, 2]}}
    assert 0 <= manifest.build_seconds < 60
    assert manifest.began == pytest.approx(manifest.committed - manifest.build_seconds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_keeps_every_dtype(local, dtype):
    rows = np.asarray(jnp.asarray(ROWS * 100, dtype))
    manifest = write_snapshot(local, rows=rows)
    read = local.read_array(manifest, EMBEDDINGS)
    assert read.dtype == rows.dtype
    np.testing.assert_array_equal(read, rows)


@given(start=st.integers(-30, 30), stop=st.none() | st.integers(-30, 30))
@no_fixture_check
def test_reads_any_slice_like_numpy(local, start, stop):
    manifest = local.latest() or write_snapshot(local)
    rows = slice(start, stop)
    np.testing.assert_array_equal(
        local.read_array(manifest, EMBEDDINGS, rows), ROWS[rows]
    )


def test_series_do_not_mix(series):
    write_snapshot(series, 7)
    assert SnapshotSeries(series.store, "retriever").steps() == []
    assert SnapshotSeries(series.store, "inde").steps() == []


def test_nothing_is_seen_before_the_commit(series):
    writer = series.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, ROWS.shape)
    writer.write_rows(EMBEDDINGS, 0, ROWS)
    assert series.steps() == []
    assert series.latest() is None
    with pytest.raises(MissingObjectError):
        series.read_manifest(7)
    writer.commit()
    assert series.steps() == [7]


def test_the_latest_is_the_highest_number(local):
    for step in [100, 9, 20]:
        write_snapshot(local, step)
    assert local.steps() == [9, 20, 100]
    assert local.latest_step() == 100
    assert local.latest().step == 100


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
    writer = series.begin(1, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, (13, 4), chunk_rows=5)
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


def test_other_files_beside_the_commits_are_ignored(local):
    write_snapshot(local, 7)
    local.store.write("index/commits/8.json.backup", b"")
    local.store.write("index/commits/notes/9.json", b"")
    assert local.steps() == [7]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expectation(corpus_fingerprint="ffff"), "corpus_fingerprint ffff"),
        (Expectation(CORPUS, dimension=128), "dimension 128, step 7 has 4"),
        (Expectation(CORPUS, dimension=4, count=24), "count 24, step 7 has 23"),
    ],
)
def test_snapshots_of_something_else_are_refused(local, expected, message):
    manifest = write_snapshot(local)
    local.verify(manifest, Expectation(CORPUS, dimension=4, count=23))
    with pytest.raises(MismatchedSnapshotError, match=message):
        local.verify(manifest, expected)


def test_a_retriever_snapshot_is_no_index(local):
    writer = local.begin(1, corpus_fingerprint=CORPUS)
    write_params(writer, {"a": np.ones(2, np.float32)})
    with pytest.raises(MismatchedSnapshotError, match="embeddings"):
        local.verify(writer.commit(), Expectation(CORPUS, dimension=4))


def test_parameters_come_back_as_they_were(series):
    key = jax.random.key(0)
    params = {
        "tower": {
            "kernel": jax.random.normal(key, (3, 5)).T,
            "layers": {"scale": np.float32(2.5), "empty": np.zeros((0, 4))},
        },
        "step": np.asarray([1, 2], np.int32),
    }
    writer = series.begin(5, corpus_fingerprint=CORPUS)
    write_params(writer, params)
    manifest = writer.commit()
    read = read_params(series, manifest)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    for written, got in zip(*map(jax.tree.leaves, (params, read)), strict=True):
        assert got.dtype == written.dtype
        assert got.shape == written.shape
        np.testing.assert_array_equal(got, written)


@pytest.mark.parametrize(
    ("start", "rows"),
    [
        (16, ROWS[:8]),  # Beyond the end.
        (-8, ROWS[:8]),
        (4, ROWS[:8]),  # Not from the beginning of a chunk.
        (0, ROWS[:7]),  # Not to the end of one.
        (0, ROWS[:8, :3]),
        (0, ROWS[:8].astype(np.float64)),
    ],
)
def test_rows_that_do_not_fit_are_refused(local, start, rows):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    with pytest.raises(BadInputError, match=r"8 rows .* float32\[23, 4\]"):
        writer.write_rows(EMBEDDINGS, start, rows)
    assert writer.completed_rows(EMBEDDINGS) == []


def test_a_resumed_array_must_be_the_same(local):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, (23, 4))
    with pytest.raises(BadInputError, match="embeddings"):
        local.join(7, writer.attempt).create_array(EMBEDDINGS, (24, 4))


def test_manifests_are_values(local):
    manifest = write_snapshot(local)
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.step = 8
