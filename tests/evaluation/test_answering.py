import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.answering.reader import find_spans
from realm_jax.answering.search import batches_by_length, fill, padded_lengths
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index import device_search
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import make_searcher
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from tests.evaluation.tiny_reader import (
    LENGTHS,
    NUM_READ,
    TOWNS,
    is_whole_words,
    make_answerer,
)

QUESTIONS = [
    *(f"Who founded {town}?" for town in TOWNS),
    "On which river does Brel lie?",
    "when",
    "a",  # It is read in a shorter batch.
]


@pytest.fixture
def answerer(models, corpus, embeddings):
    return make_answerer(models, corpus, make_searcher("device", embeddings))


def slow_answer(models, corpus, question_ids, embeddings, marginalization, weight):
    """One block and one span at a time, in float64.

    Returns:
      Blocks by their scores, the scores, {pieces: (p(y|z,x), places)} and p(z|x) of
      each block that is read, and the best span as (log p, block, start, end).
    """
    query = models.retriever.apply(
        {"params": models.params["retriever"]},
        question_ids[None],
        method=Retriever.embed_queries,
    )[0]
    scores = embeddings.astype(np.float64) @ np.asarray(query, np.float64)
    order = np.argsort(-scores, kind="stable")
    spans = {}
    for block in order[:NUM_READ].tolist():
        ids, segments = corpus.joined_ids(
            question_ids[None], np.asarray([[block]]), LENGTHS.joined
        )
        read = models.read_one({"params": models.params["reader"]}, ids, segments)
        logits = np.asarray(read.logits, np.float64)[0, 0]
        body_start = np.count_nonzero(question_ids)
        body = corpus.text(block).body
        encoding = corpus.vocabulary.encode(body)
        here = spans[block] = []
        for first in range(len(encoding.ids)):
            for last in range(first, min(first + 4, len(encoding.ids))):
                start, end = encoding.offsets[first][0], encoding.offsets[last][1]
                if not is_whole_words(body, start, end):
                    continue
                if body_start + last < LENGTHS.joined - 1:
                    logit = logits[(body_start + first) * 4 + last - first]
                    pieces = tuple(encoding.ids[first : last + 1].tolist())
                    here.append((float(logit), pieces, (int(start), int(end))))
    mass = {z: sum(math.exp(logit) for logit, *_ in here) for z, here in spans.items()}
    weights = {z: math.exp(weight * scores[z]) for z in spans}
    if marginalization is AnswerMarginalization.JOINT_SOFTMAX:
        weights = {z: weights[z] * mass[z] for z in spans}
    documents, best = [], []
    for z, here in spans.items():
        share = weights[z] / sum(weights.values())
        by_pieces = {}
        for logit, pieces, place in here:
            probability, places = by_pieces.get(pieces, (0.0, []))
            of_span = math.exp(logit) / mass[z]
            by_pieces[pieces] = probability + of_span, sorted([*places, place])
            best.append((math.log(share * of_span), z, *place))
        documents.append((by_pieces, share))
    return order[:NUM_READ], scores, documents, max(best)


@pytest.mark.parametrize("marginalization", AnswerMarginalization)
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_answers_equal_a_loop_over_blocks_and_spans_of_whole_words(
    models, corpus, embeddings, marginalization, weight
):
    answerer = make_answerer(
        models,
        corpus,
        make_searcher("device", embeddings),
        marginalization=marginalization,
        retrieval_weight=weight,
    )
    several = 0
    answers = answerer.answer(QUESTIONS)
    question_ids = answerer.question_ids(QUESTIONS)
    for row, answer in enumerate(answers):
        order, scores, documents, best = slow_answer(
            models, corpus, question_ids[row], embeddings, marginalization, weight
        )
        log_probability, block, start, end = best
        assert [d.block_id for d in answer.documents] == order.tolist()
        assert (answer.block_id, answer.start, answer.end) == (block, start, end)
        assert answer.question == QUESTIONS[row]
        assert answer.text == corpus.text(block).body[start:end]
        assert answer.log_probability == pytest.approx(log_probability, abs=1e-4)
        pieces = tuple(corpus.vocabulary.encode(answer.text).ids.tolist())
        marginal = 0.0
        for document, (by_pieces, share) in zip(
            answer.documents, documents, strict=True
        ):
            expected, places = by_pieces.get(pieces, (0.0, []))
            assert document.score == pytest.approx(scores[document.block_id], abs=1e-4)
            assert document.probability == pytest.approx(share, abs=1e-5)
            assert document.answer_probability == pytest.approx(expected, abs=1e-5)
            assert list(document.places) == places
            text = corpus.text(document.block_id)
            found = (document.title, document.text, document.source_id)
            assert found == (text.title, text.body, text.source_id)
            marginal += share * expected
        assert answer.probability == pytest.approx(marginal, abs=1e-5)
        several += sum(len(document.places) for document in answer.documents) > 1
    assert several  # Answers that stand in one place alone would test little.


