"""ScaNN with a search that was chosen by measurement, against a sort in NumPy."""

import json

import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.index import scann_tuning
from realm_jax.index.scann_searcher import LowRecallError, ScannConfig, ScannSearcher
from realm_jax.index.scann_tuning import Visit

NUM_BLOCKS, WIDTH, K = 5000, 32, 8
TREE = ScannConfig(brute_force_below=0)


@pytest.fixture(scope="module")
def embeddings():
    generator = np.random.default_rng(5)
    centres = generator.normal(size=(60, WIDTH))
    cluster = generator.integers(0, 60, NUM_BLOCKS)
    noise = generator.normal(size=(NUM_BLOCKS, WIDTH))
    return (centres[cluster] + 0.5 * noise).astype(np.float32)


def near_blocks(embeddings, seed):
    """Queries that lie among the blocks."""
    generator = np.random.default_rng(seed)
    near = embeddings[generator.integers(0, NUM_BLOCKS, 400)]
    return near + generator.normal(0, 0.1, near.shape).astype(np.float32)


def far_from_blocks(embeddings, seed):
    """Queries between the blocks of several leaves, as questions are."""
    generator = np.random.default_rng(seed)
    near = embeddings[generator.integers(0, NUM_BLOCKS, 400)]
    return near + generator.normal(0, 2.0, near.shape).astype(np.float32)


def exact_ids(queries, embeddings):
    scores = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    return np.argsort(-scores, axis=1)[:, :K]


def recall(searcher, queries, embeddings):
    found = searcher.search(queries, K).ids
    exact = exact_ids(queries, embeddings)
    hits = [len(set(f) & set(e)) for f, e in zip(found, exact, strict=True)]
    return sum(hits) / exact.size


@pytest.fixture(scope="module")
def searcher(embeddings):
    return ScannSearcher(embeddings, step=7, config=TREE)


def tune(searcher, queries, embeddings, recall=None):
    searcher.tune(queries, exact_ids(queries, embeddings), recall)
    return searcher.visit


def test_harder_queries_get_the_recall_by_more_leaves(searcher, embeddings):
    easy = tune(searcher, near_blocks(embeddings, 1), embeddings)
    others = far_from_blocks(embeddings, 2)
    too_little = recall(searcher, others, embeddings)
    hard = tune(searcher, far_from_blocks(embeddings, 3), embeddings)
    # 3,200 neighbours of queries that nothing was chosen on.
    assert recall(searcher, others, embeddings) > 0.93 > too_little
    assert hard.leaves > easy.leaves
    # Less than all, or there was nothing to choose.
    assert hard.leaves < scann_tuning.tree_shape(NUM_BLOCKS)[0]


def test_a_higher_recall_costs_more(searcher, embeddings):
    queries = far_from_blocks(embeddings, 3)
    little = tune(searcher, queries, embeddings, 0.6)
    assert recall(searcher, queries, embeddings) >= 0.6
    much = tune(searcher, queries, embeddings, 0.99)
    assert recall(searcher, queries, embeddings) >= 0.99
    assert much.leaves > little.leaves


def test_the_choice_is_the_same_again_and_is_saved(searcher, embeddings, tmp_path):
    queries = far_from_blocks(embeddings, 3)
    chosen = tune(searcher, queries, embeddings, 0.9)
    tune(searcher, queries, embeddings, 0.5)
    assert tune(searcher, queries, embeddings, 0.9) == chosen
    searcher.save(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "searcher.json").read_text())
    assert about["visit"] == {"leaves": chosen.leaves, "reordered": chosen.reordered}
    loaded = ScannSearcher.load(tmp_path / "saved")
    assert (loaded.visit, loaded.config) == (chosen, searcher.config)
    np.testing.assert_array_equal(
        loaded.search(queries, K).ids, searcher.search(queries, K).ids
    )
    # It can still be tuned.
    assert tune(loaded, queries, embeddings, 0.9) == chosen


def test_a_recall_out_of_reach_is_refused_by_the_name_of_its_setting(embeddings):
    config = ScannConfig(brute_force_below=0, searched_share=0.05, reordered=20)
    searcher = ScannSearcher(embeddings, step=7, config=config)
    before = searcher.visit
    with pytest.raises(
        LowRecallError,
        match=r"finds 95\.0% of the 8 best blocks of step 7.*lower ScannConfig\.recall",
    ):
        tune(searcher, far_from_blocks(embeddings, 3), embeddings)
    assert searcher.visit == before


def test_what_is_set_is_searched(embeddings):
    config = ScannConfig(brute_force_below=0, searched_share=1.0, reordered=300)
    searcher = ScannSearcher(embeddings, config=config)
    queries = near_blocks(embeddings, 1)
    leaves, _ = scann_tuning.tree_shape(NUM_BLOCKS)
    assert searcher.visit == Visit(leaves, 300)
    assert tune(searcher, queries, embeddings) == Visit(leaves, 300)
    assert recall(searcher, queries, embeddings) > 0.99


def test_a_searcher_without_a_tree_is_not_tuned(embeddings):
    searcher = ScannSearcher(embeddings[:100])
    searcher.tune(embeddings[:3], np.zeros((3, K), np.int64), 1.0)
    assert searcher.visit is None


@pytest.mark.parametrize(("share", "reordered"), [(0.3, 200), (0.5, 40)])
def test_a_searcher_of_version_0_1_is_loaded_as_it_searched(
    searcher, embeddings, tmp_path, share, reordered
):
    folder = tmp_path / "saved"
    searcher.save(folder)
    about = json.loads((folder / "searcher.json").read_text())
    del about["visit"]
    about["config"] = {
        "brute_force_below": 0,
        "searched_share": share,
        "reordered": reordered,
    }
    (folder / "searcher.json").write_text(json.dumps(about))
    loaded = ScannSearcher.load(folder)
    # The square root of 5,000 is 70, and so many leaves such a tree had.
    assert loaded.visit == Visit(round(70 * share), reordered)
    queries = near_blocks(embeddings, 1)
    assert recall(loaded, queries, embeddings) > 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"recall": 1.1},
            "ScannConfig.recall to be a share above 0 and at most 1, got 1.1",
        ),
        (
            {"recall": 0.0},
            "ScannConfig.recall to be a share above 0 and at most 1, got 0.0",
        ),
        ({"searched_share": 30}, "searched_share to be a share .*, or None, got 30"),
        (
            {"reordered": 0},
            "reordered to be a whole number of at least 1, or None, got 0",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(BadInputError, match=message):
        ScannConfig(**settings)
