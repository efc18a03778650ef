"""Labels of blocks and spans, against the texts of a small corpus."""

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.answer_spans import answer_starts
from realm_jax.data.blocks import BlockText
from realm_jax.data.questions import Question, question_examples
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.data.words import continues_word, piece_edges
from realm_jax.errors import BadInputError
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.candidates import question_candidates
from realm_jax.metrics.answers import has_answer, has_pattern, is_right
from realm_jax.types import Neighbours, QuestionBatch
from tests.index.memory_store import MemoryStore

MAX_SPAN = 4
MAX_ANSWER = 60
QUERY_LENGTH = 16


def batch_of(corpus, *asked):
    """A batch of (answers, are they patterns?)."""
    questions = [
        Question(
            f"q{i}", i, "When was it?", answers, "train", answers_are_patterns=regex
        )
        for i, (answers, regex) in enumerate(asked)
    ]
    arrays = question_examples(
        questions,
        corpus.vocabulary,
        query_length=QUERY_LENGTH,
        max_answer_length=MAX_ANSWER,
        max_pattern_length=200,
    )
    return QuestionBatch(**arrays)


def candidates_of(corpus, questions, block_ids, joined_length=64):
    ids = np.array(block_ids, np.int32)
    return question_candidates(
        corpus,
        Neighbours(ids=ids, scores=np.zeros(ids.shape, np.float32)),
        questions.question_ids,
        num_candidates=ids.shape[1],
        document_length=32,
        joined_length=joined_length,
    )


def everything(corpus, rows):
    return np.tile(np.arange(corpus.num_blocks, dtype=np.int32), (rows, 1))


def test_blocks_are_labelled_one_by_one(corpus):
    """An answer neither extends into the next block nor beyond the chunk length."""
    bodies = [row[row != 0] for row in corpus.body_ids(everything(corpus, 1)[0], 99)]
    answer_ids = np.zeros((4, 2, 4), np.int32)
    answer_ids[0, 1, :4] = [*bodies[0][-2:], *bodies[1][:2]]  # Over a border.
    answer_ids[1, 0, :3], answer_ids[1, 1, :1] = bodies[3][-3:], bodies[5][0]
    answer_ids[2, 0, :2] = bodies[2][-2:]
    questions = batch_of(corpus, *[(("Hult",), False)] * 4)
    questions = questions.replace(answer_ids=answer_ids, answer_texts=None)
    continues = continues_word(corpus.vocabulary.pieces)
    block_ids = np.array([[1, 0, 2, -1, 3], [3, -1, 5, 0, 3], [2, 2, 1, 0, 4], [0] * 5])
    for length in (40, 7):
        store = CountingStore(corpus)
        store.chunk_length = length
        starts = answer_starts(
            corpus.body_ids(block_ids, length), answer_ids, continues
        )
        found = AnswerLabels(store, MAX_SPAN).blocks(questions, block_ids)
        np.testing.assert_array_equal(found, starts.any(axis=(2, 3)))
        assert found[1].any()
        assert found[2].any() == (length == 40)
    assert not found[[0, 3]].any()


def test_patterns_are_labelled_in_the_text(corpus):
    cases = (
        ((r"153[0-2]", "feb"), True, ("1531", "February")),
        (("Hult",), False, ("Hult",)),
        # "then" holds no "hen", and "1600" no "16".
        ((r"\b16\b|hen",), True, ("16 February",)),
        (("élan|čudo",), True, ("Élan", "Čudo")),
        (("(Hult", "Karel"), True, ("Karel",)),  # A broken pattern never matches.
    )
    questions = batch_of(corpus, *((asked, regex) for asked, regex, _ in cases))
    labels = AnswerLabels(corpus, MAX_SPAN)
    block_ids = everything(corpus, len(cases))
    blocks = labels.blocks(questions, block_ids)
    bodies = [corpus.text(block).body for block in block_ids[0]]
    for found, (_, _, held) in zip(blocks, cases, strict=True):
        assert found.tolist() == [any(part in body for part in held) for body in bodies]
    spans = labels.spans(questions, candidates_of(corpus, questions, block_ids))
    np.testing.assert_array_equal(spans.any(axis=-1), blocks)


