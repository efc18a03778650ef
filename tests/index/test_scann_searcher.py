"""ScaNN with a search that was chosen by measurement, against a sort in NumPy.

The choice itself is compared with a count of all choices. Then what a builder makes for
trainers that search with ScaNN.
"""

import dataclasses
import json
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from realm_jax.errors import NotReadyError
from realm_jax.index import builder, scann_assets
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.scann_assets import RECALL, ScannAssets, load_assets
from realm_jax.index.scann_searcher import (
    LowRecallError,
    ScannConfig,
    ScannSearcher,
    Visit,
    cheapest_visit,
    share_found,
    tree_shape,
    usual_leaves,
)
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.source import IndexSource
from tests.index.test_searchers import slow_neighbours
from tests.index.tiny_builder import (
    CONFIG,
    RETRIEVER,
    SCANN,
    index_series,
    publish,
    read_embeddings,
)
from tests.refused import refused

NUM_BLOCKS, WIDTH, K = 5000, 32, 8
TREE = ScannConfig(brute_force_below=0)


@pytest.fixture(scope="module")
def embeddings():
    generator = np.random.default_rng(5)
    centres = generator.normal(size=(60, WIDTH))
    cluster = generator.integers(0, 60, NUM_BLOCKS)
    noise = generator.normal(size=(NUM_BLOCKS, WIDTH))
    return (centres[cluster] + 0.5 * noise).astype(np.float32)


def near_blocks(embeddings, seed, scale=0.1):
    """Queries that lie among the blocks."""
    generator = np.random.default_rng(seed)
    near = embeddings[generator.integers(0, NUM_BLOCKS, 400)]
    return near + generator.normal(0, scale, near.shape).astype(np.float32)


def far_from_blocks(embeddings, seed):
    """Queries between the blocks of several leaves, as questions are."""
    return near_blocks(embeddings, seed, scale=2.0)


def exact_ids(queries, embeddings):
    return slow_neighbours(queries, embeddings, K)[0]


def recall(searcher, queries, embeddings):
    found = searcher.search(queries, K).ids
    return share_found(found, exact_ids(queries, embeddings))


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
    assert hard.leaves < tree_shape(NUM_BLOCKS)[0]


def test_a_higher_recall_costs_more(searcher, embeddings):
    queries, leaves = far_from_blocks(embeddings, 3), []
    for wanted in (0.6, 0.99):
        leaves.append(tune(searcher, queries, embeddings, wanted).leaves)
        assert recall(searcher, queries, embeddings) >= wanted
    assert leaves[0] < leaves[1]


def test_the_choice_is_the_same_again_and_is_saved(searcher, embeddings, tmp_path):
    queries = far_from_blocks(embeddings, 3)
    chosen = tune(searcher, queries, embeddings, 0.9)
    tune(searcher, queries, embeddings, 0.5)
    assert tune(searcher, queries, embeddings, 0.9) == chosen
    searcher.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    about = json.loads((tmp_path / "saved" / "searcher.json").read_text())
    assert about["visit"] == {"leaves": chosen.leaves, "reordered": chosen.reordered}
    loaded = ScannSearcher.load(tmp_path / "saved")
    for name in ("visit", "config", "step", "num_blocks"):
        assert getattr(loaded, name) == getattr(searcher, name)
    again, found = (each.search(queries, K) for each in (loaded, searcher))
    np.testing.assert_array_equal(again.ids, found.ids)
    np.testing.assert_array_equal(again.scores, found.scores)
    # It can still be tuned.
    assert tune(loaded, queries, embeddings, 0.9) == chosen


def test_a_recall_out_of_reach_is_refused_by_the_name_of_its_setting(embeddings):
    config = ScannConfig(brute_force_below=0, searched_share=0.05, reordered=20)
    searcher = ScannSearcher(embeddings, step=7, config=config)
    before = searcher.visit
    message = r"finds 95\.0% of the 8 best blocks of step 7.*lower ScannConfig\.recall"
    with pytest.raises(LowRecallError, match=message):
        tune(searcher, far_from_blocks(embeddings, 3), embeddings)
    assert searcher.visit == before


