"""Says where questions are lost, and which of them training had seen.

A wrong answer is the retriever's fault if no block that was read contains a right one,
and the reader's otherwise. Questions and answers that occur in the training set are
told apart from others, for a model answers them better (Lewis, Stenetorp and Riedel
2021).
"""

import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from realm_jax.answering.answers import Answer
from realm_jax.data.examples import Examples
from realm_jax.data.questions import MAX_ANSWER_TEXT, Question, decode_texts
from realm_jax.data.words import normalise_answer
from realm_jax.evaluation.comparisons import ComparisonRow, rows_of_groups
from realm_jax.metrics.retrieval import Interval, bootstrap_interval

_ROWS_AT_A_TIME = 4096


class Outcome(enum.Enum):
    """What became of a question.

    Attributes:
      RIGHT: it was answered right.
      NOT_READ: no block that was read contains an answer.
      WRONG_BLOCK: one does, but the answer was taken from another block.
      WRONG_SPAN: the answer was taken from a block that contains a right one.
    """

    RIGHT = "right"
    NOT_READ = "not_read"
    WRONG_BLOCK = "wrong_block"
    WRONG_SPAN = "wrong_span"


class Overlap(enum.Enum):
    """What of a question occurs in the training set.

    Attributes:
      QUESTION: the question itself, in the same wordpieces.
      ANSWER: not the question, but one of its answers, as that of another.
      NONE: neither.
    """

    QUESTION = "question in training"
    ANSWER = "answer in training"
    NONE = "neither in training"


@dataclasses.dataclass(frozen=True)
class AnswerErrors:
    """Shares of the questions, by `Outcome`; all but `oracle` add up to 1.

    Attributes:
      retriever: no block that was read contains an answer.
      oracle: what a reader that always chooses right would answer.
    """

    right: Interval
    retriever: Interval
    wrong_block: Interval
    wrong_span: Interval
    oracle: Interval


def outcome_of(answer: Answer, is_right: bool, with_answer: Collection[int]) -> Outcome:
    """Returns what became of a question.

    `with_answer` are the blocks that were read and contain an answer.
    """
    if is_right:
        return Outcome.RIGHT
    if not with_answer:
        return Outcome.NOT_READ
    is_there = answer.block_id in with_answer
    return Outcome.WRONG_SPAN if is_there else Outcome.WRONG_BLOCK


def answer_errors(outcomes: Sequence[Outcome]) -> AnswerErrors:
    """Returns the share of each outcome, with intervals."""

    def share(*wanted: Outcome) -> Interval:
        hits = [outcome in wanted for outcome in outcomes]
        return bootstrap_interval(np.asarray(hits, np.float64))

    read = (Outcome.RIGHT, Outcome.WRONG_BLOCK, Outcome.WRONG_SPAN)
    return AnswerErrors(
        right=share(Outcome.RIGHT),
        retriever=share(Outcome.NOT_READ),
        wrong_block=share(Outcome.WRONG_BLOCK),
        wrong_span=share(Outcome.WRONG_SPAN),
        oracle=share(*read),
    )


def training_overlap(
    trained_on: Sequence[Examples],
    questions: Sequence[Question],
    question_ids: Int[np.ndarray, "question query"],
) -> list[Overlap]:
    """Returns what of each question occurs in the examples of the training set.

    Answers are compared as exact match compares them, but for those longer than
    `MAX_ANSWER_TEXT` characters and for patterns, of which examples keep no text.
    `trained_on` are the sets of examples that fine-tuning has read, and `question_ids`
    are wordpieces in their vocabulary.
    """
    answers = set(training_answers(trained_on))
    asked = {
        _pieces(ids)
        for examples in trained_on
        for features in _parts(examples, "question_ids")
        for ids in features
    }
    return [
        Overlap.QUESTION
        if _pieces(ids) in asked
        else Overlap.ANSWER
        if answers & _normalised_answers(question)
        else Overlap.NONE
        for question, ids in zip(questions, question_ids, strict=True)
    ]


def training_answers(trained_on: Sequence[Examples]) -> Iterator[str]:
    """Yields the normalised answers of every question of the training set.

    Of those longer than `MAX_ANSWER_TEXT` characters and of patterns it has no text.
    """
    for examples in trained_on:
        for features in _parts(examples, "answer_texts"):
            for rows in features:
                yield from filter(None, decode_texts(rows))


def by_overlap(
    overlaps: Sequence[Overlap], values: Mapping[str, np.ndarray]
) -> list[ComparisonRow]:
    """Returns a row for each kind of overlap that occurs."""
    order = [kind.value for kind in Overlap if kind in overlaps]
    return rows_of_groups(order, [overlap.value for overlap in overlaps], values)


def _parts(examples: Examples, feature: str) -> Iterator[np.ndarray]:
    for start in range(0, len(examples), _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, len(examples)))
        yield np.asarray(examples.features[feature][rows])


def _pieces(ids: Int[np.ndarray, " query"]) -> bytes:
    """Returns wordpieces without padding, comparable over padded lengths."""
    return np.trim_zeros(np.asarray(ids, np.int32), "b").tobytes()


def _normalised_answers(question: Question) -> set[str]:
    if question.answers_are_patterns:
        return set()
    texts = map(normalise_answer, question.answers)
    return {text for text in texts if text and len(text) <= MAX_ANSWER_TEXT}