def test_a_text_that_its_wordpieces_are_not_of_is_refused(answerer, monkeypatch):
    texts = BlockStore.texts

    def changed(self, block_ids):
        return [text._replace(body=f"x{text.body}") for text in texts(self, block_ids)]

    monkeypatch.setattr(BlockStore, "texts", changed)
    with pytest.raises(BadInputError, match="prepare the corpus again"):
        answerer.answer(QUESTIONS)


def test_what_fits_of_a_question_is_what_is_read(answerer):
    short = "Who founded Čudo?"
    assert answerer.part_that_fits(short) == short
    long = "Who, if anybody, founded Čudo on the river Brelava, and in which year?"
    part = answerer.part_that_fits(long)
    assert part != long
    assert long.startswith(part)
    ids = answerer.question_ids([part, long])
    np.testing.assert_array_equal(ids[0], ids[1])
    assert np.count_nonzero(ids[1]) == LENGTHS.query


@given(st.integers(3, 600))
def test_rows_are_padded_by_at_most_a_quarter(longest):
    lengths = padded_lengths(longest)
    assert len(lengths) <= 4
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == longest
    assert all(length % 8 == 0 for length in lengths[:-1])
    assert np.diff([0, *lengths]).max() <= longest / 4 + 8


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 9))
def test_every_row_is_in_one_batch_of_its_own_length(lengths, batch_size):
    seen = []
    for rows, length in batches_by_length(np.array(lengths, int), 100, batch_size):
        assert 0 < len(rows) <= batch_size
        for row in rows:
            fitting = [one for one in padded_lengths(100) if one >= lengths[row]]
            assert length == fitting[0]
        filled = fill(rows, batch_size)
        assert filled[: len(rows)].tolist() == rows.tolist()
        assert set(filled) == set(rows)
        assert len(filled) == batch_size
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_a_shape_is_compiled_once_for_each_length(answerer):
    embed = query_embedder(answerer.retriever)
    shapes = []

    class Recorded(type(answerer)):
        def _find_spans(self, *inputs):
            shapes.append(inputs[0].shape)
            return super()._find_spans(*inputs)

    answerer = Recorded(**vars(answerer))
    answerer.compile()
    assert shapes == [(8, 3, length) for length in padded_lengths(LENGTHS.joined)]
    functions = embed, find_spans, device_search.search
    compiled = [function._cache_size() for function in functions]
    del shapes[:]
    for count in range(1, len(QUESTIONS) + 1):
        answerer.answer(QUESTIONS[:count])
    assert [function._cache_size() for function in functions] == compiled
    assert set(shapes) == {(8, 3, 32), (8, 3, 48)}


def test_what_only_reads_is_not_unrolled(models):
    """It would compile for twice as long."""
    bert = dataclasses.replace(models.reader.config, num_layers=3)
    ids, edges = np.zeros((1, 1, 8), np.int32), np.zeros((1, 1, 8), bool)
    scores = np.zeros((1, 1), np.float32)

    def program(unroll):
        reader = SpanReader(dataclasses.replace(bert, scan_unroll=unroll), max_span=4)
        params = jax.eval_shape(reader.init, jax.random.key(0), ids, ids)["params"]
        inputs = (params, ids, ids, scores, edges, edges)
        return find_spans.lower(
            reader, AnswerMarginalization.PRODUCT, *inputs
        ).as_text()

    assert program(3) == program(1)


def test_an_answer_does_not_depend_on_the_questions_beside_it(answerer):
    """To the last bit, in batches of one size."""
    together = answerer.answer(QUESTIONS)
    for question, expected in zip(QUESTIONS, together, strict=True):
        assert answerer.answer([question]) == [expected]
    assert answerer.answer(QUESTIONS[::-1]) == together[::-1]
