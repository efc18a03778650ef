import os

import jax
import numpy as np
import pytest

from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.index import build as attempt
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.storage import open_store
from tests.data.conftest import small_store as corpus
from tests.dropping_proxy import dropping_proxy
from tests.index.tiny_builder import (
    NUM_BLOCKS,
    RETRIEVER,
    VOCABULARY,
    end_builders,
    random_params,
)

__all__ = ["corpus"]


@pytest.fixture
def store(request, tmp_path):
    """An empty model directory in a folder, or where `IN_A_BUCKET` says so."""
    if getattr(request, "param", "local") == "local":
        return open_store(tmp_path / "model")
    return open_store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


@pytest.fixture
def donor(store):
    """Another model directory, of the same kind."""
    return open_store(f"{store.url().removesuffix('/')}-before")


@pytest.fixture
def series(store):
    return SnapshotSeries(store, "index")


@pytest.fixture
def proxy(bucket, monkeypatch):
    """Between the bucket and what is opened from now on."""
    with dropping_proxy(os.environ["STORAGE_EMULATOR_HOST"]) as between:
        for variable in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            monkeypatch.setenv(variable, between.url)
        yield between


@pytest.fixture(autouse=True)
def _no_builder_is_left():
    yield
    end_builders()


@pytest.fixture(scope="session")
def blocks(tmp_path_factory):
    generator = np.random.default_rng(0)

    def block(number):
        ids = generator.integers(len(SPECIAL_PIECES), VOCABULARY.size, 20)
        text = BlockText(f"title {number}", "body", str(number), [], [])
        return Block(ids[:2], ids[2 : 8 + number % 12], text)

    return write_blocks(
        tmp_path_factory.mktemp("corpus") / "blocks",
        map(block, range(NUM_BLOCKS)),
        vocabulary=VOCABULARY,
        chunk_length=24,
    )


@pytest.fixture(scope="session")
def retriever_at():
    """Makes a retriever whose parameters depend on its step."""
    params = random_params(RETRIEVER)

    def make(step, scale=1.0):
        factor = np.float32(scale * (1 + step / 1000))
        scaled = jax.tree.map(lambda array: array * factor, params)
        return TrainedRetriever(step, RETRIEVER, scaled, VOCABULARY.fingerprint)

    return make


@pytest.fixture
def embedded(monkeypatch):
    """How many blocks were embedded to be written, not to be compared."""
    counts = []

    def counting(function, count):
        def call(*arguments):
            counts.append(count(arguments[3]))
            return function(*arguments)

        return call

    monkeypatch.setattr(
        attempt,
        "embed_shards",
        counting(attempt.embed_shards, lambda shards: sum(map(len, shards))),
    )
    monkeypatch.setattr(attempt, "embed_blocks", counting(attempt.embed_blocks, len))
    return counts
