"""Bucketed, batched embedding against one document at a time."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from realm_jax.index import embed
from tests.index.memory_store import MemoryStore
from tests.index.tiny_builder import RETRIEVER, VOCABULARY, one_by_one, random_params

CONFIG = dataclasses.replace(
    RETRIEVER, bert=dataclasses.replace(RETRIEVER.bert, max_positions=64), shared=False
)
EMBED = embed.EmbedConfig(document_length=40, batch_size=4, shard_blocks=10)


def random_store(num_blocks):
    """Blocks of random wordpieces; 5 to 60 pieces with title and specials."""
    rng = np.random.default_rng(0)
    titles, bodies = (
        [rng.integers(5, VOCABULARY.size, n) for n in rng.integers(*lengths)]
        for lengths in ((0, 4, num_blocks), (2, 55, num_blocks))
    )
    return MemoryStore(bodies, titles)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def embed_all(params, store, config):
    shards = embed.shard_ranges(store.num_blocks, config.shard_blocks)
    embed_fn = embed.document_embedder(CONFIG)
    return dict(embed.embed_shards(embed_fn, params, store, shards, config))


def test_shards_hold_the_embeddings_of_each_document_in_order(params):
    store = random_store(23)
    first, again = (embed_all(params, store, EMBED) for _ in range(2))
    assert {start: len(rows) for start, rows in first.items()} == {0: 10, 10: 10, 20: 3}
    for start, rows in first.items():
        np.testing.assert_array_equal(again[start], rows)
    found = np.concatenate(list(first.values()))
    assert found.dtype == np.float32
    expected = one_by_one(CONFIG, params, store, range(23), 40)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    whole = dataclasses.replace(EMBED, shard_blocks=100, batch_size=7)
    (other,) = embed_all(params, store, whole).values()
    np.testing.assert_allclose(found, other, atol=2e-5)


def test_any_blocks_in_any_order_the_null_document_included(params):
    store = random_store(23)
    block_ids = np.array([7, -1, 22, 7, 0])
    found = embed.embed_blocks(
        embed.document_embedder(CONFIG), params, store, block_ids, EMBED
    )
    expected = one_by_one(CONFIG, params, store, block_ids, 40)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_few_shapes_are_compiled_and_once():
    shapes = set()

    def count(params, ids, segment_ids):
        shapes.add(ids.shape)
        return np.zeros((len(ids), 8), np.float32)

    embed.embed_blocks(count, None, random_store(300), np.arange(300), EMBED)
    assert shapes == {(4, 24), (4, 32), (4, 40)}
    same = dataclasses.replace(CONFIG)
    assert embed.document_embedder(same) is embed.document_embedder(CONFIG)


def test_what_only_embeds_is_not_unrolled():
    """It would compile for twice as long."""
    bert = dataclasses.replace(CONFIG.bert, num_layers=3, scan_unroll=3)
    unrolled = dataclasses.replace(CONFIG, bert=bert)
    params = random_params(unrolled)
    ids = np.zeros((1, 8), np.int32)

    def programs(config):
        documents = embed.document_embedder(config).lower(params, ids, ids)
        queries = embed.query_embedder(config).lower(params, ids)
        return documents.as_text(), queries.as_text()

    rolled = dataclasses.replace(bert, scan_unroll=1)
    assert programs(unrolled) == programs(dataclasses.replace(CONFIG, bert=rolled))


@hypothesis.given(st.integers(3, 600))
def test_buckets_rise_to_the_document_length_by_at_most_half(document_length):
    buckets = embed.length_buckets(document_length)
    assert buckets[-1] == document_length
    for shorter, longer in itertools.pairwise(buckets):
        assert shorter < longer <= 1.5 * shorter


@hypothesis.given(st.integers(1, 50), st.integers(1, 60))
def test_shard_ranges_cover_every_block_once(num_blocks, shard_blocks):
    shards = embed.shard_ranges(num_blocks, shard_blocks)
    assert [row for shard in shards for row in shard] == list(range(num_blocks))
    assert max(map(len, shards)) <= shard_blocks