def test_spans_end_where_the_joined_row_does(corpus):
    questions = batch_of(corpus, (("down",), True))
    block_ids = everything(corpus, 1)
    labels = AnswerLabels(corpus, MAX_SPAN)

    def spans_within(joined_length):
        candidates = candidates_of(corpus, questions, block_ids, joined_length)
        spans = labels.spans(questions, candidates)
        return spans.reshape(corpus.num_blocks, joined_length, MAX_SPAN)

    whole = spans_within(64)
    for joined_length in range(QUERY_LENGTH + 1, 64, 5):
        spans = spans_within(joined_length)
        first, width = np.nonzero(spans.any(axis=0))
        assert (first >= np.count_nonzero(questions.question_ids)).all()
        # The last place is taken by [SEP].
        assert (first + width < joined_length - 1).all()
        same = slice(joined_length - 1 - MAX_SPAN)
        np.testing.assert_array_equal(spans[:, same], whole[:, same])


def test_empty_slots_and_the_question_itself_have_no_answer(corpus):
    questions = batch_of(corpus, ((".*",), True), (("Hult",), False))
    block_ids = np.array([[3, -1, -1], [-1, -1, -1]])
    labels = AnswerLabels(corpus, MAX_SPAN)
    expected = [[True, False, False], [False, False, False]]
    assert labels.blocks(questions, block_ids).tolist() == expected
    spans = labels.spans(questions, candidates_of(corpus, questions, block_ids))
    assert spans.any(axis=-1).tolist() == expected
    questions = batch_of(corpus, (("when", "it"), True))
    candidates = candidates_of(corpus, questions, everything(corpus, 1))
    spans = labels.spans(questions, candidates)
    spans = spans.reshape(-1, candidates.joined_ids.shape[-1], MAX_SPAN)
    assert spans.any()
    assert not spans[~candidates.joined_segment_ids[0].astype(bool)].any()


class CountingStore:
    """A store that tells which texts were read."""

    def __init__(self, store):
        self.vocabulary = store.vocabulary
        self.chunk_length = store.chunk_length
        self.consecutive_bodies = store.consecutive_bodies
        self.read = []
        self._texts = store.texts

    def texts(self, block_ids):
        self.read += np.asarray(block_ids).tolist()
        return self._texts(block_ids)


def test_texts_are_read_only_of_what_has_the_wordpieces_and_none_twice(corpus):
    store = CountingStore(corpus)
    labels = AnswerLabels(store, MAX_SPAN)
    exact = batch_of(corpus, (("Hult",), False))
    without = QuestionBatch(exact.question_ids, exact.answer_ids, exact.question_index)
    for questions, read in ((without, []), (exact, [0])):
        assert labels.blocks(questions, [[0, 1]]).tolist() == [[True, False]]
        labels.spans(questions, candidates_of(corpus, questions, [[1, 5]]))
        assert store.read == read
    store.read.clear()
    # Of blocks with an answer that are read, texts decide where words end.
    labels.spans(exact, candidates_of(corpus, exact, [[0, 1]]))
    assert store.read == [0]
    store.read.clear()
    asked = batch_of(corpus, (("Hult",), True))
    for block_ids in ([[4, 0, 2]], [[0, 3, 4]]):
        expected = AnswerLabels(corpus, MAX_SPAN).blocks(asked, block_ids)
        np.testing.assert_array_equal(labels.blocks(asked, block_ids), expected)
    assert sorted(store.read) == [0, 2, 3, 4]


def test_the_questions_asked_last_are_those_that_are_remembered(corpus):
    store = CountingStore(corpus)
    labels = AnswerLabels(store, MAX_SPAN, most_cached=4)
    hult, karel, town = (batch_of(corpus, ((p,), True)) for p in ("Hult", "Kar", "An"))

    def read(questions):
        before = len(store.read)
        expected = AnswerLabels(corpus, MAX_SPAN).blocks(questions, [[0, 1]])
        np.testing.assert_array_equal(labels.blocks(questions, [[0, 1]]), expected)
        return store.read[before:]

    assert [read(q) for q in (hult, karel, hult)] == [[0, 1], [0, 1], []]
    assert read(town) == [0, 1]  # In the place of `karel`.
    assert [read(q) for q in (hult, karel)] == [[], [0, 1]]
    assert labels.blocks(town, [[0, 1, 2, 3, 4]]).shape == (1, 5)
    assert read(hult) == [0, 1]  # One question may have more than there is room for.


def test_a_text_with_other_wordpieces_is_refused(corpus):
    class OtherTexts(CountingStore):
        def texts(self, block_ids):
            return [t._replace(body=t.body[5:]) for t in super().texts(block_ids)]

    questions = batch_of(corpus, (("Hult",), True))
    candidates = candidates_of(corpus, questions, [[2, 3]])
    with pytest.raises(BadInputError, match="text of block 2 to have the wordpieces"):
        AnswerLabels(OtherTexts(corpus), MAX_SPAN).spans(questions, candidates)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SPELLING = WordPiece(
    [*SPECIAL_PIECES, "paul", "##ten", *LETTERS, *"'-,.$東京"]
    + [f"##{letter}" for letter in LETTERS]
)
PARTS = ["Jean", "Paul", "O", "Neill", "1", "234", "ten", "writ", "U", "S", "東京"]
MARKS = ["", " ", "-", "'", ",", ", ", ".", ". ", " $", "\n"]


