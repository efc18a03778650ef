import collections

import numpy as np
import pytest

from realm_jax.data.examples import write_examples
from realm_jax.data.mixture import CYCLE, Mixture
from tests.refused import refused


def make_set(folder, name, rows, first=0, **more):
    ids = np.arange(first, first + rows, dtype=np.int32)
    arrays = {"question_index": ids, "question_ids": np.tile(ids[:, None], (1, 3))}
    return write_examples(folder / name, [arrays | more], {})


@pytest.fixture
def mixture(tmp_path):
    patterns = np.full((30, 2, 5), 7, np.int32)
    sets = {
        "large": make_set(tmp_path, "large", 700),
        "small": make_set(tmp_path, "small", 30, 1000, answer_patterns=patterns),
        "other": make_set(tmp_path, "other", 50, 2000),
    }
    return Mixture(sets, [650, 300, 50])


def test_of_every_thousand_questions_each_set_has_its_share(mixture):
    """Whatever the batch size, and without looking at the steps before."""
    rows = np.concatenate(
        [mixture.step_rows(step, batch_size=16, seed=3) for step in range(250)]
    )
    for cycle in rows.reshape(-1, CYCLE):
        counts = collections.Counter(np.searchsorted([700, 730], cycle, side="right"))
        assert counts == {0: 650, 1: 300, 2: 50}
    at_once = mixture.step_rows(0, batch_size=4000, seed=3)
    np.testing.assert_array_equal(rows, at_once)
    # The order within a thousand is not that of another thousand, or seed.
    kinds = (at_once < 700).reshape(-1, CYCLE)
    assert (kinds[0] != kinds[1]).any()
    assert (mixture.step_rows(0, batch_size=4000, seed=4) != rows).any()


def test_each_set_is_visited_in_epochs_of_its_own(mixture):
    rows = mixture.step_rows(0, batch_size=4000, seed=0)
    for first, size in ((0, 700), (700, 30), (730, 50)):
        own = rows[(rows >= first) & (rows < first + size)] - first
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


def test_rows_are_those_of_the_sets_and_what_one_lacks_is_zero(mixture):
    assert len(mixture) == 780
    batch = mixture.batch(np.array([729, 0, 730, 699, 700]))
    expected = [1029, 0, 2000, 699, 1000]
    np.testing.assert_array_equal(batch["question_index"], expected)
    np.testing.assert_array_equal(batch["question_ids"][:, 1], expected)
    with_patterns = batch["answer_patterns"].any(axis=(1, 2))
    np.testing.assert_array_equal(with_patterns, [True, False, False, False, True])
    np.testing.assert_array_equal(
        mixture.features["question_index"][695:703],
        [*range(695, 700), *range(1000, 1003)],
    )


def test_a_narrower_set_is_padded_and_one_with_other_features_refused(tmp_path):
    narrow = make_set(tmp_path, "narrow", 4)
    wide = make_set(tmp_path, "wide", 4, question_ids=np.full((4, 5), 9, np.int32))
    mixed = Mixture({"narrow": narrow, "wide": wide}, [500, 500])
    found = mixed.batch(np.array([2, 5]))["question_ids"]
    np.testing.assert_array_equal(found, [[2, 2, 2, 0, 0], [9] * 5])
    other = make_set(tmp_path, "other", 4, answer_texts=np.ones((4, 1), np.int32))
    with refused("features of narrow .* in other"):
        Mixture({"narrow": narrow, "other": other}, [500, 500])
