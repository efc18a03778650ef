import dataclasses
import math
import re

import numpy as np
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.searchers import make_searcher
from realm_jax.objectives.open_qa import AnswerMarginalization
from tests.evaluation.tiny_reader import (
    LENGTHS,
    NUM_READ,
    TOWNS,
    FixedSearcher,
    is_whole_words,
    make_answerer,
)

QUESTIONS = [
    *(f"Who founded {town}?" for town in TOWNS),
    "On which river does Brel lie?",
    "when",
]


def slow_documents(models, corpus, question_ids, found, marginalization):
    """(p(z|x), {pieces: (p(y|z,x), places)}) of each block, a span at a time."""
    body_start = np.count_nonzero(question_ids)
    spans = []
    for block, score in found:
        ids, segments = corpus.joined_ids(
            question_ids[None], np.asarray([[block]]), LENGTHS.joined
        )
        read = models.read_one({"params": models.params["reader"]}, ids, segments)
        logits = np.asarray(read.logits, np.float64)[0, 0]
        body = corpus.text(block).body
        encoding = corpus.vocabulary.encode(body)
        here = []
        for first in range(len(encoding.ids)):
            for last in range(first, min(first + 4, len(encoding.ids))):
                start, end = encoding.offsets[first][0], encoding.offsets[last][1]
                if not is_whole_words(body, start, end):
                    continue
                if body_start + last < LENGTHS.joined - 1:
                    logit = logits[(body_start + first) * 4 + last - first]
                    pieces = tuple(encoding.ids[first : last + 1].tolist())
                    here.append((float(logit), pieces, (int(start), int(end))))
        spans.append((float(score), here))
    masses = [sum(math.exp(logit) for logit, *_ in here) for _, here in spans]
    if marginalization is AnswerMarginalization.PRODUCT:
        weights = [math.exp(score) for score, _ in spans]
    else:
        weights = [
            math.exp(score) * mass
            for (score, _), mass in zip(spans, masses, strict=True)
        ]
    documents = []
    for (_, here), mass, weight in zip(spans, masses, weights, strict=True):
        by_pieces = {}
        for logit, pieces, place in here:
            probability, places = by_pieces.get(pieces, (0.0, []))
            by_pieces[pieces] = (
                probability + math.exp(logit) / mass,
                sorted([*places, place]),
            )
        documents.append((weight / sum(weights), by_pieces))
    return documents


@pytest.mark.parametrize("marginalization", AnswerMarginalization)
def test_probabilities_equal_a_loop_over_spans_of_whole_words(
    models, corpus, embeddings, marginalization
):
    searcher = make_searcher("device", embeddings)
    answerer = make_answerer(models, corpus, searcher, marginalization=marginalization)
    several = 0
    answers = answerer.answer(QUESTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        found = [(d.block_id, d.score) for d in answer.documents]
        assert len(found) == NUM_READ
        (question_ids,) = answerer.question_ids([question])
        slow = slow_documents(models, corpus, question_ids, found, marginalization)
        pieces = tuple(corpus.vocabulary.encode(answer.text).ids.tolist())
        marginal = 0.0
        for document, (probability, by_pieces) in zip(
            answer.documents, slow, strict=True
        ):
            expected, places = by_pieces.get(pieces, (0.0, []))
            assert document.probability == pytest.approx(probability, abs=1e-5)
            assert document.answer_probability == pytest.approx(expected, abs=1e-5)
            assert list(document.places) == places
            text = corpus.text(document.block_id)
            assert (document.title, document.body, document.source_id) == (
                text.title,
                text.body,
                text.source_id,
            )
            marginal += probability * expected
        assert answer.marginal == pytest.approx(marginal, abs=1e-5)
        several += sum(len(document.places) for document in answer.documents) > 1
    assert several  # Answers that stand in one place alone would test little.


def test_every_answer_is_whole_words_of_the_text(models, corpus, embeddings):
    for maximum in (1, 2, 3, 4):
        reader = dataclasses.replace(models.reader, max_span=maximum)
        searcher = make_searcher("device", embeddings)
        answerer = make_answerer(models, corpus, searcher, reader=reader)
        for answer in answerer.answer(QUESTIONS):
            body = corpus.text(answer.block_id).body
            assert body[answer.start : answer.end] == answer.text
            assert re.fullmatch(r"\w.*\w|\w", answer.text)
            assert not re.match(r"\w", body[answer.end :])
            assert not re.search(r"\w$", body[: answer.start])
            total = sum(document.probability for document in answer.documents)
            assert total == pytest.approx(1.0, abs=1e-5)


def test_a_text_that_its_wordpieces_are_not_of_is_refused(
    models, corpus, embeddings, monkeypatch
):
    answerer = make_answerer(models, corpus, make_searcher("device", embeddings))
    texts = BlockStore.texts

    def changed(self, block_ids):
        return [text._replace(body=f"x{text.body}") for text in texts(self, block_ids)]

    monkeypatch.setattr(BlockStore, "texts", changed)
    with pytest.raises(BadInputError, match="prepare the corpus again"):
        answerer.answer(QUESTIONS)


def test_asked_alone_or_with_others_the_answer_is_the_same(models, corpus, embeddings):
    searcher = make_searcher("device", embeddings)
    together, alone = (
        make_answerer(models, corpus, searcher, batch_size=size).answer(QUESTIONS)
        for size in (8, 1)
    )
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.block_id, one.start) == (
            other.text,
            other.block_id,
            other.start,
        )
        assert one.marginal == pytest.approx(other.marginal, abs=1e-5)


def test_what_fits_of_a_question_is_what_is_read(models, corpus):
    answerer = make_answerer(models, corpus, FixedSearcher([0], corpus.num_blocks))
    short = "Who founded Čudo?"
    assert answerer.part_that_fits(short) == short
    long = "Who, if anybody, founded Čudo on the river Brelava, and in which year?"
    part = answerer.part_that_fits(long)
    assert part != long
    assert long.startswith(part)
    ids = answerer.question_ids([part, long])
    np.testing.assert_array_equal(ids[0], ids[1])
    assert np.count_nonzero(ids[1]) == LENGTHS.query


def test_where_nothing_is_found_nothing_is_answered(models, corpus):
    answerer = make_answerer(models, corpus, FixedSearcher([], corpus.num_blocks))
    (answer,) = answerer.answer(["Who?"])
    assert (answer.text, answer.block_id, answer.documents) == ("", -1, [])
    assert answer.marginal == 0.0
    assert answer.log_probability == -math.inf
