"""Recall, rankings as trec_eval measures them, and intervals."""

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.metrics import answers, retrieval
from realm_jax.metrics.answers import has_answer
from realm_jax.metrics.retrieval import (
    bootstrap_interval,
    paired_bootstrap_difference,
    recall_at_k,
    relevant_blocks,
)
from tests.refused import refused


class Texts:
    """Stands in for a block store: titles and bodies by block id."""

    def __init__(self, *blocks):
        self.blocks = [types.SimpleNamespace(title=t, body=b) for t, b in blocks]
        self.num_blocks = len(blocks)
        self.read = []

    def iter_texts(self, block_ids):
        self.read.extend(int(i) for i in block_ids)
        return [self.blocks[i] for i in block_ids]


def question(answers, title=None, patterns=False):
    return types.SimpleNamespace(
        answers=answers, title=title, answers_are_patterns=patterns
    )


STORE = Texts(
    ("Rome", "Rome is the capital of Italy."),
    ("Italy", "Its capital is Rome. The Romans built it."),
    ("Romans", "Romans lived there."),
    ("Rome", "It was founded in 753 BC."),
)


def test_relevant_blocks_hold_the_answer_and_are_of_the_named_article():
    found = relevant_blocks(
        STORE,
        [
            question(["Rome"]),
            question(["Rome"], title="Rome"),
            question(["753 BC", "Romans"]),
            question(["Paris"]),
            question(["the"]),
        ],
    )
    assert found == [{0, 1}, {0}, {1, 2, 3}, set(), set()]
    store = Texts(("Čerkov Abbey", "It stands on a hill."), ("Abbey", "A hill."))
    for title in ("Čerkov_Abbey", "C\u030cerkov Abbey ", "čerkov&nbsp;Abbey"):
        assert relevant_blocks(store, [question(["hill"], title=title)]) == [{0}]


def test_patterns_are_matched_anywhere_in_the_body():
    found = relevant_blocks(
        STORE,
        [
            question([r"7\d\d bc", "(broken"], patterns=True),
            question(["^its|founded$"], patterns=True),
            question(["rom"], title="Rome", patterns=True),
            question(["Rome.*"]),
            question(["7.. BC"]),
        ],
    )
    assert found == [{3}, {1}, {0}, {0, 1}, set()]


words = st.sampled_from(["red", "green", "blue", "the", "red-green", "Blue"])
texts = st.lists(words, max_size=5).map(" ".join)


@given(
    st.lists(st.tuples(st.sampled_from("AB"), texts), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.lists(texts, max_size=2), st.sampled_from(["A", "B", None])),
        max_size=4,
    ),
)
def test_relevant_blocks_equal_a_loop_over_all_pairs(blocks, asked):
    questions = [question(answers, title) for answers, title in asked]
    expected = [
        {
            block
            for block, (title, body) in enumerate(blocks)
            if has_answer(body, q.answers) and q.title in (None, title)
        }
        for q in questions
    ]
    assert relevant_blocks(Texts(*blocks), questions) == expected


def test_only_retrieved_blocks_are_read_and_recall_stays_the_same(monkeypatch):
    questions = [question(["Rome"]), question(["753 BC"])]
    retrieved = np.asarray([[2, 1], [0, -1]])
    store = Texts(*((b.title, b.body) for b in STORE.blocks))
    among = relevant_blocks(store, questions, among=retrieved)
    assert store.read == [0, 1, 2]
    assert_same_recall(questions, retrieved, among)
    # And patterns are matched in what was retrieved for their own question.
    matched = []

    def has_pattern(body, patterns):
        matched.append((body, *patterns))
        return answers.has_pattern(body, patterns)

    monkeypatch.setattr(retrieval, "has_pattern", has_pattern)
    questions = [question(["rom"], patterns=True), question(["bc$"], patterns=True)]
    retrieved = np.asarray([[2, 1], [3, -1]])
    among = relevant_blocks(STORE, questions, among=retrieved)
    pairs = ((1, "rom"), (2, "rom"), (3, "bc$"))
    expected = [(STORE.blocks[block].body, pattern) for block, pattern in pairs]
    assert sorted(matched) == sorted(expected)
    assert_same_recall(questions, retrieved, among)


def assert_same_recall(questions, retrieved, among):
    np.testing.assert_array_equal(
        recall_at_k(retrieved, among, 2),
        recall_at_k(retrieved, relevant_blocks(STORE, questions), 2),
    )


