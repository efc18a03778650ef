import jax
import numpy as np
import pytest

from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.index import build as attempt
from realm_jax.index.retrievers import (
    TrainedRetriever,
)
from realm_jax.index.snapshots import (
    SnapshotSeries,
)
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from tests.index.tiny_builder import (
    NUM_BLOCKS,
    RETRIEVER,
    VOCABULARY,
)


@pytest.fixture(params=["local", "gs"])
def model_store(request, tmp_path):
    """An empty model directory, in a folder and in a bucket."""
    if request.param == "local":
        return open_store(tmp_path / "model")
    return open_store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


@pytest.fixture
def donor(model_store, tmp_path):
    """Another model directory, of the same kind."""
    if model_store.url().startswith("gs://"):
        return open_store(f"{model_store.url()}-before")
    return open_store(tmp_path / "before")


@pytest.fixture
def local(tmp_path):
    return SnapshotSeries(open_store(tmp_path), "index")


@pytest.fixture
def series(model_store):
    return SnapshotSeries(model_store, "index")


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
def initial_params():
    # Of the right shapes; to initialise would be to compile.
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    init = Retriever(RETRIEVER).init
    shapes = jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]
    generator = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: generator.normal(0, 0.5, leaf.shape).astype(np.float32), shapes
    )


@pytest.fixture
def retriever_at(initial_params):
    """Makes a retriever whose parameters depend on its step."""

    def make(step, scale=1.0):
        factor = scale * (1 + step / 1000)
        params = jax.tree.map(lambda array: array * np.float32(factor), initial_params)
        return TrainedRetriever(step, RETRIEVER, params, VOCABULARY.fingerprint)

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
