"""Labels of blocks and spans, against the texts of a small corpus."""

import re
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.answer_spans import answer_spans, answer_starts
from realm_jax.data.documents import Document
from realm_jax.data.questions import Question, question_examples
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.data.words import continues_word, piece_edges
from realm_jax.errors import BadInputError
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.candidates import question_candidates
from realm_jax.metrics.answers import has_answer, has_pattern, is_right
from realm_jax.types import Neighbours, QuestionBatch
from tests.corpus_builder import build_corpus

MAX_SPAN = 4
QUERY_LENGTH = 16
TOWNS = ("Ansk", "Brel", "Čudo", "Dorm", "Écluse", "서울")
FLAGS = re.IGNORECASE | re.MULTILINE


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """An article a town, in blocks of one or two sentences."""
    folder = tmp_path_factory.mktemp("labels")
    documents = [
        Document(
            title=town,
            text=(
                f"{town} was founded in {1191 + i} by Karel. It lies on the Hult.\n"
                f"Its {10 + i} mills burnt down in February {1500 + i}, as was written "
                f"down. The {town} of today is known for its bells."
            ),
            source_id=town,
        )
        for i, town in enumerate(TOWNS)
    ]
    vocabulary = WordPiece.train(
        [document.text for document in documents], 250, folder / "vocab.txt"
    )
    return build_corpus(
        documents,
        folder / "corpus",
        vocabulary=vocabulary,
        tagger=RuleTagger(),
        chunk_length=40,
    )