def test_what_is_set_is_searched(embeddings):
    config = ScannConfig(brute_force_below=0, searched_share=1.0, reordered=300)
    searcher = ScannSearcher(embeddings, config=config)
    queries = near_blocks(embeddings, 1)
    leaves, _ = tree_shape(NUM_BLOCKS)
    assert searcher.visit == Visit(leaves, 300)
    assert tune(searcher, queries, embeddings) == Visit(leaves, 300)
    assert recall(searcher, queries, embeddings) > 0.99


def test_below_the_threshold_all_are_searched_and_nothing_is_tuned(embeddings):
    few, queries = embeddings[:100], near_blocks(embeddings, 1)
    searcher = ScannSearcher(few)
    searcher.tune(queries[:3], np.zeros((3, K), np.int64), 1.0)
    assert searcher.visit is None
    found = searcher.search(queries, K)
    ids, scores = slow_neighbours(queries, few, K)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    # What is not found is filled up.
    found = ScannSearcher(np.diag([1, 2]).astype(np.float32)).search(np.ones((1, 2)), 4)
    np.testing.assert_array_equal(found.ids, [[1, 0, -1, -1]])
    np.testing.assert_array_equal(found.scores, [[2.0, 1.0, -np.inf, -np.inf]])


def test_a_searcher_of_version_0_1_is_loaded(searcher, embeddings, tmp_path):
    folder = tmp_path / "saved"
    searcher.save(folder)
    about = json.loads((folder / "searcher.json").read_text())
    del about["visit"]
    settings = {"searched_share": 0.5, "reordered": 40}
    about["config"] = {"brute_force_below": 0, **settings}
    (folder / "searcher.json").write_text(json.dumps(about))
    loaded = ScannSearcher.load(folder)
    # The square root of 5,000 is 70, and so many leaves such a tree had.
    assert loaded.visit == Visit(35, 40)
    assert recall(loaded, near_blocks(embeddings, 1), embeddings) > 0.9


def test_a_share_of_more_than_all_is_refused():
    for name in ("recall", "searched_share"):
        with refused(f"ScannConfig.{name} to be a share above 0 and at most 1.*1.1"):
            ScannConfig(**{name: 1.1})


NUM_LEAVES = 40


def cost(visit: Visit, num_blocks: int) -> float:
    return visit.leaves * num_blocks / NUM_LEAVES + 25 * visit.reordered


@hypothesis.given(
    lost_by_leaves=st.floats(0.1, 5.0),
    lost_by_codes=st.floats(0.0, 20.0),
    recall=st.floats(0.3, 1.0),
    num_blocks=st.integers(NUM_LEAVES, 10_000_000),
)
def test_the_choice_is_the_cheapest_of_all(
    lost_by_leaves, lost_by_codes, recall, num_blocks
):
    def recall_of(visit: Visit) -> float:
        unseen = lost_by_leaves * (1 / visit.leaves - 1 / NUM_LEAVES)
        return 1 - unseen - lost_by_codes / visit.reordered

    chosen = cheapest_visit(
        recall_of, recall, num_blocks=num_blocks, num_leaves=NUM_LEAVES
    )
    sufficient = [
        cost(visit, num_blocks)
        for reordered in (50, 100, 200, 400)
        for visit in (Visit(leaves, reordered) for leaves in range(1, NUM_LEAVES + 1))
        if recall_of(visit) >= recall
    ]
    if chosen is None:
        assert not sufficient
    else:
        assert recall_of(chosen) >= recall
        assert cost(chosen, num_blocks) == min(sufficient)


def test_what_is_set_is_kept():
    def recall_of(visit: Visit) -> float:
        return visit.leaves / NUM_LEAVES - 10 / visit.reordered

    def choose(**fixed: int) -> Visit | None:
        return cheapest_visit(
            recall_of, 0.7, num_blocks=1000, num_leaves=NUM_LEAVES, **fixed
        )

    assert choose(reordered=70) == Visit(34, 70)
    assert choose(leaves=32) == Visit(32, 100)
    assert choose(leaves=36, reordered=50) == Visit(36, 50)
    assert choose(leaves=27) is None


def test_a_few_searches_are_enough():
    asked = []

    def recall_of(visit: Visit) -> float:
        asked.append(visit.leaves)
        return float(visit.leaves >= 1000)

    chosen = cheapest_visit(recall_of, 1.0, num_blocks=13_000_000, num_leaves=7000)
    assert chosen == Visit(1000, 50)
    # The time of twenty searches, for each takes as long as its leaves are many.
    assert sum(asked) < 20 * 1000