def test_recall_at_k_looks_at_the_first_k():
    retrieved = np.asarray([[4, 7, 9], [1, 2, 3], [-1, -1, -1], [5, 6, 7]])
    relevant = [{9, 7}, {0}, {-1}, set()]
    assert recall_at_k(retrieved, relevant, 1).tolist() == [0, 0, 0, 0]
    assert recall_at_k(retrieved, relevant, 2).tolist() == [1, 0, 0, 0]
    with refused("at least 5"):
        recall_at_k(retrieved, relevant, 5)
    with refused("2 questions"):
        recall_at_k(retrieved, relevant[:2], 1)


def test_bootstrap_interval_agrees_with_scipy():
    generator = np.random.default_rng(3)
    real = generator.normal(size=150)
    # Half of them, for which no quantile lies between two numbers of hits.
    for values in ((real > 0.0).astype(float), real):
        ours = bootstrap_interval(values)
        peer = scipy.stats.bootstrap(
            (values,), np.mean, method="percentile", rng=generator, batch=1000
        ).confidence_interval
        tolerance = 0.04 * (peer.high - peer.low)
        assert (ours.mean, ours.count) == (pytest.approx(values.mean()), 150)
        assert (ours.low, ours.high) == pytest.approx(tuple(peer), abs=tolerance)


def test_of_few_values_or_groups_it_is_students_interval():
    values = np.random.default_rng(4).normal(0.6, 0.2, size=(7, 3))
    for ours, sample in (
        (bootstrap_interval(values[:, 0]), values[:, 0]),
        # Groups of one size are so many means.
        (bootstrap_interval(values.ravel(), np.repeat(range(7), 3)), values.mean(1)),
    ):
        peer = scipy.stats.t.interval(
            0.95, df=6, loc=sample.mean(), scale=scipy.stats.sem(sample)
        )
        assert (ours.low, ours.high) == pytest.approx(peer)
    assert (ours.count, ours.groups) == (21, 7)
    alone = bootstrap_interval(np.array([0.4]))
    assert (alone.low, alone.high) == pytest.approx((-0.6, 1.4))


def test_groups_of_one_are_none():
    values = np.random.default_rng(5).normal(size=80)
    grouped = bootstrap_interval(values, np.arange(80))
    assert grouped == dataclasses.replace(bootstrap_interval(values), groups=80)


@pytest.mark.parametrize(("articles", "sentences"), [(8, 20), (40, 5)])
def test_differences_of_articles_are_not_of_models(articles, sentences, monkeypatch):
    """Each article has its own; over all of them there is none."""
    monkeypatch.setattr(retrieval, "_RESAMPLES", 200)
    generator = np.random.default_rng(6)
    of_article = np.repeat(np.arange(articles), sentences)
    found = {"with": 0, "without": 0}
    for _ in range(400):
        shift = generator.normal(0, 0.1, articles)[of_article]
        before = generator.normal(size=articles * sentences)
        after = before + shift + generator.normal(0, 0.1, len(before))
        for label, groups in (("with", of_article), ("without", None)):
            change = paired_bootstrap_difference(before, after, groups)
            found[label] += change.low > 0 or change.high < 0
    assert 0.02 < found["with"] / 400 < 0.09
    assert found["without"] / 400 > 0.2


def test_a_few_questions_that_agree_prove_nothing():
    for count in (1, 2, 3):
        change = paired_bootstrap_difference(np.zeros(count), np.ones(count))
        assert change.mean == 1.0
        assert change.low <= 0.0
    assert paired_bootstrap_difference(np.zeros(8), np.ones(8)).low > 0.0


def test_bootstrap_interval_repeats_and_its_memory_is_bounded(monkeypatch):
    values = np.arange(50.0)
    interval = bootstrap_interval(values)
    assert interval == bootstrap_interval(values)
    monkeypatch.setattr(retrieval, "_VALUES_AT_A_TIME", 7 * len(values))
    assert bootstrap_interval(values).low == pytest.approx(interval.low, abs=0.3)


def test_paired_difference_sees_what_two_intervals_do_not():
    generator = np.random.default_rng(0)
    first = generator.normal(scale=10.0, size=200)
    second = first + 1.0 + generator.normal(scale=0.5, size=200)
    difference = paired_bootstrap_difference(first, second)
    assert difference.mean == pytest.approx((second - first).mean())
    assert 0.8 < difference.low < difference.high < 1.2
    assert bootstrap_interval(first).high > bootstrap_interval(second).low


