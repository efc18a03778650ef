"""Snapshots of a few rows, and what can happen to their files."""

from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings

from realm_jax.index.arrays import ArrayLayout
from realm_jax.index.manifest import EMBEDDINGS

CORPUS = "0123abcd"
ROWS = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
LAYOUT = ArrayLayout(ROWS.shape, "float32", 8)
LAYOUTS = {EMBEDDINGS: LAYOUT}
no_fixture_check = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def begin(series, step=7, shape=ROWS.shape, chunk_rows=8):
    """Begins an attempt that has one array, and nothing in it."""
    writer = series.begin(step, corpus_fingerprint=CORPUS)
    writer.create_array(EMBEDDINGS, shape, "float32", chunk_rows)
    return writer


def write_rows(writer, starts=(0, 8, 16), rows=ROWS):
    for start in starts:
        writer.write_rows(EMBEDDINGS, start, rows[start : start + 8])


def write_snapshot(series, step=7, rows=ROWS, **metadata):
    writer = series.begin(step, corpus_fingerprint=CORPUS, metadata=metadata)
    writer.create_array(EMBEDDINGS, rows.shape, rows.dtype.name, 8)
    writer.write_file("scann/assets.bin", b"assets of step %d" % step)
    write_rows(writer, range(0, len(rows), 8), rows)
    return writer.commit()


def assert_whole(series, manifest, rows=ROWS):
    """Every file is sound, and these are the rows."""
    series.verify(manifest)
    np.testing.assert_array_equal(series.read_array(manifest, EMBEDDINGS), rows)


def data_files(series):
    """Files of snapshots on the local disk, without what only writers read."""
    top = Path(series.store.url("index/data"))
    files = [path for path in top.rglob("*") if path.is_file()]
    return sorted(path for path in files if "progress" not in path.parts)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


remove = Path.unlink


class Killed(BaseException):
    pass


class SteppedStore:
    """A store that calls `pause` before one of its operations, the first being 0."""

    def __init__(self, store, at, pause, operations):
        self._store = store
        self._at = at
        self._pause = pause
        self._operations = operations
        self.done = 0

    def delete_folder(self, folder):
        # One by one, as in a bucket.
        for name in self._store.list(folder):
            self.delete(name)

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name not in self._operations:
            return method

        def stepped(*args):
            if self.done == self._at:
                self._pause()
            self.done += 1
            return method(*args)

        return stepped


def mortal(store, lives):
    """A store whose process dies before one of its writes or deletions."""

    def die():
        raise Killed

    return SteppedStore(store, lives, die, ("create", "delete", "write"))
