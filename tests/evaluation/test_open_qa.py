import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from realm_jax.data.questions import Question
from realm_jax.evaluation.answer_errors import Outcome
from realm_jax.evaluation.open_qa import (
    answered_question,
    evaluate_open_qa,
    predictions_as_lines,
    sample_answers,
)
from realm_jax.metrics.answers import has_answer
from realm_jax.models.span_reader import SpanScores, span_bounds
from tests.evaluation.tiny_reader import TOWNS, FixedSearcher, make_answerer


@pytest.fixture(scope="module")
def questions():
    """More than one batch, of which the last is not full."""
    founded = [
        Question(f"founder-{i}", i, f"Who founded {town}?", (founder,), "test", town)
        for i, town in enumerate(TOWNS)
        for founder in [f"Karel von {TOWNS[i - 3]}"]
    ]
    asked_twice = Question("again", 8, founded[0].question, ("Nobody",), "test")
    return [*founded, asked_twice]


class PlantedReader:
    """Knows the answers: the span that spells one gets a high score."""

    max_span = 6

    def __init__(self, corpus, questions):
        encoded = corpus.vocabulary.encode_batch([q.answers[0] for q in questions])
        self.wanted = {tuple(encoding.ids.tolist()) for encoding in encoded}

    def rolled(self):
        return self

    def apply(self, variables, ids, segment_ids):
        starts, ends = span_bounds(ids.shape[-1], self.max_span)

        def score(ids, segment_ids):
            logits = np.zeros((*ids.shape[:-1], len(starts)), np.float32)
            valid = np.zeros(logits.shape, bool)
            for row in np.ndindex(ids.shape[:-1]):
                inside = np.append(segment_ids[row], np.zeros(self.max_span, int))
                inside[np.flatnonzero(inside)[-1:]] = 0  # The final [SEP].
                for span, (start, end) in enumerate(zip(starts, ends, strict=True)):
                    valid[(*row, span)] = inside[start : end + 1].all()
                    spelled = tuple(ids[row][start : end + 1].tolist())
                    logits[(*row, span)] = 9.0 * (spelled in self.wanted)
            return logits, valid

        shape = (*ids.shape[:-1], len(starts))
        shapes = [jax.ShapeDtypeStruct(shape, kind) for kind in (np.float32, bool)]
        return SpanScores(*jax.pure_callback(score, tuple(shapes), ids, segment_ids))


@pytest.fixture(scope="module")
def planted(corpus, questions):
    return PlantedReader(corpus, questions)


def evaluate(models, corpus, questions, searcher, **changes):
    answerer = make_answerer(models, corpus, searcher, **changes)
    return evaluate_open_qa(answerer, questions, recall_at=(1, 3, 5))


def test_recall_and_relevance_are_of_the_blocks_that_were_found(
    models, corpus, questions
):
    draw = np.random.default_rng(0)
    found = np.stack([draw.permutation(corpus.num_blocks) for _ in range(8)])
    searcher = FixedSearcher(found, corpus.num_blocks)
    result = evaluate(models, corpus, questions, searcher)
    answers = make_answerer(models, corpus, searcher).answer(
        [question.question for question in questions]
    )
    hits = 0
    for row, (asked, prediction, answer) in enumerate(
        zip(questions, result.predictions, answers, strict=True)
    ):
        texts = [corpus.text(int(block)) for block in found[row % 8]]
        right = [
            has_answer(text.body, asked.answers) and asked.title in (None, text.title)
            for text in texts
        ]
        assert (prediction.question, prediction.answer) == (asked, answer)
        for k in (1, 3, 5):
            assert result.recall[k][row] == any(right[:k])
        hits += any(right[:5])
    assert 0 < hits < len(questions)


def founding_blocks(corpus):
    return [b for b in range(corpus.num_blocks) if "founded" in corpus.text(b).body]


def test_the_answer_is_the_original_text(models, corpus, questions, planted):
    blocks = founding_blocks(corpus)
    searcher = FixedSearcher(np.asarray(blocks)[:, None], corpus.num_blocks)
    asked = questions[: len(TOWNS)]
    result = evaluate(models, corpus, asked, searcher, reader=planted)
    for values in (result.exact_match, result.f1, result.recall[1]):
        assert values.tolist() == [1.0] * len(TOWNS)
    answers = [prediction.answer.text for prediction in result.predictions]
    for town, block, prediction in zip(TOWNS, blocks, result.predictions, strict=True):
        shown = answered_question(prediction)
        assert shown.title == town
        text = shown.before + shown.answer + shown.after
        assert text == corpus.text(block).body
    # Case and accents are the document's; the wordpieces have neither.
    assert answers == [f"Karel von {TOWNS[i - 3]}" for i in range(len(TOWNS))]


