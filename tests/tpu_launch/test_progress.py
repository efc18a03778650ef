"""How far a role has got, from what its job leaves in the model directory."""

import pytest

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import UnavailableStoreError, open_store
from tests.index.snapshot_files import write_snapshot
from tpu_launch import progress
from tpu_launch.progress import Progress


def test_a_trainer_goes_on_from_its_newest_checkpoint(tmp_path):
    store = open_store(tmp_path)
    assert progress.of_role(store, "trainer") == Progress(-1, "the beginning")
    for step in (9, 10):
        store.write(f"checkpoints/{step}.json", b"{}")
    assert progress.of_role(store, "trainer") == Progress(10, "checkpoint 10")
    Heartbeat(store, "trainer").beat(14, index_step=8)
    found = progress.of_role(store, "trainer")
    assert found == Progress(14, "checkpoint 10")
    # A heartbeat that is damaged takes nothing away.
    store.write("jobs/trainer.json", b"{")
    assert progress.of_role(store, "trainer") == Progress(10, "checkpoint 10")


def test_a_builder_says_it(tmp_path):
    store = open_store(tmp_path)
    assert progress.of_role(store, "builder") == Progress()
    Heartbeat(store, "index_builder").beat(20, blocks_done=512)
    found = progress.of_role(store, "builder")
    reached = "block 512 of the index of step 20"
    assert found == Progress(20, reached)


def test_a_builder_is_at_its_end_when_the_newest_retriever_has_an_index(tmp_path):
    store = open_store(tmp_path)
    assert progress.has_built_all(store), "nothing is published"
    write_snapshot(SnapshotSeries(store, RETRIEVER_SERIES), step=4)
    assert not progress.has_built_all(store)
    write_snapshot(SnapshotSeries(store, INDEX_SERIES), step=4)
    assert progress.has_built_all(store)
    write_snapshot(SnapshotSeries(store, RETRIEVER_SERIES), step=8)
    assert not progress.has_built_all(store)
    Heartbeat(store, "index_builder").beat(8, refused={"8": "diverged"})
    assert progress.has_built_all(store)


def test_a_store_that_is_away_is_not_the_beginning(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def away(*_):
        raise UnavailableStoreError("away")

    monkeypatch.setattr(store, "read", away)
    with pytest.raises(UnavailableStoreError):
        progress.of_role(store, "trainer")
