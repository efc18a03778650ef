"""Run by `test_device_search.py` where there are eight simulated devices."""

import functools

import jax
import numpy as np

from realm_jax.index import device_search, device_tokens
from realm_jax.index.device_search import Precision
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import rolling_refresh
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.rolling_refresh import Renewal
from tests.index import device_worlds as worlds
from tests.index.test_searchers import slow_neighbours, small_integers

MESH = make_mesh(MeshConfig(data=2, fsdp=2, model=2))


def place(embeddings, precision=Precision.FLOAT32):
    return device_search.place_embeddings(
        lambda start, stop: embeddings[start:stop], *embeddings.shape, MESH, precision
    )


def check_search() -> None:
    device_search.CHUNK_ROWS = 2 * device_search.GROUP_ROWS
    for num_blocks, k in ((7, 5), (300, 1), (1025, 64)):
        embeddings = small_integers((num_blocks, 4), seed=num_blocks)
        queries = small_integers((3, 4), seed=k)
        table = place(embeddings)
        shards = {shard.data.shape for shard in table.rows.addressable_shards}
        assert shards == {(table.rows.shape[0] // 8, 4)}, shards
        found = device_search.search(table, queries, k, mesh=MESH)
        ids, scores = slow_neighbours(queries, embeddings, k)
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_array_equal(found.scores, scores)


def check_candidates() -> None:
    world = worlds.make(seed=0)
    expected = worlds.host_candidates(world)
    table = device_tokens.place_tokens(world.store, world.layout, MESH)
    assert len(table.ids.addressable_shards) == 8
    worlds.assert_same(worlds.device_candidates(world, table, MESH), expected)


def check_renewal() -> None:
    """Rows are embedded where they lie, and rows are written where they lie."""
    world = worlds.make(seed=1, num_blocks=300)
    bert = BertConfig(14, 16, 1, 2, 32, 40, dropout_rate=0.0)
    loss = PretrainLoss(
        Retriever(RetrieverConfig(bert, projection_size=4)), KnowledgeEncoder(bert)
    )
    ids, segments = world.store.document_ids(np.arange(300), world.layout.document)
    params = loss.retriever.init(jax.random.key(0), ids[:1], ids[:1], segments[:1])
    whole = loss.retriever.apply(
        {"params": params["params"]}, ids, segments, method="embed_documents"
    )
    towers = loss.retriever, world.layout, MESH
    tokens = device_tokens.place_tokens(world.store, world.layout, MESH)
    index = place(np.zeros((300, 4), np.float32))
    embed = jax.jit(
        functools.partial(rolling_refresh.embed_slice, *towers, Renewal(3, False, 32))
    )
    with jax.set_mesh(MESH):
        for step in range(3):
            index = embed(index, tokens, params["params"], step)
    assert len(index.rows.sharding.device_set) == 8
    assert index.rows.addressable_shards[0].data.shape == (index.rows.shape[0] // 8, 4)
    np.testing.assert_allclose(np.asarray(index.rows)[:300], whole, atol=1e-5)
    block_ids = np.array([[299, 0, -1], [150, 299, 37]])
    fresh = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    written = np.asarray(rolling_refresh.write_rows(index, block_ids, fresh, MESH).rows)
    expected = np.asarray(index.rows).copy()
    expected[[299, 0, 150, 37]] = fresh[[0, 0, 1, 1], [0, 1, 0, 2]]
    np.testing.assert_array_equal(written, expected)


if __name__ == "__main__":
    check_search()
    check_candidates()
    check_renewal()
    print("the same on eight devices")
