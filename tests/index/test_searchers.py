"""The searchers against a sort in numpy."""

import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.index import device_search, searchers
from realm_jax.types import Neighbours


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


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    num_blocks=st.integers(1, 300),
    k=st.integers(1, 320),
    seed=st.integers(0, 2**32 - 1),
)
def test_exact_search_equals_a_sort_with_ties_by_id(num_blocks, k, seed):
    embeddings = small_integers((num_blocks, 4), seed)
    queries = small_integers((2, 4), seed + 1)
    found = searchers.DeviceSearcher(embeddings).search(queries, k)
    ids, scores = slow_neighbours(queries, embeddings, k)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)


@pytest.mark.parametrize("k", [1, 7, 64, 700])
def test_exact_search_over_several_chunks(monkeypatch, k):
    monkeypatch.setattr(device_search, "CHUNK_ROWS", 8 * device_search.GROUP_ROWS)
    embeddings = small_integers((1000, 4), seed=3)
    queries = small_integers((5, 4), seed=4)
    found = searchers.DeviceSearcher(embeddings).search(queries, k)
    ids, scores = slow_neighbours(queries, embeddings, k)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)


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


def share_found(found: Neighbours, ids) -> float:
    pairs = zip(found.ids, ids, strict=True)
    return float(np.mean([np.isin(wanted, row) for row, wanted in pairs]))


def clustered_embeddings(num_blocks):
    generator = np.random.default_rng(5)
    centres = generator.normal(size=(100, 32))
    cluster = generator.integers(0, 100, num_blocks)
    noise = generator.normal(size=(num_blocks, 32))
    return (centres[cluster] + 0.5 * noise).astype(np.float32)


def test_scann_below_the_threshold_is_exact():
    embeddings = clustered_embeddings(3000)
    queries = embeddings[:20] + 0.1
    found = searchers.ScannSearcher(embeddings, step=7).search(queries, 10)
    ids, scores = slow_neighbours(queries, embeddings, 10)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


def test_scann_tree_finds_nearly_all_and_survives_saving(tmp_path):
    embeddings = clustered_embeddings(3000)
    queries = embeddings[:50] + 0.1
    # Training is random: with half of the leaves searched, this recall holds by far.
    config = searchers.ScannConfig(brute_force_below=0, searched_share=0.5)
    searcher = searchers.ScannSearcher(embeddings, step=7, config=config)
    found = searcher.search(queries, 10)
    ids, _ = slow_neighbours(queries, embeddings, 10)
    assert share_found(found, ids) >= 0.9

    searcher.save(tmp_path / "searcher")
    loaded = searchers.ScannSearcher.load(tmp_path / "searcher")
    again = loaded.search(queries, 10)
    np.testing.assert_array_equal(again.ids, found.ids)
    np.testing.assert_array_equal(again.scores, found.scores)
    assert (loaded.step, loaded.num_blocks, loaded.config) == (7, 3000, config)
    assert [path.name for path in tmp_path.iterdir()] == ["searcher"]


def test_scann_pads_what_it_does_not_find():
    embeddings = np.array([[1.0, 0.0], [2.0, 0.0]], np.float32)
    found = searchers.ScannSearcher(embeddings).search(np.ones((1, 2)), 4)
    np.testing.assert_array_equal(found.ids, [[1, 0, -1, -1]])
    np.testing.assert_array_equal(found.scores, [[2.0, 1.0, -np.inf, -np.inf]])


def test_scann_damaged_directory_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match="expected a saved ScaNN searcher"):
        searchers.ScannSearcher.load(tmp_path)


@pytest.mark.parametrize("name", searchers.SEARCHERS)
def test_searchers_share_one_interface_and_refuse_the_same(name):
    embeddings = small_integers((10, 4), seed=0)
    searcher = searchers.make_searcher(name, embeddings, step=12)
    assert (searcher.step, searcher.num_blocks) == (12, 10)
    with pytest.raises(BadInputError, match=r"\[batch, 4\].*got \[2, 5\]"):
        searcher.search(np.zeros((2, 5), np.float32), 3)
    with pytest.raises(BadInputError, match="at least 1 neighbour, got 0"):
        searcher.search(np.zeros((2, 4), np.float32), 0)
    for shape in [(0, 4), (4,)]:
        with pytest.raises(BadInputError, match="at least one"):
            searchers.make_searcher(name, np.zeros(shape, np.float32))


def test_unknown_searcher_names_the_known_ones():
    with pytest.raises(BadInputError, match="'faiss'; expected one of: device, scann"):
        searchers.make_searcher("faiss", np.zeros((1, 4), np.float32))


@pytest.mark.full
def test_scann_is_imported_without_tensorflow():
    program = (
        "import sys, numpy\n"
        "from realm_jax.index.searchers import make_searcher\n"
        "make_searcher('scann', numpy.ones((2, 4), 'f'))\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