def test_a_tree_has_leaves_and_a_sample_to_train_them():
    shares = {}
    for num_blocks in (1, 2, 32_570, 1_000_000, 13_353_728):
        leaves, sample = tree_shape(num_blocks)
        assert 1 <= leaves <= num_blocks
        assert leaves <= sample <= num_blocks
        assert 1 <= usual_leaves(num_blocks) <= leaves
        shares[num_blocks] = usual_leaves(num_blocks) / leaves
    # 30 % was enough for 32,570 blocks of text (docs/benchmarks.md).
    assert 0.29 < shares[32_570] < 0.31
    # Without queries the share that is visited falls with the size.
    assert shares[32_570] >= shares[1_000_000] >= shares[13_353_728]


def test_share_found_counts_what_is_among_the_found():
    found = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    exact = np.array([[4, 3, 2, 9], [0, 1, 2, 3]])
    assert share_found(found, exact) == 3 / 8


def test_scann_is_trained_judged_and_loaded_as_it_was(store, blocks, retriever_at):
    manifest = builder.build_once(retriever_at(1), blocks, store, SCANN)
    series = index_series(store)
    assert manifest.metadata[RECALL] == 1.0
    assert series.read_manifest(1).metadata[RECALL] == 1.0
    series.verify(manifest)
    loaded = load_assets(series, manifest)
    embeddings = read_embeddings(store, 1)
    queries = embeddings[::5] + np.float32(0.01)
    found = loaded.search(queries, 4)
    expected = DeviceSearcher(embeddings).search(queries, 4)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(loaded.sample(), DeviceSearcher(embeddings).sample())
    # A second call finds it there.
    again = builder.build_once(retriever_at(1), blocks, store, SCANN)
    assert again.attempt == manifest.attempt
    without = builder.build_once(retriever_at(2), blocks, store, CONFIG)
    assert load_assets(series, without) is None


def test_an_index_of_low_recall_is_refused(store, blocks, retriever_at, monkeypatch):
    scann = ScannAssets(min_recall=1.0)
    config = dataclasses.replace(CONFIG, scann=scann, patience_seconds=0.2)
    monkeypatch.setattr(scann_assets, "share_found", lambda found, exact: 0.5)
    publish(store, blocks, retriever_at(1))
    with pytest.raises(LowRecallError, match=r"100% of the 8 best .* it finds 50\.0%"):
        builder.build_once(retriever_at(1), blocks, store, config)
    assert index_series(store).steps() == []
    assert not store.list("index/data")
    Heartbeat(store, builder.TRAINER_ROLE).beat(0, "running")
    with pytest.raises(NotReadyError, match="was not heard of"):
        builder.IndexBuilder(store, blocks, config).run(threading.Event())
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    assert "raise ScannConfig" in status.extra["refused"]["1"]


def test_the_choice_for_beginnings_of_blocks_is_loaded(store, blocks, retriever_at):
    tree = ScannConfig(brute_force_below=0, recall=0.8)
    scann = ScannAssets(tree, min_recall=0.5, num_queries=16)
    config = dataclasses.replace(CONFIG, scann=scann)
    manifest = builder.build_once(retriever_at(1), blocks, store, config)
    assert manifest.metadata[RECALL] >= scann.min_recall
    trainer = IndexSource(store, blocks, RETRIEVER, config.embed, "scann")
    loaded = trainer.make_searcher(trainer.series, manifest)
    # 23 blocks, so 8 leaves.
    assert 1 <= loaded.visit.leaves <= 8
    assert loaded.config == scann.config
    # Beginnings of blocks are asked for more than questions.
    assets = ScannAssets(ScannConfig(recall=0.95))
    assert 0.95 + 0.05 / 2 < assets.recall_of_beginnings() < 1
    # A recall out of reach publishes no index.
    tree = ScannConfig(brute_force_below=0, searched_share=0.01, recall=1.0)
    config = dataclasses.replace(CONFIG, scann=ScannAssets(tree, num_queries=16))
    with pytest.raises(LowRecallError, match=r"100\.0% .*lower ScannConfig\.recall"):
        builder.build_once(retriever_at(2), blocks, store, config)
    assert index_series(store).steps() == [1]
    assert not any("/2-" in name for name in store.list("index/data"))