def test_a_question_for_which_nothing_is_found_has_no_answer(models, corpus, questions):
    result = evaluate(models, corpus, questions, FixedSearcher([], corpus.num_blocks))
    for prediction in result.predictions:
        answer = prediction.answer
        assert (answer.text, prediction.correct) == ("", False)
        assert (answer.block_id, answer.log_probability) == (-1, -math.inf)
        assert answer.documents == []
        assert answered_question(prediction).probability == 0.0
    assert not result.exact_match.any()
    assert not result.recall[5].any()


def test_patterns_have_no_f1(models, corpus, questions):
    pattern = dataclasses.replace(
        questions[1], answers=("Karel.*",), answers_are_patterns=True
    )
    result = evaluate(
        models, corpus, [questions[0], pattern], FixedSearcher([0], corpus.num_blocks)
    )
    first, second = result.predictions
    assert first.f1 is not None
    assert second.f1 is result.f1 is None


def test_a_sample_shows_right_and_wrong_answers(models, corpus, questions, planted):
    searcher = FixedSearcher(range(corpus.num_blocks), corpus.num_blocks)
    predictions = evaluate(
        models, corpus, questions, searcher, reader=planted
    ).predictions
    right = sum(p.correct for p in predictions)
    assert 0 < right < len(predictions)
    pair = sample_answers(predictions, 2)
    assert sorted(answer.correct for answer in pair) == [False, True]
    everything = sample_answers(predictions, 100)
    assert len(everything) == len(predictions)
    assert sum(answer.correct for answer in everything) == right
    assert sample_answers(predictions, 4) == sample_answers(predictions, 4)
    # Where one kind is rare, more of the other are shown.
    for rare in (True, False):
        kinds = Outcome.NOT_READ, Outcome.RIGHT
        few = [
            dataclasses.replace(one, outcome=kinds[rare == (row == 0)])
            for row, one in enumerate(predictions)
        ]
        shown = [answer.correct for answer in sample_answers(few, 4)]
        assert sorted(shown) == sorted([rare, *[not rare] * 3])


def test_predictions_are_joined_by_id_though_a_question_is_asked_twice(
    models, corpus, questions
):
    result = evaluate(models, corpus, questions, FixedSearcher([0], corpus.num_blocks))
    measured = {"After fine-tuning": {"exact match": result.exact_match}}
    lines = predictions_as_lines(result.predictions, measured, {"step": 3}).splitlines()
    by_id = {record["id"]: record for record in map(json.loads, lines)}
    assert len(by_id) == len(questions)
    for prediction in result.predictions:
        question, answer = prediction.question, prediction.answer
        record = by_id[question.id]
        assert record["answers"] == list(question.answers)
        assert record["index"] == {"step": 3}
        # p(y|x) is the sum over documents of p(z|x) p(y|z,x).
        terms = [
            found["document_probability"] * found["answer_probability"]
            for found in record["documents"]
        ]
        assert terms
        assert record["probability"] == pytest.approx(sum(terms))
        for found in record["documents"]:
            body = corpus.text(found["block"]).body
            quoted = {body[start:end] for start, end in found["answer_at"]}
            assert quoted <= {answer.text}
        figures = record["measured"]["After fine-tuning"]
        assert figures == {"exact match": float(record["correct"])}
    assert by_id["founder-0"]["question"] == by_id["again"]["question"]


def test_what_was_wrong_follows_from_the_texts_that_were_read(
    models, corpus, questions, planted
):
    founded = founding_blocks(corpus)
    rng = np.random.default_rng(3)
    found = np.stack([rng.permutation(corpus.num_blocks) for _ in questions])
    # The right block and another that the planted reader also answers from.
    found[0, :2] = founded[0], founded[1]
    found[1, :2] = founded[1], founded[0]
    outcomes = set()
    for reader in (planted, None):
        changes = {} if reader is None else {"reader": reader}
        searcher = FixedSearcher(found, corpus.num_blocks)
        answerer = make_answerer(models, corpus, searcher, **changes)
        for prediction in evaluate_open_qa(answerer, questions).predictions:
            answer, wanted = prediction.answer, prediction.question.answers
            read = {d.block_id: has_answer(d.text, wanted) for d in answer.documents}
            if answer.text in wanted:
                expected = Outcome.RIGHT
            elif not any(read.values()):
                expected = Outcome.NOT_READ
            elif read[answer.block_id]:
                expected = Outcome.WRONG_SPAN
            else:
                expected = Outcome.WRONG_BLOCK
            assert prediction.outcome is expected
            outcomes.add(expected)
    assert len(outcomes) >= 3