def test_values_that_are_no_measurements_are_refused():
    for values in ([], [1.0, float("nan")]):
        with refused("at least one value"):
            bootstrap_interval(np.asarray(values))
    with refused("same questions"):
        paired_bootstrap_difference(np.ones(3), np.ones(4))


@pytest.mark.parametrize(("hits", "count"), [(0, 262), (262, 262), (3, 20), (1, 1)])
def test_rates_that_hardly_vary_have_wilsons_interval(hits, count):
    values = np.float64(np.arange(count) < hits)
    interval = bootstrap_interval(values)
    expected = scipy.stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert interval.mean == hits / count
    bounds = (expected.low, expected.high)
    assert (interval.low, interval.high) == pytest.approx(bounds, abs=1e-12)
    assert 0.0 <= interval.low <= interval.high <= 1.0
    # A group counts as one value.
    grouped = bootstrap_interval(np.repeat(values, 4), np.repeat(np.arange(count), 4))
    assert (grouped.low, grouped.high) == (interval.low, interval.high)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_of_equal_values_holds_their_mean(value):
    # By rounding it did not for 3, 6, 10 and other numbers: charts refuse that.
    for count in range(1, 100):
        interval = bootstrap_interval(np.full(count, value))
        assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0


def test_equal_pairs_differ_by_nothing():
    same = paired_bootstrap_difference(np.ones(262), np.ones(262))
    assert (same.low, same.high) == (0.0, 0.0)


# Written by pytrec_eval, of scores without ties and grades from -1 to 3.
TREC = json.loads((pathlib.Path(__file__).parent / "trec_eval.json").read_text())
GRADES = [{int(d): grade for d, grade in one.items()} for one in TREC["grades"]]
MEASURES = {
    **{f"recall_{k}": (retrieval.graded_recall, k) for k in (1, 5, 10)},
    **{f"ndcg_cut_{k}": (retrieval.ndcg, k) for k in (5, 10)},
    "recip_rank of the first 5": (retrieval.reciprocal_rank, 5),
}


@pytest.mark.parametrize("name", TREC["expected"])
def test_measures_are_those_of_trec_eval(name):
    measure, k = MEASURES[name]
    found = retrieval.best_first(np.array(TREC["scores"]), 14)
    np.testing.assert_allclose(
        measure(found, GRADES, k), TREC["expected"][name], atol=1e-8
    )


def test_what_was_not_found_has_no_rank():
    scores = np.array([[-np.inf, 2.0, -np.inf, 3.0]])
    found = retrieval.best_first(scores, 4)
    assert found.tolist() == [[3, 1, -1, -1]]
    assert retrieval.graded_recall(found, [{0: 1, 1: 1}], 4) == [0.5]
    assert retrieval.reciprocal_rank(found, [{0: 1, 2: 1}], 4) == [0.0]


def test_of_equal_scores_the_first_comes_first():
    assert retrieval.best_first(np.zeros((1, 5)), 3).tolist() == [[0, 1, 2]]


def test_a_document_is_as_good_as_its_best_block():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(4, 30))
    # Blocks of a document need not be next to each other.
    group_of = rng.permutation(np.arange(30) % 7)
    best = [[max(row[group_of == group]) for group in range(7)] for row in scores]
    np.testing.assert_array_equal(retrieval.best_of_groups(scores, group_of), best)


def slow_rank(row, relevant, excluded):
    """Takes blocks from the best on, those that are not relevant first."""
    order = sorted(
        (block for block in range(len(row)) if block not in excluded),
        key=lambda block: (-row[block], block in relevant),
    )
    return 1 + next(i for i, block in enumerate(order) if block in relevant)


def test_the_rank_of_the_best_is_that_of_a_loop():
    rng = np.random.default_rng(4)
    scores = rng.integers(6, size=(20, 9)).astype(float)  # With ties.
    relevant = [set(rng.choice(9, 2, replace=False).tolist()) for _ in scores]
    excluded = [{int(rng.choice(9))} - blocks for blocks in relevant]
    expected = [slow_rank(*row) for row in zip(scores, relevant, excluded, strict=True)]
    ranks = retrieval.rank_of_best(scores, relevant, excluded)
    # Of two relevant ones the worse is not ranked before the better.
    assert ranks.tolist() == expected
    assert retrieval.rank_of_best(np.full((1, 3), -np.inf), [[1]], [[0]]) == [np.inf]