def batch_of(corpus, *asked):
    """A batch of (answers, are they patterns?)."""
    questions = [
        Question(
            f"q{i}", i, "When was it?", answers, "train", answers_are_patterns=regex
        )
        for i, (answers, regex) in enumerate(asked)
    ]
    arrays = question_examples(
        questions, corpus.vocabulary, query_length=QUERY_LENGTH, max_pattern_length=40
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


def marked_texts(corpus, candidates, spans, row):
    """The characters of the marked spans of each block that is read."""
    found = {}
    spans = spans[row].reshape(*candidates.joined_ids.shape[1:], MAX_SPAN)
    for item, block in enumerate(candidates.block_ids[row]):
        if block < 0:
            assert not spans[item].any()
            continue
        body = corpus.text(int(block)).body
        offsets = corpus.vocabulary.encode(body).offsets
        start = int(np.argmax(candidates.joined_segment_ids[row, item]))
        found[int(block)] = {
            body[offsets[first - start, 0] : offsets[first - start + width, 1]]
            for first, width in zip(*np.nonzero(spans[item]), strict=True)
        }
    return found


def test_blocks_are_labelled_one_by_one(corpus):
    """An answer neither extends into the next block nor beyond the chunk length."""
    bodies = [row[row != 0] for row in corpus.body_ids(everything(corpus, 1)[0], 99)]
    answer_ids = np.zeros((4, 2, 4), np.int32)
    answer_ids[0, 1, :4] = [*bodies[0][-2:], *bodies[1][:2]]  # Over a border.
    answer_ids[1, 0, :3], answer_ids[1, 1, :1] = bodies[3][-3:], bodies[5][0]
    answer_ids[2, 0, :2] = bodies[2][-2:]
    questions = batch_of(corpus, *[(("Hult",), False)] * 4)
    questions = questions.replace(answer_ids=answer_ids)
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


def test_labels_agree_with_evaluation_about_the_beginnings_of_words(corpus):
    answers = [("mill",), ("bell",), ("1191",), ("119",), ("Kare",), ("Hult", "Karel")]
    questions = batch_of(corpus, *((answer, False) for answer in answers))
    block_ids = everything(corpus, len(answers))
    labels = AnswerLabels(corpus, MAX_SPAN)
    found = labels.blocks(questions, block_ids)
    candidates = candidates_of(corpus, questions, block_ids)
    spans = labels.spans(questions, candidates)
    for row, answer in enumerate(answers):
        held = [has_answer(corpus.text(block).body, answer) for block in block_ids[row]]
        assert found[row].tolist() == held
        assert spans[row].any(axis=-1).tolist() == held
    assert not found[[0, 1, 3, 4]].any()
    assert found[[2, 5]].any(axis=-1).all()
    continues = continues_word(corpus.vocabulary.pieces)
    expected = answer_spans(
        candidates.joined_ids, questions.answer_ids, continues, MAX_SPAN
    )
    np.testing.assert_array_equal(spans[[2, 5]], expected[[2, 5]])


def test_patterns_are_labelled_in_the_text(corpus):
    asked = [
        ((r"150[0-2]", "feb"), True),
        (("Hult",), False),
        ((r"\b11\b|ten",), True),
        (("écluse|서울",), True),
    ]
    questions = batch_of(corpus, *asked)
    labels = AnswerLabels(corpus, MAX_SPAN)
    block_ids = everything(corpus, len(asked))
    blocks = labels.blocks(questions, block_ids)
    bodies = [corpus.text(block).body for block in block_ids[0]]
    assert blocks[0].tolist() == ["February" in body for body in bodies]
    assert blocks[1].tolist() == ["Hult" in body for body in bodies]
    # "written" holds no "ten", and "1191" no "11".
    assert blocks[2].tolist() == ["Its 11 mills" in body for body in bodies]
    towns = ["Écluse" in body or "서울" in body for body in bodies]
    assert blocks[3].tolist() == towns
    candidates = candidates_of(corpus, questions, block_ids)
    spans = labels.spans(questions, candidates)
    for row, pattern in {
        0: r"150[0-2]|feb",
        2: r"\b11\b|ten",
        3: "écluse|서울",
    }.items():
        for block, texts in marked_texts(corpus, candidates, spans, row).items():
            assert bool(texts) == blocks[row, block]
            assert all(re.match(pattern, text, FLAGS) for text in texts)
    for block, texts in marked_texts(corpus, candidates, spans, 0).items():
        years = set(re.findall("150[0-2]", bodies[block]))
        assert {text for text in texts if text[0] == "1"} == years


def test_spans_end_where_the_joined_row_does(corpus):
    questions = batch_of(corpus, (("down",), True))
    block_ids = everything(corpus, 1)
    labels = AnswerLabels(corpus, MAX_SPAN)
    query = np.count_nonzero(questions.question_ids)
    whole = candidates_of(corpus, questions, block_ids)
    whole_spans = labels.spans(questions, whole).reshape(1, corpus.num_blocks, -1)
    for joined_length in range(QUERY_LENGTH + 1, 64, 5):
        candidates = candidates_of(corpus, questions, block_ids, joined_length)
        spans = labels.spans(questions, candidates)
        spans = spans.reshape(corpus.num_blocks, joined_length, MAX_SPAN)
        first, width = np.nonzero(spans.any(axis=0))
        assert (first >= query).all()
        # The last place is taken by [SEP].
        assert (first + width < joined_length - 1).all()
        kept = whole_spans.reshape(corpus.num_blocks, -1, MAX_SPAN)
        np.testing.assert_array_equal(
            spans[:, : joined_length - 1 - MAX_SPAN],
            kept[:, : joined_length - 1 - MAX_SPAN],
        )


def test_empty_slots_and_the_question_itself_have_no_answer(corpus):
    questions = batch_of(corpus, ((".*",), True), (("Hult",), False))
    block_ids = np.array([[3, -1, -1], [-1, -1, -1]])
    labels = AnswerLabels(corpus, MAX_SPAN)
    assert labels.blocks(questions, block_ids).tolist() == [
        [True, False, False],
        [False, False, False],
    ]
    candidates = candidates_of(corpus, questions, block_ids)
    spans = labels.spans(questions, candidates)
    assert spans[0, 0].any()
    assert not spans[0, 1:].any()
    assert not spans[1].any()
    questions = batch_of(corpus, (("when", "it"), True))
    candidates = candidates_of(corpus, questions, everything(corpus, 1))
    spans = labels.spans(questions, candidates)
    spans = spans.reshape(-1, candidates.joined_ids.shape[-1], MAX_SPAN)
    assert spans.any()
    assert not spans[~candidates.joined_segment_ids[0].astype(bool)].any()


def test_a_broken_pattern_never_matches_and_is_reported_once(corpus, caplog):
    questions = batch_of(corpus, (("(Hult", "Karel"), True), (("(Hult",), True))
    labels = AnswerLabels(corpus, MAX_SPAN)
    block_ids = everything(corpus, 2)
    for _ in range(2):
        blocks = labels.blocks(questions, block_ids)
        spans = labels.spans(questions, candidates_of(corpus, questions, block_ids))
    assert blocks[0].any()
    assert not blocks[1].any()
    assert not spans[1].any()
    assert [r.args[0] for r in caplog.records if r.args] == ["(Hult"]


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
        labels.spans(questions, candidates_of(corpus, questions, [[1, 3]]))
        assert store.read == read
    store.read.clear()
    # Of blocks with an answer that are read, texts decide where words end.
    labels.spans(exact, candidates_of(corpus, exact, [[0, 1]]))
    assert store.read == [0]
    store.read.clear()
    asked = batch_of(corpus, (("Hult",), True))
    first = labels.blocks(asked, [[4, 0, 2]])
    second = labels.blocks(asked, [[0, 3, 4]])
    assert sorted(store.read) == [0, 2, 3, 4]
    fresh = AnswerLabels(corpus, MAX_SPAN)
    np.testing.assert_array_equal(first, fresh.blocks(asked, [[4, 0, 2]]))
    np.testing.assert_array_equal(second, fresh.blocks(asked, [[0, 3, 4]]))
    # Another question has other matches.
    other = batch_of(corpus, (("Karel",), True))
    np.testing.assert_array_equal(
        labels.blocks(other, [[0, 3, 4]]), fresh.blocks(other, [[0, 3, 4]])
    )


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


class OneBlock:
    """A store of one block that no length cuts."""

    vocabulary = SPELLING
    chunk_length = 400

    def __init__(self, body):
        self.body = types.SimpleNamespace(body=body)
        self.encoding = SPELLING.encode(body)

    def texts(self, block_ids) -> Any:
        return [self.body for _ in block_ids]

    def consecutive_bodies(self, block_ids, length):
        return np.append(self.encoding.ids, 0), np.array([len(self.encoding)])


def labelled(body, answer, are_patterns, max_span=60):
    """Whether the block is positive, and the first and last pieces of right spans."""
    store = OneBlock(body)
    asked = Question(
        "q", 0, "who", (answer,), "train", answers_are_patterns=are_patterns
    )
    arrays = question_examples(
        [asked],
        SPELLING,
        query_length=8,
        max_answer_length=max_span,
        max_pattern_length=200,
    )
    questions = QuestionBatch(**arrays)
    query = arrays["question_ids"][0]
    query = query[query != 0]
    joined = np.concatenate([query, store.encoding.ids, [SPELLING.sep]])
    segments = (np.arange(len(joined)) >= len(query)).astype(np.int32)
    read: Any = types.SimpleNamespace(
        block_ids=np.array([[0]]),
        joined_ids=joined[None, None],
        joined_segment_ids=segments[None, None],
    )
    labels = AnswerLabels(store, max_span)
    spans = labels.spans(questions, read).reshape(len(joined), max_span)
    right = {
        (int(first) - len(query), int(first) - len(query) + int(width))
        for first, width in zip(*np.nonzero(spans), strict=True)
    }
    return bool(labels.blocks(questions, np.array([[0]]))[0, 0]), right


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
    for body, answer, is_span in (
        ("Jean-Paul sang", "Paul", False),
        ("Jean-Paul sang", "Jean-Paul", True),
        ("O'Neill sang", "Neill", False),
        ("1,234 ships", "234", False),
        ("Paul's ship", "Paul", True),
    ):
        block, right = labelled(body, answer, are_patterns=False)
        assert block
        assert has_answer(body, [answer])
        assert bool(right) == is_span, (body, answer)


def test_labels_recall_and_exact_match_agree():
    for body, answer, is_same in (
        ("Paul, tén", "te\u0301n", True),
        ("Paul, te\u0301n", "tén", True),
        ("Pa\u00adul sang", "Paul", True),
        ("Paul sang", "Pa\u200bul", True),
        ("Paul, tén", "ten", False),
        ("Paul, ten", "tén", False),
        ("Paul, माला", "माला", True),
        ("Paul, माला", "मेला", False),  # Both are [UNK] here.
    ):
        block, right = labelled(body, answer, are_patterns=False)
        found = (block, bool(right), has_answer(body, [answer]))
        assert found == (is_same,) * 3, (body, answer)
