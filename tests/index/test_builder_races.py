"""Several builders at one step, and answers that are lost: one commit, and all is well.

Each builder has a client of its own, as each process has.
"""

import os
import random
import threading

import numpy as np
import pytest

from realm_jax.index import builder
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import open_store
from tests.dropping_proxy import dropping_proxy
from tests.index.tiny_builder import (
    CONFIG,
    SCANN,
    index_series,
    publish,
    read_embeddings,
    slow_embeddings,
    wait_until,
)

pytestmark = pytest.mark.full

NUM_BUILDERS = 4


class AtOnce:
    """A store in which all builders reach the commit before one is made."""

    def __init__(self, store, barrier):
        self._store = store
        self._barrier = barrier

    def create(self, name, data):
        if name.startswith("index/commits/"):
            self._barrier.wait(60)
        self._store.create(name, data)

    def __getattr__(self, name):
        return getattr(self._store, name)


def race(stores, blocks, config):
    """Runs a builder on each store until the trainer is done; all must end well."""
    errors = []

    def run(store):
        try:
            builder.IndexBuilder(store, blocks, config).run(threading.Event())
        except BaseException as error:
            errors.append(error)

    Heartbeat(stores[0], builder.TRAINER_ROLE).beat(0)
    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    wait_until(lambda: errors or index_series(stores[0]).steps(), 60)
    won = index_series(stores[0]).read_manifest(3)
    Heartbeat(stores[0], builder.TRAINER_ROLE).beat(3, "finished")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    return won


def assert_one_sound_index(store, won, expected):
    assert index_series(store).steps() == [3]
    assert index_series(store).read_manifest(3) == won
    np.testing.assert_allclose(read_embeddings(store, 3), expected, atol=2e-5)
    # What lost the race is gone, too.
    folders = {name.split("/")[2] for name in store.list("index/data")}
    assert folders == {f"3-{won.attempt}"}


def test_four_builders_make_one_commit_and_all_end_well(
    model_store, blocks, retriever_at
):
    publish(model_store, blocks, retriever_at(3))
    barrier = threading.Barrier(NUM_BUILDERS)
    stores = [
        AtOnce(open_store(model_store.url()), barrier) for _ in range(NUM_BUILDERS)
    ]
    won = race(stores, blocks, SCANN)
    expected = slow_embeddings(retriever_at(3), blocks)
    assert_one_sound_index(model_store, won, expected)


def test_a_second_builder_does_not_write_into_the_attempt_of_the_first(
    model_store, blocks, retriever_at
):
    overtaken = []

    def stats(manifest):
        return model_store.stats(f"index/data/3-{manifest.attempt}")

    def overtake(done, total):
        if done == total:
            won = builder.build_once(retriever_at(3), blocks, model_store, SCANN)
            overtaken.append((won, stats(won)))

    late = builder.build_once(
        retriever_at(3), blocks, model_store, SCANN, on_progress=overtake
    )
    # The first found the step committed, and took that. Nothing in it was written
    # again, were it with the same bytes.
    assert [(late, stats(late))] == overtaken


@pytest.fixture
def proxy(bucket, monkeypatch):
    """Loses answers on the way to the bucket, of what is opened from now on."""
    with dropping_proxy(os.environ["STORAGE_EMULATOR_HOST"]) as between:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", between.url)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", between.url)
        yield between


def is_commit(request):
    return request.kind == "create" and "index/commits/" in request.text


def test_a_builder_keeps_the_commit_whose_answer_was_lost(
    proxy, bucket, tmp_path, blocks, retriever_at
):
    store = open_store(f"{bucket}/{tmp_path.name}")
    proxy.lose(1, is_commit)
    manifest = builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert len(proxy.lost) == 1
    assert manifest is not None
    expected = slow_embeddings(retriever_at(3), blocks)
    assert_one_sound_index(store, manifest, expected)


@pytest.mark.parametrize(
    "kind",
    [
        "create",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("write", "chunk", "delete")
        ),
    ],
)
def test_no_lost_answer_loses_an_index(
    proxy, bucket, tmp_path, blocks, retriever_at, kind
):
    store = open_store(f"{bucket}/{tmp_path.name}")
    rng = random.Random(1)
    proxy.loses = lambda request: request.kind == kind and rng.random() < 0.3
    for step in (2, 3):
        publish(store, blocks, retriever_at(step))
        builder.build_once(retriever_at(step), blocks, store, CONFIG)
        builder.collect_garbage(store, keep=1)
    assert proxy.lost
    assert {request.kind for request in proxy.lost} == {kind}
    expected = slow_embeddings(retriever_at(3), blocks)
    won = index_series(store).read_manifest(3)
    assert_one_sound_index(store, won, expected)


def test_four_builders_whose_answers_are_lost_make_one_commit(
    proxy, bucket, tmp_path, blocks, retriever_at
):
    url = f"{bucket}/{tmp_path.name}"
    publish(open_store(url), blocks, retriever_at(3))
    proxy.lose(NUM_BUILDERS, is_commit)
    barrier = threading.Barrier(NUM_BUILDERS)
    stores = [AtOnce(open_store(url), barrier) for _ in range(NUM_BUILDERS)]
    won = race(stores, blocks, CONFIG)
    assert len(proxy.lost) == NUM_BUILDERS
    expected = slow_embeddings(retriever_at(3), blocks)
    assert_one_sound_index(open_store(url), won, expected)
