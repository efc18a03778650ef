"""Damage to any file of a snapshot is found and named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.index.retrievers import read_params, write_params
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    DamagedSnapshotError,
)
from tests.index.snapshot_files import (
    CORPUS,
    ROWS,
    data_files,
    flip,
    lengthen,
    no_fixture_check,
    truncate,
    write_snapshot,
)


@pytest.mark.parametrize("damage", [flip, truncate, lengthen, Path.unlink])
def test_damage_to_any_file_is_found_and_named(local, damage):
    manifest = write_snapshot(local)
    files = data_files(local)
    assert len(files) == 5  # Metadata and three chunks of the array, and a file.
    for path in files:
        sound = path.read_bytes()
        damage(path)
        with pytest.raises(DamagedSnapshotError) as caught:
            local.verify(manifest)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(sound)
    local.verify(manifest)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_readers_find_damage_without_verifying(local, damage):
    manifest = write_snapshot(local)

    def read_all():
        local.read_array(manifest, EMBEDDINGS)
        local.read_file(manifest, "scann/assets.bin")

    read_all()
    for path in data_files(local):
        if path.name == "zarr.json":
            continue
        sound = path.read_bytes()
        damage(path)
        with pytest.raises(DamagedSnapshotError, match=str(path)):
            read_all()
        path.write_bytes(sound)


def test_a_lost_chunk_of_zeros_is_an_error_too(local):
    manifest = write_snapshot(local, rows=np.zeros((16, 4), np.float32))
    assert not local.read_array(manifest, EMBEDDINGS).any()
    next(path for path in data_files(local) if path.name == "0").unlink()
    with pytest.raises(DamagedSnapshotError):
        local.read_array(manifest, EMBEDDINGS)


def test_a_bucket_verifies_too(series):
    manifest = write_snapshot(series)
    name = f"index/data/7-{manifest.attempt}/embeddings/c/1/0"
    data = bytearray(series.store.read(name))
    data[5] ^= 1
    series.store.write(name, bytes(data))
    with pytest.raises(DamagedSnapshotError, match="embeddings/c/1/0"):
        series.verify(manifest)
    with pytest.raises(DamagedSnapshotError, match="embeddings/c/1/0"):
        series.read_array(manifest, EMBEDDINGS)
    np.testing.assert_array_equal(
        series.read_array(manifest, EMBEDDINGS, slice(0, 8)), ROWS[:8]
    )
    series.store.delete(name)
    with pytest.raises(DamagedSnapshotError, match="embeddings/c/1/0"):
        series.read_array(manifest, EMBEDDINGS)


@given(st.data())
@no_fixture_check
def test_a_changed_manifest_is_never_believed(local, data):
    manifest = local.latest() or write_snapshot(local, 7, note="x")
    path = Path(local.store.url("index/commits/7.json"))
    sound = path.read_bytes()
    changed = bytearray(sound)
    position = data.draw(st.integers(0, len(sound) - 1))
    changed[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        read = local.read_manifest(7)
    except DamagedSnapshotError as error:
        read = None
        message = str(error)
    finally:
        path.write_bytes(sound)
    if read is None:
        assert str(path) in message
        assert "\n" not in message
    else:  # Another kind of white space, or E for e in a number.
        assert read == manifest


@pytest.mark.parametrize("contents", [b"", b"[]", b"{}", b"\xff", b'{"crc32c": 1}'])
def test_another_file_is_no_manifest(local, contents):
    local.store.write("index/commits/7.json", contents)
    with pytest.raises(DamagedSnapshotError, match=r"commits/7\.json"):
        local.latest()


def test_a_manifest_under_another_step_is_refused(local):
    write_snapshot(local, 7)
    local.store.write("index/commits/8.json", local.store.read("index/commits/7.json"))
    with pytest.raises(DamagedSnapshotError, match="of step 8"):
        local.latest()


def test_damaged_parameters_are_refused(local):
    writer = local.begin(5, corpus_fingerprint=CORPUS)
    write_params(writer, {"a": np.ones(8, np.float32)})
    manifest = writer.commit()
    [path] = data_files(local)
    flip(path)
    with pytest.raises(DamagedSnapshotError, match=str(path)):
        read_params(local, manifest)


def test_a_file_that_changed_before_the_commit_is_not_committed(local):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
    writer.write_file("x", b"1234")
    [path] = data_files(local)
    flip(path)
    with pytest.raises(DamagedSnapshotError, match=str(path)):
        writer.commit()
    assert local.latest() is None


def test_a_chunk_that_was_lost_before_the_commit_is_not_committed(local):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    for start in (0, 8, 16):
        writer.write_rows(EMBEDDINGS, start, ROWS[start : start + 8])
    data_files(local)[1].unlink()
    with pytest.raises(DamagedSnapshotError, match="2 of its 3 chunks"):
        writer.commit()
    assert local.latest() is None
