"""Collection of an attempt at the very moment of its commit, operation by operation."""

import contextlib
import itertools
import threading

import numpy as np
import pytest

from realm_jax.index.manifest import MissingAttemptError
from realm_jax.index.snapshot_writer import SnapshotWriter
from realm_jax.index.snapshots import EMBEDDINGS, SnapshotSeries
from realm_jax.storage import open_store
from tests.index.snapshot_files import CORPUS, ROWS, Killed
from tests.waiting import PATIENCE

_OPERATIONS = (
    *("create", "delete", "exists", "list", "read", "stats", "sync", "write"),
)


class SteppedStore:
    """A store that calls `pause` before one of its operations, the first being 0."""

    def __init__(self, store, at, pause):
        self._store = store
        self._at = at
        self._pause = pause
        self.done = 0

    def delete_folder(self, folder):
        # One by one, as in a bucket.
        for name in self._store.list(folder):
            self.delete(name)

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name not in _OPERATIONS:
            return method

        def stepped(*args):
            if self.done == self._at:
                self._pause()
            self.done += 1
            return method(*args)

        return stepped


def race(store, writer_stops, collector_stops, dies=False):
    """Stops the commit at an operation, collects up to another one, and goes on.

    Returns:
      Whether the commit succeeded, and the numbers of operations done by both.
    """
    series = SnapshotSeries(store, "index")
    begun = series.begin(7, corpus_fingerprint=CORPUS)
    begun.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=32)
    begun.write_rows(EMBEDDINGS, 0, ROWS)
    stopped, goes_on = threading.Event(), threading.Event()
    outcome = []

    def wait():
        stopped.set()
        assert goes_on.wait(PATIENCE)
        if dies:
            raise Killed

    slow = SteppedStore(store, writer_stops, wait)
    writer = SnapshotWriter(
        *(slow, "index"),
        step=7,
        attempt=begun.attempt,
        header={"corpus_fingerprint": CORPUS, "metadata": {}, "began": begun.began},
    )
    writer.create_array(EMBEDDINGS, ROWS.shape, chunk_rows=32)
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
    collector = SteppedStore(store, collector_stops, resume)
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


def test_a_commit_whose_data_is_gone_is_withdrawn(tmp_path):
    """As a writer leaves it that is killed right after its commit."""
    store = open_store(tmp_path)
    series = SnapshotSeries(store, "index")
    for step in (7, 8):
        writer = series.begin(step, corpus_fingerprint=CORPUS)
        writer.write_file("x", b"1")
        writer.commit()
    with contextlib.suppress(FileNotFoundError):
        store.delete_folder(f"index/data/8-{writer.attempt}")
    series.collect(keep=2)
    assert series.steps() == [7]
