"""A run killed between the publishing of a retriever and the swap to its index.

No checkpoint says that a refresh is under way: the step says what is due, the model
directory what was done.
"""

import threading
from unittest import mock

import pytest

from realm_jax.index.builder import BuilderConfig, IndexBuilder, build_once
from realm_jax.index.retrievers import load_retriever
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import open_store
from realm_jax.training import pretrain
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.index_client import IndexClient
from tests import tiny_world
from tests.tiny_world import EMBED, NEVER

pytestmark = pytest.mark.full

BUILDER = BuilderConfig(embed=EMBED, keep=9, poll_seconds=0.05)


class Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


class Life:
    """One process: runs from where the last was killed, until it is killed itself."""

    def __init__(self, world, folder):
        self._config = tiny_world.pretrain_config(
            world, folder, refresh_mode="async", embed=EMBED
        )
        self.used = {}

    def run(self, *, killed_at=None, during=lambda step, index_step: None):
        def report(step, total, values):
            self.used[step] = values["index_step"]
            during(step, values["index_step"])
            if step == killed_at:
                raise Killed

        if killed_at is None:
            assert pretrain.run(self._config, report, NEVER)
            return
        with pytest.raises(Killed):
            pretrain.run(self._config, report, NEVER)


def test_what_was_published_stays_and_what_is_run_again_is_published_anew(
    world, corpus, tmp_path
):
    store = open_store(tmp_path)
    retrievers = SnapshotSeries(store, RETRIEVER_SERIES)
    indexes = SnapshotSeries(store, INDEX_SERIES)
    stop = threading.Event()
    builder = IndexBuilder(store, corpus, BUILDER)
    thread = threading.Thread(target=builder.run, args=(stop,))

    def dismiss_the_builder(step, index_step):
        stop.set()
        thread.join(60)

    thread.start()
    first = Life(world, tmp_path)
    first.run(killed_at=5, during=dismiss_the_builder)
    assert first.used == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0}
    assert finished_steps(store) == [4]
    assert retrievers.steps() == [0, 3]
    assert indexes.steps() == [0]
    three = retrievers.read_manifest(3)

    def build_three(step, index_step):
        if indexes.latest_step() == 0:
            build_once(load_retriever(store, 3), corpus, store, BUILDER)

    def take(client):
        """The trainer of now never published it, and takes its index."""
        is_new = indexes.latest_step() == 3 and 3 not in second.used.values()
        return client.wait(60.0) if is_new else None

    second = Life(world, tmp_path)
    with mock.patch.object(IndexClient, "take", take):
        second.run(killed_at=7, during=build_three)
    assert second.used == {5: 0, 6: 3, 7: 3}
    assert finished_steps(store) == [4]
    assert retrievers.steps() == [0, 3, 6]
    assert retrievers.read_manifest(3) == three
    six = retrievers.read_manifest(6)

    third = Life(world, tmp_path)
    third.run()
    assert set(third.used) == {5, 6, 7, 8}
    assert set(third.used.values()) <= {0, 3}
    assert retrievers.steps() == [0, 3, 6, 8]
    assert retrievers.read_manifest(3) == three
    # It took those steps again, and perhaps with another index.
    assert retrievers.read_manifest(6).attempt != six.attempt
