"""What the reader reads and predicts in a warm start, against loops over lists."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.training.reader_documents import (
    choose_retrieved,
    draw_kinds,
    masked_answers,
)
from realm_jax.training.warm_start_loss import draw_unmasked
from realm_jax.types import PretrainBatch

PAD, UNK, CLS, SEP, MASK = range(5)
QUERY, JOINED = 9, 13
CONTINUES = 30
# The joined length; and the one wordpiece that continues a word.
REST = JOINED, np.arange(100) == CONTINUES


def test_kinds_are_drawn_in_their_shares():
    for shares in ((0.5, 0.2, 0.3), (0.0, 0.25, 0.75), (0.6, 0.4 - 1e-7, 0.0)):
        kinds = [draw_kinds(shares, 3, step, 1000) for step in range(30)]
        found = np.bincount(np.concatenate(kinds), minlength=3) / 30_000
        # Three standard deviations.
        np.testing.assert_allclose(found, shares, atol=0.009)
        assert all(found[place] == 0 for place in range(3) if not shares[place])


def test_the_kind_of_a_row_depends_on_nothing_but_seed_step_and_row():
    shares = (0.4, 0.3, 0.3)
    whole = draw_kinds(shares, 5, 7, 64)
    np.testing.assert_array_equal(draw_kinds(shares, 5, 7, 64), whole)
    np.testing.assert_array_equal(draw_kinds(shares, 5, 7, 16), whole[:16])
    for seed, step in ((5, 8), (6, 7), (7, 5)):
        assert (draw_kinds(shares, seed, step, 64) != whole).any()


class Bodies:
    """Bodies in a list, padded one at a time."""

    def __init__(self, bodies):
        self.bodies = bodies

    def body_ids(self, block_ids, length):
        array = np.zeros((*block_ids.shape, length), np.int32)
        for place in np.ndindex(block_ids.shape):
            if (block := block_ids[place]) >= 0:
                body = self.bodies[block][:length]
                array[place][: len(body)] = body
        return array


def masked(sentence, span, source):
    """One sentence in which a run of wordpieces is masked."""
    query = np.zeros((1, QUERY), np.int32)
    query[0, : len(sentence) + 2] = [CLS, *sentence, SEP]
    positions, ids = np.zeros((2, 1, 3), np.int32)
    weights = np.zeros((1, 3), np.float32)
    for slot, place in enumerate(span):
        positions[0, slot], ids[0, slot] = place + 1, sentence[place]
        weights[0, slot] = 1.0
        query[0, place + 1] = MASK
    return PretrainBatch(query, positions, ids, weights, np.array([source], np.int32))


def runs(pieces, size):
    return [tuple(pieces[i : i + size]) for i in range(len(pieces) - size + 1)]


def slowly(bodies, neighbours, sentence, span, source, joined=JOINED):
    """Returns (block, whether it holds the answer), by loops."""
    size = min(4, len(sentence))
    wanted = set(runs(sentence, size))
    answer = tuple(sentence[place] for place in span)
    seen = joined - 1 - (len(sentence) + 2)
    useful, usable = [], []
    for block in neighbours:
        if block in (-1, source):
            continue
        repeated = wanted & set(runs(bodies[block][:joined], size))
        if len(repeated) / len(wanted) >= 0.8:
            continue
        usable.append(block)
        if answer in runs(bodies[block][:seen], len(answer)):
            useful.append(block)
    return [*useful, *usable, -1][0], bool(useful)


pieces = st.sampled_from([5, 6, 7])


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    bodies=st.lists(st.lists(pieces, max_size=16), min_size=4, max_size=4),
    neighbours=st.permutations([-1, 0, 1, 2, 3]),
    sentence=st.lists(pieces, min_size=1, max_size=7),
    start=st.integers(0, 6),
    size=st.integers(1, 3),
    source=st.integers(-1, 3),
)
def test_retrieved_documents_equal_those_of_a_loop(
    bodies, neighbours, sentence, start, size, source
):
    start = min(start, len(sentence) - 1)
    span = range(start, min(start + size, len(sentence)))
    block, found = choose_retrieved(
        Bodies(bodies), np.array([neighbours]), masked(sentence, span, source), *REST
    )
    expected = slowly(bodies, neighbours, sentence, span, source)
    assert (int(block[0]), bool(found[0])) == expected


@pytest.mark.parametrize(
    ("sentence", "span", "bodies", "expected"),
    [
        # Of spans that are masked together the drawn one, which is first.
        ([10, 11, 12, 13, 14], [3, 0, 1], [[10, 11, 20], [13, 20, 21]], (1, True)),
        # Without a scored mask nothing is an answer.
        ([10, 11], [], [[20], [21]], (0, False)),
        # Nor is the beginning of a word.
        ([10, 11, 12, 13], [1, 2], [[20, 11, 12, CONTINUES], [20, 11, 12]], (1, True)),
    ],
)
def test_what_is_an_answer(sentence, span, bodies, expected):
    batch = masked(sentence, span, source=-1)
    block, found = choose_retrieved(Bodies(bodies), np.array([[0, 1]]), batch, *REST)
    assert (block[0], found[0]) == expected


@hypothesis.given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    )
)
def test_masked_answers_are_the_runs_of_positions(rows):
    """Gaps between positions of 1 or 2, as drawn; against a loop over masks."""
    size = 6
    positions, ids = np.zeros((2, len(rows), size), np.int32)
    weights = np.zeros((len(rows), size), np.float32)
    expected = np.zeros((len(rows), size, size), np.int32)
    for row, masks in enumerate(rows):
        run, place, position = -1, 0, 0
        for slot, (piece, gap) in enumerate(masks):
            position += 2 if gap else 1
            if gap or slot == 0:
                run, place = run + 1, 0
            positions[row, slot], ids[row, slot] = position, piece
            weights[row, slot] = 1.0
            expected[row, run, place] = piece
            place += 1
    queries = np.zeros((len(rows), QUERY), np.int32)
    batch = PretrainBatch(queries, positions, ids, weights, np.zeros(len(rows)))
    np.testing.assert_array_equal(masked_answers(batch), expected)


VOCABULARY = WordPiece([*SPECIAL_PIECES, *"abcdefghijkl"])
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
    queries, weights = np.zeros((8, 7), np.int32), weights.astype(np.float32)
    return PretrainBatch(queries, zeros, zeros, weights, zeros[:, 0])


EVERY_ROW = np.arange(8)


def draw(batch, joined, step=0, seed=1, rows=EVERY_ROW):
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
    held = jax.tree.map(lambda array: array[rows], batch)
    part = draw(held, joined[rows], step=3, rows=rows)
    for name in ("weights", "positions", "ids"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])
    # And others in another step, or with another seed.
    for step, seed in ((4, 1), (3, 2)):
        assert (draw(batch, joined, step, seed).ids != whole.ids).any()
