"""What tells the builder that its trainer is over."""

import os
import threading

import pytest

from realm_jax.cli.builder_watch import TrainerWatch
from realm_jax.index.retrievers import RETRIEVER_SERIES
from realm_jax.index.reuse import INDEX_SERIES
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import open_store
from tests.index.snapshot_files import write_snapshot


@pytest.fixture
def lifeline():
    end, held = os.pipe()
    yield end, held
    os.close(end)


def test_the_builder_ends_when_the_trainer_is_over_and_all_is_built(tmp_path, lifeline):
    end, held = lifeline
    store, stop = open_store(tmp_path), threading.Event()
    watch = TrainerWatch(end, store, stop)
    watch.look()
    assert not stop.is_set(), "nothing is published, but a trainer may start again"
    os.write(held, b"words that nobody should say\n")
    watch.look()
    assert not stop.is_set()
    write_snapshot(SnapshotSeries(store, RETRIEVER_SERIES), step=4)
    os.close(held)
    watch.look()
    assert not stop.is_set(), "its last retriever has no index"
    write_snapshot(SnapshotSeries(store, INDEX_SERIES), step=4)
    watch.look()
    assert stop.is_set()


def test_it_looks_by_itself(tmp_path, lifeline):
    end, held = lifeline
    stop = threading.Event()
    with TrainerWatch(end, open_store(tmp_path), stop):
        os.close(held)
        assert stop.wait(30)
