"""What the reader predicts without a mask, against a loop over lists."""

import numpy as np
import pytest

from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.training.unmasked_targets import draw_unmasked
from realm_jax.types import PretrainBatch

VOCABULARY = WordPiece([*SPECIAL_PIECES, *"abcdefghijkl"])
PAD, UNK, CLS, SEP, MASK = range(5)
SLOTS = 6


@pytest.fixture(scope="module")
def joined():
    """Sentences with 0 to 6 masks and documents; the last row has nothing to draw."""
    random = np.random.default_rng(0)
    rows = random.integers(5, VOCABULARY.size, (8, 14)).astype(np.int32)
    rows[:, 0], rows[:, 6], rows[:, 12] = CLS, SEP, SEP
    rows[:, 13] = PAD
    rows[2, 8] = UNK
    for row in range(7):
        rows[row, 1 : min(row, 5) + 1] = MASK
    rows[7] = [CLS, MASK, SEP] + [PAD] * 11
    return rows


@pytest.fixture(scope="module")
def batch():
    weights = np.arange(SLOTS) < np.array([0, 1, 2, 3, 4, 5, 6, 1])[:, None]
    zeros = np.zeros((8, SLOTS), np.int32)
    return PretrainBatch(
        np.zeros((8, 7), np.int32),
        zeros,
        zeros,
        weights.astype(np.float32),
        zeros[:, 0],
    )


def draw(batch, joined, step=0, seed=1, rows=None):
    rows = np.arange(len(joined)) if rows is None else rows
    return draw_unmasked(batch, joined, VOCABULARY, seed=seed, step=step, rows=rows)


def test_they_are_wordpieces_of_the_row_in_the_slots_that_masks_leave(batch, joined):
    drawn = draw(batch, joined)
    for row in range(8):
        free = SLOTS - int(batch.mask_weights[row].sum()) if row < 7 else 0
        used = np.flatnonzero(drawn.weights[row])
        assert len(used) == free
        assert not batch.mask_weights[row, used].any()
        for slot in used:
            piece = joined[row, drawn.positions[row, slot]]
            assert drawn.ids[row, slot] == piece
            assert piece not in (PAD, UNK, CLS, SEP, MASK)
    assert set(np.unique(drawn.weights)) == {0.0, 1.0}


def test_every_wordpiece_is_as_likely(batch, joined):
    counts = np.zeros(14)
    for step in range(2000):
        drawn = draw(batch, joined, step)
        counts += np.bincount(drawn.positions[0], minlength=14)
    can_be = np.flatnonzero(joined[0] > MASK)
    assert set(np.flatnonzero(counts)) == set(can_be)
    share = counts[can_be] / counts.sum()
    # Four standard deviations of 12,000 draws.
    np.testing.assert_allclose(share, 1 / len(can_be), atol=0.0105)


def test_a_process_draws_the_rows_it_holds_as_one_process_would(batch, joined):
    whole = draw(batch, joined, step=3)
    rows = np.array([1, 4, 6])
    held = PretrainBatch(
        batch.query_ids[rows],
        batch.mask_positions[rows],
        batch.mask_ids[rows],
        batch.mask_weights[rows],
        batch.source_block[rows],
    )
    part = draw(held, joined[rows], step=3, rows=rows)
    for name in ("weights", "positions", "ids"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])


def test_another_step_or_seed_draws_others(batch, joined):
    first = draw(batch, joined, step=3, seed=1)
    for step, seed in ((4, 1), (3, 2)):
        assert (draw(batch, joined, step, seed).ids != first.ids).any()
