import math

import numpy as np
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.searchers import make_searcher
from realm_jax.models.retriever import Retriever
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
