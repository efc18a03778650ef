"""The searchers against a sort in numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.index import device_search, searchers
from tests.refused import refused


def slow_neighbours(queries, embeddings, k):
    """Sorts all scores, equal ones by id, and fills up with -1 and -inf."""
    scores = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    missing = ((0, 0), (0, k - ids.shape[1]))
    best = np.take_along_axis(scores, ids, axis=1)
    return (
        np.pad(ids, missing, constant_values=-1),
        np.pad(best, missing, constant_values=-np.inf),
    )


def small_integers(shape, seed):
    # Inner products of small integers are exact in float32, and many are equal.
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    num_blocks=st.integers(1, 300),
    k=st.integers(1, 320),
    seed=st.integers(0, 2**32 - 1),
)
def test_exact_search_equals_a_sort_with_ties_by_id(num_blocks, k, seed):
    assert_exact(small_integers((num_blocks, 4), seed), k, seed + 1)


def assert_exact(embeddings, k, seed):
    queries = small_integers((2, 4), seed)
    found = searchers.DeviceSearcher(embeddings).search(queries, k)
    ids, scores = slow_neighbours(queries, embeddings, k)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)


@pytest.mark.parametrize("rows", [256, 384])
def test_exact_search_over_several_chunks(rows, monkeypatch):
    """Chunks of 384 rows, as an accelerator's, do not divide the 1,024 padded ones."""
    monkeypatch.setattr(device_search, "_rows_at_once", lambda *_: rows)
    device_search.search.clear_cache()
    for k in (1, 64, 700):
        assert_exact(small_integers((1000, 4), seed=3), k, seed=4)
    device_search.search.clear_cache()


def test_exact_search_in_bfloat16_ranks_the_rounded_embeddings():
    embeddings = np.random.default_rng(1).standard_normal((500, 8), np.float32)
    queries = small_integers((3, 8), seed=2)
    config = searchers.DeviceConfig(precision="bfloat16")
    found = searchers.DeviceSearcher(embeddings, config=config).search(queries, 10)
    rounded = embeddings.astype(jnp.bfloat16).astype(np.float32)
    ids, scores = slow_neighbours(queries, rounded, 10)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-6)
    assert found.scores.dtype == np.float32


def test_a_new_index_of_the_same_size_compiles_nothing(caplog):
    """At every swap the trainer would wait for it."""
    searchers.DeviceSearcher(small_integers((100, 4), seed=6)).sample()
    embeddings = small_integers((100, 4), seed=7)
    newer = searchers.DeviceSearcher(embeddings)
    with jax.log_compiles():
        sample = newer.sample()
    assert not [m for m in caplog.messages if "Compiling" in m]
    ids = searchers.sampled_blocks(100)
    np.testing.assert_array_equal(sample, embeddings[ids])


def test_searchers_share_one_interface_and_refuse_the_same(tmp_path):
    embeddings = small_integers((10, 4), seed=0)
    for name in searchers.SEARCHERS:
        searcher = searchers.make_searcher(name, embeddings, step=12)
        assert (searcher.step, searcher.num_blocks) == (12, 10)
        with refused(r"\[batch, 4\].*got \[2, 5\]"):
            searcher.search(np.zeros((2, 5), np.float32), 3)
        with refused("at least 1 neighbour, got 0"):
            searcher.search(np.zeros((2, 4), np.float32), 0)
        for shape in [(0, 4), (4,)]:
            with refused("at least one"):
                searchers.make_searcher(name, np.zeros(shape, np.float32))
    with refused("'faiss'; expected one of: device, scann"):
        searchers.make_searcher("faiss", embeddings)
    with refused("expected a saved ScaNN searcher"):
        searchers.ScannSearcher.load(tmp_path)
