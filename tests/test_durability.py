"""What a commit names is on disk before the commit: files, and the folders' names.

A power cut keeps of a file what was given to fsync, and of a folder its entries at the
last fsync of it. TensorStore and Orbax write by themselves, so os.fsync alone is heard.
"""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from realm_jax.data.examples import write_examples
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import Checkpointer
from realm_jax.training.state import create_state
from tests.index.snapshot_files import write_snapshot


class Disk:
    """Notes what has been given to fsync, and what was on disk at each renaming."""

    def __init__(self, monkeypatch):
        # Inodes of files, and by the path of a folder the entries it had then.
        self.synced = {}
        # By the name of an object, what had been synced when it got that name.
        self.at = {}
        fsync = os.fsync

        def noted(file):
            fsync(file)
            path = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isdir(path):
                self.synced[path] = sorted(os.listdir(path))
            else:
                self.synced[os.fstat(file).st_ino] = ()

        monkeypatch.setattr(os, "fsync", noted)
        for name in ("replace", "link", "rename"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, move):
        def moved(source, target):
            move(source, target)
            self.at[os.fspath(target)] = dict(self.synced)

        return moved

    def holds(self, path, synced, top):
        """Returns whether a power cut would leave a file where it is, below `top`."""
        if path.stat().st_ino not in synced:
            return False
        while path != top:
            if path.name not in synced.get(os.fspath(path.parent), ()):
                return False
            path = path.parent
        return True

    def lost(self, folder, synced, top):
        """Returns the files below a folder that a power cut could take."""
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        assert files
        return [path for path in files if not self.holds(path, synced, top)]


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_what_is_written_is_on_disk_with_all_new_folders(disk, tmp_path):
    store = open_store(tmp_path / "runs" / "model")
    store.write("a/b/c", b"1")
    store.create("a/d/e", b"2")
    assert disk.lost(tmp_path, disk.synced, tmp_path) == []


def test_what_is_deleted_stays_deleted(disk, tmp_path):
    store = open_store(tmp_path)
    store.write("a/b", b"1")
    store.write("a/c", b"1")
    store.delete("a/b")
    assert disk.synced[str(tmp_path / "a")] == ["c"]
    store.delete("a/b")
    store.delete("x/y")


def test_what_others_have_written_is_synced(disk, tmp_path):
    store = open_store(tmp_path / "model")
    folder = tmp_path / "model" / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "c").write_bytes(b"1")
    (tmp_path / "model" / "beside").write_bytes(b"1")
    store.sync("a")
    assert disk.lost(folder, disk.synced, tmp_path) == []
    assert str(tmp_path / "model" / "beside") not in disk.synced
    store.sync("nothing/there")


def test_a_snapshot_is_on_disk_before_its_commit(disk, tmp_path):
    series = SnapshotSeries(open_store(tmp_path / "runs" / "model"), "index")
    write_snapshot(series, 7)
    commit = tmp_path / "runs/model/index/commits/7.json"
    before = disk.at[str(commit)]
    assert disk.lost(tmp_path / "runs/model/index/data", before, tmp_path) == []
    assert disk.lost(commit.parent, disk.synced, tmp_path) == []


def test_a_checkpoint_is_on_disk_before_its_manifest(disk, tmp_path):
    params = {
        "retriever": {"kernel": jnp.ones((2, 3))},
        "reader": {"bias": jnp.ones(2)},
    }
    state = create_state(params, optax.adam(1e-3), seed=0)
    checkpointer = Checkpointer(open_store(tmp_path / "runs" / "model"))
    checkpointer.save(state.replace(step=jnp.asarray(3, jnp.int32)), {})
    checkpointer.close()
    manifest = tmp_path / "runs/model/checkpoints/3.json"
    before = disk.at[str(manifest)]
    assert disk.lost(manifest.with_suffix(""), before, tmp_path) == []
    assert disk.lost(tmp_path / "runs", disk.synced, tmp_path) == []


def test_examples_are_on_disk_before_they_appear(disk, tmp_path):
    folder = tmp_path / "made" / "set"
    write_examples(folder, [{"ids": np.arange(4)}], {})
    before = disk.at[str(folder)]
    assert before[f"{folder}.partial"] == ["examples.json", "ids.npy"]
    assert all(path.stat().st_ino in before for path in folder.iterdir())
    assert disk.synced[str(folder.parent)] == ["set"]
    assert "made" in disk.synced[str(tmp_path)]