class OneBlock(MemoryStore):
    """A store of one block that no length cuts."""

    chunk_length = 400

    def __init__(self, body):
        super().__init__([SPELLING.encode(body).ids], vocabulary=SPELLING)
        self.body = BlockText("", body, "", [], [])

    def texts(self, block_ids):
        return [self.body for _ in block_ids]


def labelled(body, answer, are_patterns):
    """Whether the block is positive, and the first and last pieces of right spans."""
    store, block_ids = OneBlock(body), np.array([[0]])
    questions = batch_of(store, ((answer,), are_patterns))
    labels = AnswerLabels(store, MAX_ANSWER)
    read = candidates_of(store, questions, block_ids, joined_length=100)
    first, width = np.nonzero(labels.spans(questions, read).reshape(100, MAX_ANSWER))
    first -= np.count_nonzero(questions.question_ids)
    right = set(zip(first.tolist(), (first + width).tolist(), strict=True))
    return labels.blocks(questions, block_ids).item(), right


bodies = st.lists(
    st.tuples(st.sampled_from(PARTS), st.sampled_from(MARKS)), min_size=1, max_size=7
).map(lambda parts: "".join(part + mark for part, mark in parts))
answers = st.lists(st.sampled_from(PARTS), min_size=1, max_size=2).flatmap(
    lambda parts: st.sampled_from(MARKS).map(lambda mark: mark.join(parts).strip())
)


@given(bodies, answers)
def test_right_spans_are_those_that_answering_can_give(body, answer):
    block, right = labelled(body, answer, are_patterns=False)
    encoding, wanted = SPELLING.encode(body), SPELLING.encode(answer).ids
    edges = piece_edges(body, encoding.offsets)
    size = len(wanted)
    assert right == {
        (first, first + size - 1)
        for first in range(len(encoding) - size + 1)
        if (encoding.ids[first : first + size] == wanted).all()
        and edges.begins[first]
        and edges.ends[first + size - 1]
    }
    for first, last in right:
        text = body[encoding.offsets[first, 0] : encoding.offsets[last, 1]]
        assert is_right(text, [answer], are_patterns=False)
    if right:
        assert block
        # Recall takes Chinese without spaces for one word.
        assume("東" not in body)
        assert has_answer(body, [answer])


@given(bodies, answers)
def test_a_pattern_is_found_labelled_and_answered_by_one_rule(body, answer):
    """Recall, labels of blocks and of spans; what ends inside a word is its stem."""
    assume(not answer.endswith((".", "-", "'", ",", "$")))
    pattern = re.escape(answer)
    block, right = labelled(body, pattern, are_patterns=True)
    assert block == bool(right) == has_pattern(body, [pattern])
    edges = piece_edges(body, SPELLING.encode(body).offsets)
    for first, last in right:
        assert edges.begins[first]
        assert edges.ends[last]
        text = body[edges.offsets[first, 0] : edges.offsets[last, 1]]
        assert is_right(text, [pattern], are_patterns=True)


def test_a_part_of_a_word_makes_a_block_right_but_no_span():
    """And accents and vowel signs count, even where the wordpieces lack them."""
    for body, answer, is_held, is_span in (
        ("Jean-Paul sang", "Paul", True, False),
        ("Jean-Paul sang", "Jean-Paul", True, True),
        ("O'Neill sang", "Neill", True, False),
        ("1,234 ships", "234", True, False),
        ("Paul's ship", "Paul", True, True),
        ("Paul, tén", "te\u0301n", True, True),
        ("Paul, te\u0301n", "tén", True, True),
        ("Pa\u00adul sang", "Paul", True, True),
        ("Paul sang", "Pa\u200bul", True, True),
        ("Paul, tén", "ten", False, False),
        ("Paul, ten", "tén", False, False),
        ("Paul, माला", "माला", True, True),
        ("Paul, माला", "मेला", False, False),  # Both are [UNK] here.
    ):
        block, right = labelled(body, answer, are_patterns=False)
        found = (block, has_answer(body, [answer]), bool(right))
        assert found == (is_held, is_held, is_span), (body, answer)
