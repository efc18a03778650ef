"""Candidates against sets and loops."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from realm_jax.index import candidates
from realm_jax.index.candidates import own_candidates, without_sentence
from realm_jax.types import Neighbours, PretrainBatch
from tests.index.memory_store import MemoryStore
from tests.refused import refused

CLS, SEP, MASK = 2, 3, 4


def masked_sentence(sentence, masked, source_block=-1, query_length=12, max_masks=3):
    """One example in which the pieces at `masked` of the sentence are masked."""
    query = np.zeros((1, query_length), np.int32)
    query[0, : len(sentence) + 2] = [CLS, *sentence, SEP]
    positions = np.zeros((1, max_masks), np.int32)
    positions[0, : len(masked)] = [1 + place for place in masked]
    weights = (positions > 0).astype(np.float32)
    ids = np.where(weights > 0, np.take_along_axis(query, positions, 1), 0)
    query[0, positions[0, : len(masked)]] = MASK
    return PretrainBatch(
        query, positions, ids, weights, np.array([source_block], np.int32)
    )


def build(store, ids, batch, num_candidates, joined_length=24):
    ids = np.array([ids], np.int32)
    return candidates.pretrain_candidates(
        store,
        Neighbours(ids=ids, scores=np.zeros(ids.shape, np.float32)),
        batch,
        num_candidates=num_candidates,
        document_length=16,
        joined_length=joined_length,
    )


def test_a_span_longer_than_what_is_scored_hides_no_duplicate():
    sentence = list(range(10, 28))
    batch = masked_sentence(sentence, range(2, 16), query_length=24, max_masks=14)
    # Ten are scored; the other four stay unknown.
    batch.mask_weights[:, 10:] = 0
    batch.mask_positions[:, 10:] = 0
    batch.mask_ids[:, 10:] = 0
    restored = candidates.restore_queries(batch)[0]
    assert restored[:17].tolist() == [CLS, *sentence[:12], *[-1] * 4]
    assert batch.query_ids[0, 3] == MASK
    store = MemoryStore([[50, 51], [*sentence, 60], list(range(12, 22))])
    found = build(store, [1, 2, 0], batch, num_candidates=4, joined_length=40)
    assert found.block_ids.tolist() == [[-1, 2, 0, -1]]
    assert found.valid.tolist() == [[True, True, True, False]]


def test_trivial_blocks_leave_and_the_null_document_stands_first():
    sentence = [10, 11, 12, 13, 14, 15]
    body = [10, 11, 12, 99, 13, 14, 15]
    store = MemoryStore(
        [
            [50, 51, 52, 53],  # 0: something else
            [20, *sentence, 21],  # 1: repeats the sentence
            [60, 61, 62],  # 2: the source, as the id says
            body,  # 3: shares words, not runs
            [70, 71],  # 4
        ]
    )
    batch = masked_sentence(sentence, masked=[2, 3], source_block=2)
    found = build(store, [1, 3, 2, 0, 4], batch, num_candidates=3)
    np.testing.assert_array_equal(found.block_ids, [[-1, 3, 0]])
    query = [CLS, 10, 11, MASK, MASK, 14, 15, SEP]
    np.testing.assert_array_equal(found.joined_ids[0, 0, :9], [*query, SEP])
    np.testing.assert_array_equal(found.joined_ids[0, 1, :16], [*query, *body, SEP])
    np.testing.assert_array_equal(found.document_ids[0, 1, :10], [CLS, SEP, *body, SEP])
    assert found.joined_segment_ids[0, 1, :16].tolist() == [0] * 8 + [1] * 8


def test_null_source_does_not_make_the_null_block_trivial():
    store = MemoryStore([[50, 51]])
    trivial = candidates.find_trivial(
        store, np.array([[-1, 0]]), np.array([[CLS, SEP]]), np.array([-1]), 8
    )
    assert not trivial.any()


def test_questions_keep_blocks_that_repeat_them():
    store = MemoryStore([[10, 11, 12, 13], [20, 21]])
    neighbours = Neighbours(ids=np.array([[0, 1]]), scores=np.zeros((1, 2)))
    found = candidates.question_candidates(
        store,
        neighbours,
        np.array([[CLS, 10, 11, 12, 13, SEP]]),
        num_candidates=2,
        document_length=8,
        joined_length=16,
    )
    np.testing.assert_array_equal(found.block_ids, [[0, 1]])


def slow_share(sentence, body):
    size = min(candidates.GRAM_SIZE, len(sentence))
    if not sentence:
        return 0.0
    wanted = {tuple(sentence[i : i + size]) for i in range(len(sentence) - size + 1)}
    present = {tuple(body[i : i + size]) for i in range(len(body) - size + 1)}
    return len(wanted & present) / len(wanted)


pieces = st.lists(st.sampled_from([5, 6, 7, 119_546]), max_size=12)


@hypothesis.given(sentence=pieces, bodies=st.lists(pieces, min_size=1, max_size=4))
def test_share_of_grams_equals_sets_of_tuples(sentence, bodies):
    length = max(len(body) for body in bodies)
    padded = MemoryStore(bodies).body_ids(np.arange(len(bodies)), length)
    share = candidates.share_of_grams(np.array(sentence, np.int32), padded)
    expected = [slow_share(sentence, body) for body in bodies]
    np.testing.assert_allclose(share, expected, atol=1e-12)


@hypothesis.given(
    rows=st.lists(st.lists(st.integers(-1, 9), min_size=5, max_size=5), min_size=1),
    drop=st.lists(st.booleans(), min_size=5, max_size=5),
    num_candidates=st.integers(2, 8),
    include_null=st.booleans(),
)
def test_choose_blocks_equals_a_filter(rows, drop, num_candidates, include_null):
    chosen, places = candidates.choose_blocks(
        np.array(rows), np.array([drop] * len(rows)), num_candidates, include_null
    )
    np.testing.assert_array_equal(places >= 0, chosen >= 0)
    at_places = np.take_along_axis(np.array(rows), np.maximum(places, 0), axis=1)
    np.testing.assert_array_equal(np.where(places >= 0, at_places, -1), chosen)
    for row, got in zip(rows, chosen, strict=True):
        kept = [b for b, gone in zip(row, drop, strict=True) if b >= 0 and not gone]
        expected = ([-1] if include_null else []) + kept + [-1] * num_candidates
        assert got.tolist() == expected[:num_candidates]


def test_no_room_for_a_document_is_bad_input():
    batch = masked_sentence([10, 11], masked=[0])
    with refused(r"at least 2 candidates.*got 1"):
        build(MemoryStore([[5]]), [0], batch, num_candidates=1)


# A sentence's own block without the sentence.
SENTENCE = [10, 11, 12, 13, 14]
QUERY = [CLS, 10, MASK, MASK, 13, 14, SEP]


def own(store, source_block, joined_length=24):
    batch = masked_sentence(SENTENCE, masked=[1, 2], source_block=source_block)
    return own_candidates(store, batch, document_length=16, joined_length=joined_length)


def test_the_reader_gets_the_block_without_the_sentence_the_retriever_all_of_it():
    body = [50, *SENTENCE, 51, 52]
    found = own(MemoryStore([[60], body]), source_block=1)
    assert found.valid.tolist() == [[True]]
    assert found.block_ids.tolist() == [[1]]
    assert found.joined_ids[0, 0].tolist()[:12] == [*QUERY, 50, 51, 52, SEP, 0]
    assert found.joined_segment_ids[0, 0].tolist()[:12] == [0] * 7 + [1] * 4 + [0]
    assert found.document_ids[0, 0].tolist()[:11] == [CLS, SEP, *body, SEP]


def test_what_is_left_is_cut_to_the_readers_length():
    found = own(MemoryStore([[*SENTENCE, *range(50, 90)]]), 0, joined_length=13)
    assert found.joined_ids[0, 0].tolist() == [*QUERY, 50, 51, 52, 53, 54, SEP]
    assert found.joined_segment_ids[0, 0].tolist() == [0] * 7 + [1] * 6


def test_an_own_block_that_cannot_be_read_is_an_empty_slot():
    store = MemoryStore([[*SENTENCE], [50, 51]])
    for source_block in (-1, 0, 1):  # None, nothing but the sentence, another text.
        found = own(store, source_block)
        assert found.valid.tolist() == [[False]]
        assert found.block_ids.tolist() == [[-1]]


def test_a_batch_is_its_rows():
    store = MemoryStore([[50, *SENTENCE, 51, 52], [*SENTENCE, 60], [70]])
    sources = (1, -1, 0, 2, 1)
    rows = [masked_sentence(SENTENCE, [1, 2], source_block=block) for block in sources]
    lengths = {"document_length": 16, "joined_length": 24}
    batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
    whole = own_candidates(store, batch, **lengths)
    parts = [own_candidates(store, row, **lengths) for row in rows]
    for name, array in vars(whole).items():
        expected = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(array, expected, err_msg=name)


def test_wordpieces_that_are_not_known_are_equal_to_any():
    body, sentence = np.array([1, 2, 3, 4, 5]), np.array([2, -1, 4])
    assert without_sentence(body, sentence).tolist() == [1, 5]


few = st.lists(st.integers(1, 3), max_size=9)


@hypothesis.given(before=few, sentence=few, after=few)
def test_no_run_of_the_sentence_is_left(before, sentence, after):
    body = np.array([*before, *sentence, *after], int)
    rest = without_sentence(body, np.array(sentence, int)).tolist()
    if not sentence:
        assert rest == []
        return
    kept = [True] * len(body)
    for start in range(len(body) - len(sentence) + 1):
        if body[start : start + len(sentence)].tolist() == sentence:
            kept[start : start + len(sentence)] = [False] * len(sentence)
    assert rest == [piece for piece, is_kept in zip(body, kept, strict=True) if is_kept]
