"""A sentence's own block without the sentence, against lists."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from realm_jax.index.own_blocks import own_candidates, without_sentence
from tests.index.test_candidates import CLS, MASK, SEP, ListStore, masked_sentence

SENTENCE = [10, 11, 12, 13, 14]
QUERY = [CLS, 10, MASK, MASK, 13, 14, SEP]


def own(store, source_block, joined_length=24):
    batch = masked_sentence(SENTENCE, masked=[1, 2], source_block=source_block)
    return own_candidates(store, batch, document_length=16, joined_length=joined_length)


def test_the_reader_gets_the_block_without_the_sentence_the_retriever_all_of_it():
    body = [50, *SENTENCE, 51, 52]
    found = own(ListStore([[60], body]), source_block=1)
    assert found.valid.tolist() == [[True]]
    assert found.block_ids.tolist() == [[1]]
    assert found.joined_ids[0, 0].tolist()[:12] == [*QUERY, 50, 51, 52, SEP, 0]
    assert found.joined_segment_ids[0, 0].tolist()[:12] == [0] * 7 + [1] * 4 + [0]
    assert found.document_ids[0, 0].tolist()[:11] == [CLS, SEP, *body, SEP]


def test_what_is_left_is_cut_to_the_readers_length():
    found = own(ListStore([[*SENTENCE, *range(50, 90)]]), 0, joined_length=13)
    assert found.joined_ids[0, 0].tolist() == [*QUERY, 50, 51, 52, 53, 54, SEP]
    assert found.joined_segment_ids[0, 0].tolist() == [0] * 7 + [1] * 6


def test_an_own_block_that_cannot_be_read_is_an_empty_slot():
    store = ListStore([[*SENTENCE], [50, 51]])
    nowhere, alone, elsewhere = (own(store, block) for block in (-1, 0, 1))
    for found in (nowhere, alone, elsewhere):
        assert found.valid.tolist() == [[False]]
        assert found.block_ids.tolist() == [[-1]]


def test_a_batch_is_its_rows():
    store = ListStore([[50, *SENTENCE, 51, 52], [*SENTENCE, 60], [70]])
    sources = (1, -1, 0, 2, 1)
    rows = [masked_sentence(SENTENCE, [1, 2], source_block=block) for block in sources]
    lengths = {"document_length": 16, "joined_length": 24}
    whole = own_candidates(
        store, jax.tree.map(lambda *a: np.concatenate(a), *rows), **lengths
    )
    parts = [own_candidates(store, row, **lengths) for row in rows]
    for name, array in vars(whole).items():
        expected = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(array, expected, err_msg=name)


def test_wordpieces_that_are_not_known_are_equal_to_any():
    body, sentence = np.array([1, 2, 3, 4, 5]), np.array([2, -1, 4])
    assert without_sentence(body, sentence).tolist() == [1, 5]


pieces = st.lists(st.integers(1, 3), max_size=9)


@hypothesis.given(before=pieces, sentence=pieces, after=pieces)
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
