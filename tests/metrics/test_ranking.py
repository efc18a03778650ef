"""Rankings are measured as trec_eval measures them."""

import json
import pathlib

import numpy as np
import pytest

from realm_jax.metrics import ranking

# Written by pytrec_eval, of scores without ties and grades from -1 to 3.
TREC = json.loads((pathlib.Path(__file__).parent / "trec_eval.json").read_text())
GRADES = [{int(d): grade for d, grade in one.items()} for one in TREC["grades"]]
MEASURES = {
    **{f"recall_{k}": (ranking.recall, k) for k in (1, 5, 10)},
    **{f"ndcg_cut_{k}": (ranking.ndcg, k) for k in (5, 10)},
    "recip_rank of the first 5": (ranking.reciprocal_rank, 5),
}


@pytest.mark.parametrize("name", TREC["expected"])
def test_measures_are_those_of_trec_eval(name):
    measure, k = MEASURES[name]
    found = ranking.best_first(np.array(TREC["scores"]), 14)
    np.testing.assert_allclose(
        measure(found, GRADES, k), TREC["expected"][name], atol=1e-8
    )


def test_what_was_not_found_has_no_rank():
    scores = np.array([[-np.inf, 2.0, -np.inf, 3.0]])
    found = ranking.best_first(scores, 4)
    assert found.tolist() == [[3, 1, -1, -1]]
    assert ranking.recall(found, [{0: 1, 1: 1}], 4) == [0.5]
    assert ranking.reciprocal_rank(found, [{0: 1, 2: 1}], 4) == [0.0]


def test_of_equal_scores_the_first_comes_first():
    assert ranking.best_first(np.zeros((1, 5)), 3).tolist() == [[0, 1, 2]]


def test_a_document_is_as_good_as_its_best_block():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(4, 30))
    # Blocks of a document need not be next to each other.
    group_of = rng.permutation(np.arange(30) % 7)
    best = [[max(row[group_of == group]) for group in range(7)] for row in scores]
    np.testing.assert_array_equal(ranking.best_of_groups(scores, group_of), best)


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
    ranks = ranking.rank_of_best(scores, relevant, excluded)
    # Of two relevant ones the worse is not ranked before the better.
    assert ranks.tolist() == expected
    assert ranking.rank_of_best(np.full((1, 3), -np.inf), [[1]], [[0]]) == [np.inf]
