"""What ScaNN visits, chosen by measurement: against a count of all choices."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from realm_jax.index import scann_tuning
from realm_jax.index.scann_tuning import Visit, cheapest_visit, tree_shape, usual_leaves

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


@pytest.mark.parametrize("num_blocks", [1, 2, 20_000, 13_353_728])
def test_a_tree_has_leaves_and_a_sample_to_train_them(num_blocks):
    leaves, sample = tree_shape(num_blocks)
    assert 1 <= leaves <= num_blocks
    assert leaves <= sample <= num_blocks
    assert 1 <= usual_leaves(num_blocks) <= leaves


def test_without_queries_the_share_that_is_visited_falls_with_the_size():
    sizes = [32_570, 1_000_000, 13_353_728]
    shares = [usual_leaves(size) / tree_shape(size)[0] for size in sizes]
    # 30 % was enough for 32,570 blocks of text (docs/benchmarks.md).
    assert 0.29 < shares[0] < 0.31
    assert shares == sorted(shares, reverse=True)


def test_share_found_counts_what_is_among_the_found():
    found = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    exact = np.array([[4, 3, 2, 9], [0, 1, 2, 3]])
    assert scann_tuning.share_found(found, exact) == 3 / 8
