import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.errors import BadInputError
from realm_jax.index.retrievers import read_params, write_params
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    AlreadyCommittedError,
    DamagedSnapshotError,
    Expectation,
    MismatchedSnapshotError,
    SnapshotSeries,
)
from realm_jax.storage import MissingObjectError, open_store

CORPUS = "0123abcd"
ROWS = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)

no_fixture_check = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def local(tmp_path):
    return SnapshotSeries(open_store(tmp_path), "index")


@pytest.fixture
def series(model_store):
    return SnapshotSeries(model_store, "index")


def write_snapshot(series, step=7, rows=ROWS, **metadata):
    writer = series.begin(step, corpus_fingerprint=CORPUS, metadata=metadata)
    writer.create_array(EMBEDDINGS, rows.shape, rows.dtype.name, chunk_rows=8)
    writer.write_file("scann/assets.bin", b"assets of step %d" % step)
    for start in range(0, len(rows), 8):
        writer.write_rows(EMBEDDINGS, start, rows[start : start + 8])
    return writer.commit()


def data_files(series):
    """Files of snapshots on the local disk, without what only writers read."""
    top = Path(series.store.url("index/data"))
    files = [path for path in top.rglob("*") if path.is_file()]
    return sorted(path for path in files if "progress" not in path.parts)


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

    resumed = series.resume(7, **same)
    # The other writer may be alive, and write on.
    assert resumed.attempt != newest.attempt
    resumed.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
    assert resumed.completed_rows(EMBEDDINGS) == [(8, 16)]
    resumed.write_rows(EMBEDDINGS, 0, ROWS[:8])
    resumed.write_rows(EMBEDDINGS, 16, ROWS[16:])
    manifest = resumed.commit()
    series.verify(manifest)
    np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), ROWS)


def test_nothing_to_resume(local):
    assert local.resume(7, corpus_fingerprint=CORPUS) is None
    local.begin(8, corpus_fingerprint=CORPUS)
    assert local.resume(7, corpus_fingerprint=CORPUS) is None


class _Killed(BaseException):
    pass


class _MortalStore:
    """A store whose process dies before one of its writes or deletions."""

    def __init__(self, store, lives):
        self._store = store
        self.lives = lives

    def delete_folder(self, folder):
        # One by one, as in a bucket.
        for name in self._store.list(folder):
            self.delete(name)

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name not in ("write", "create", "delete"):
            return method

        def mortal(*args):
            if self.lives == 0:
                raise _Killed
            self.lives -= 1
            return method(*args)

        return mortal


def test_killed_anywhere_it_resumes_to_the_same_snapshot(tmp_path):
    whole = _MortalStore(open_store(tmp_path / "whole"), 1000)
    write_snapshot(SnapshotSeries(whole, "index"))
    writes = 1000 - whole.lives
    assert writes > 5
    for lives in range(writes):
        store = open_store(tmp_path / f"killed{lives}")
        with pytest.raises(_Killed):
            write_snapshot(SnapshotSeries(_MortalStore(store, lives), "index"))
        series = SnapshotSeries(store, "index")
        assert series.latest() is None
        writer = series.resume(7, corpus_fingerprint=CORPUS)
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


def test_killed_amid_collection_no_commit_is_broken(tmp_path):
    lives = 0
    while True:
        series = SnapshotSeries(open_store(tmp_path / f"{lives}"), "index")
        for step in (1, 2, 3):
            write_snapshot(series, step)
        killer = SnapshotSeries(_MortalStore(series.store, lives), "index")
        try:
            killer.collect(keep=1)
            assert series.steps() == [3]
            break
        except _Killed:
            for step in series.steps():
                series.verify(series.read_manifest(step))
            for step in {1, 2} - set(series.steps()):
                resumed = series.resume(step, corpus_fingerprint=CORPUS)
                if resumed is not None:  # Then all of it must still be there.
                    resumed.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=8)
                    again = resumed.commit()
                    read = series.read_array(again, EMBEDDINGS)
                    np.testing.assert_array_equal(read, ROWS)
        lives += 1
    assert lives > 3


def test_a_killed_process_leaves_a_resumable_attempt(tmp_path):
    program = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from realm_jax.index.snapshots import SnapshotSeries\n"
        "from realm_jax.storage import open_store\n"
        "series = SnapshotSeries(open_store(sys.argv[1]), 'index')\n"
        "writer = series.begin(3, corpus_fingerprint='c')\n"
        "writer.create_array('embeddings', (64, 2), chunk_rows=16)\n"
        "writer.write_rows('embeddings', 16, np.ones((16, 2), np.float32))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert process.returncode == -signal.SIGKILL
    series = SnapshotSeries(open_store(tmp_path), "index")
    assert series.latest() is None
    writer = series.resume(3, corpus_fingerprint="c")
    writer.create_array(EMBEDDINGS, (64, 2), chunk_rows=16)
    assert writer.completed_rows(EMBEDDINGS) == [(16, 32)]


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


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [_flip, _truncate, _lengthen, Path.unlink])
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


@pytest.mark.parametrize("damage", [_flip, _truncate, Path.unlink])
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


def test_damaged_parameters_are_refused(local):
    writer = local.begin(5, corpus_fingerprint=CORPUS)
    write_params(writer, {"a": np.ones(8, np.float32)})
    manifest = writer.commit()
    [path] = data_files(local)
    _flip(path)
    with pytest.raises(DamagedSnapshotError, match=str(path)):
        read_params(local, manifest)


def test_a_file_that_changed_before_the_commit_is_not_committed(local):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
    writer.write_file("x", b"1234")
    [path] = data_files(local)
    _flip(path)
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


def test_a_full_disk_leaves_a_resumable_attempt(local, tmp_path):
    writer = local.begin(7, corpus_fingerprint=CORPUS)
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
    local.verify(writer.commit())


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


def test_manifests_are_values(local):
    manifest = write_snapshot(local)
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.step = 8
