"""Evaluates a model on questions with known answers: recall, exact match and F1.

The fine-tuned reader also reads blocks that something else has found (`SameReader`).
What a retriever is worth to its reader is the difference to what the same reader
answers from the blocks of BM25, of chance, of a retriever that was not trained, or from
a block that is known to contain an answer. p(z|x) of these blocks is our own
retriever's, over the blocks that are read, so that rows differ in their blocks alone.
"""

import dataclasses
import enum
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from realm_jax.answering.answers import Answer, ReadDocument
from realm_jax.answering.hybrid import BM25Index
from realm_jax.answering.reader import Answerer
from realm_jax.data.examples import Examples
from realm_jax.data.questions import Question
from realm_jax.errors import BadInputError
from realm_jax.evaluation import comparisons
from realm_jax.evaluation.answer_errors import Outcome, outcome_of, training_answers
from realm_jax.evaluation.report_data import AnsweredQuestion
from realm_jax.index.embedding_cache import KnownRows
from realm_jax.metrics.answers import token_f1
from realm_jax.metrics.retrieval import (
    recall_at_k,
    relevant_blocks,
)
from realm_jax.training.dev_exact_match import is_correct
from realm_jax.types import NULL_BLOCK, Neighbours

_CONTEXT_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer to a question whose right answers are known.

    Attributes:
      outcome: whether it is right by `metrics.answers.is_right`, else what was wrong.
      f1: `metrics.answers.token_f1`; None if the answers are patterns.
    """

    question: Question
    answer: Answer
    outcome: Outcome
    f1: float | None

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.outcome is Outcome.RIGHT


@dataclasses.dataclass(frozen=True)
class OpenQaEvaluation:
    """Predictions and scores for a set of questions.

    Attributes:
      predictions: one for each question, in order.
      question_ids: wordpieces of the questions as the model read them.
      retrieved: the blocks that were found for each question, best first.
      recall: for each k, 1.0 for each question with a relevant block in its top k,
        else 0.0.
    """

    predictions: Sequence[Prediction]
    question_ids: Int[np.ndarray, "question query"]
    retrieved: Int[np.ndarray, "question neighbour"]
    recall: Mapping[int, Float[np.ndarray, " question"]]

    @property
    def exact_match(self) -> Float[np.ndarray, " question"]:
        """1.0 for each question that was answered correctly, else 0.0."""
        return np.asarray([p.correct for p in self.predictions], np.float64)

    @property
    def probability(self) -> Float[np.ndarray, " question"]:
        """p(y|x) of each answer."""
        # A sum of rounded probabilities may exceed 1.
        return np.asarray([min(p.answer.probability, 1.0) for p in self.predictions])

    @property
    def answer_read(self) -> Float[np.ndarray, " question"]:
        """1.0 for each question with an answer in what was read, else 0.0."""
        lost = (p.outcome is Outcome.NOT_READ for p in self.predictions)
        return 1.0 - np.fromiter(lost, np.float64, len(self.predictions))

    @property
    def f1(self) -> Float[np.ndarray, " question"] | None:
        """F1 of each answer; None if the answers of a question are patterns."""
        values = [p.f1 for p in self.predictions if p.f1 is not None]
        complete = len(values) == len(self.predictions)
        return np.asarray(values, np.float64) if complete else None


def evaluate_open_qa(
    answerer: Answerer,
    questions: Sequence[Question],
    *,
    recall_at: Sequence[int] = (1, 5, 20),
) -> OpenQaEvaluation:
    """Answers questions, and scores retrieval by recall@k and the answers."""
    question_ids = answerer.question_ids([question.question for question in questions])
    found = answerer.search(question_ids, max(answerer.num_read, *recall_at))
    return judge_blocks(answerer, questions, question_ids, found, recall_at=recall_at)


def judge_blocks(
    answerer: Answerer,
    questions: Sequence[Question],
    question_ids: Int[np.ndarray, "question query"],
    found: Neighbours,
    *,
    recall_at: Sequence[int] = (),
) -> OpenQaEvaluation:
    """Answers questions from blocks that were found for them, and scores both.

    `question_ids` are the wordpieces of the questions; of each at least `num_read`
    blocks are `found`.
    """
    ids = np.asarray(found.ids)
    asked = [question.question for question in questions]
    answers = answerer.read(asked, question_ids, found)
    # Which article a question is about does not matter to its reader.
    untitled = [dataclasses.replace(question, title=None) for question in questions]
    read = relevant_blocks(answerer.corpus, untitled, ids[:, : answerer.num_read])
    relevant = relevant_blocks(answerer.corpus, questions, ids) if recall_at else []
    recall = {k: recall_at_k(ids, relevant, k) for k in recall_at}
    return judge_answers(questions, question_ids, answers, read, ids, recall)


def judge_answers(
    questions: Sequence[Question],
    question_ids: Int[np.ndarray, "question query"],
    answers: Sequence[Answer],
    with_answer: Sequence[Collection[int]],
    retrieved: Int[np.ndarray, "question neighbour"],
    recall: Mapping[int, Float[np.ndarray, " question"]] | None = None,
) -> OpenQaEvaluation:
    """Scores answers; `with_answer` are the blocks read that contain a right one."""
    rows = zip(questions, answers, with_answer, strict=True)
    predictions = [_predict(*row) for row in rows]
    return OpenQaEvaluation(predictions, question_ids, retrieved, recall or {})


def answered_question(prediction: Prediction) -> AnsweredQuestion:
    """Returns a prediction with the text around its answer, for the report."""
    answer, title, before, after = prediction.answer, "", "", ""
    for document in answer.documents:
        if document.block_id == answer.block_id:
            title = document.title
            before = _last_words(document.text[: answer.start])
            after = _first_words(document.text[answer.end :])
    return AnsweredQuestion(
        question=answer.question,
        references=prediction.question.answers,
        answer=answer.text,
        correct=prediction.correct,
        probability=math.exp(answer.log_probability),
        title=title,
        before=before,
        after=after,
    )


def sample_answers(
    predictions: Sequence[Prediction], count: int
) -> list[AnsweredQuestion]:
    """Draws example answers, half of them correct and half wrong, if possible."""
    order = np.random.default_rng(0).permutation(len(predictions))
    right = [predictions[i] for i in order if predictions[i].correct]
    wrong = [predictions[i] for i in order if not predictions[i].correct]
    num_wrong = min(len(wrong), max(count // 2, count - len(right)))
    chosen = right[: count - num_wrong] + wrong[:num_wrong]
    return [answered_question(prediction) for prediction in chosen]


def predictions_as_lines(
    predictions: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, np.ndarray]],
    index: Mapping[str, Any],
) -> str:
    """Returns predictions as JSON lines, which can be joined with references by id.

    `measured` has one value per prediction, by label and metric; `index`, what was
    searched, is the same in each line.
    """
    return "".join(
        json.dumps(
            {
                "id": prediction.question.id,
                "question": prediction.question.question,
                "topic": prediction.question.topic,
                "prediction": prediction.answer.text,
                "answers": list(prediction.question.answers),
                "correct": prediction.correct,
                "outcome": prediction.outcome.value,
                "probability": prediction.answer.probability,
                "f1": prediction.f1,
                "block": prediction.answer.block_id,
                "start": prediction.answer.start,
                "end": prediction.answer.end,
                "retrieved": [d.block_id for d in prediction.answer.documents],
                "documents": [_without_text(d) for d in prediction.answer.documents],
                "index": index,
                "measured": {
                    label: {name: float(array[row]) for name, array in values.items()}
                    for label, values in measured.items()
                },
            },
            ensure_ascii=False,
        )
        + "\n"
        for row, prediction in enumerate(predictions)
    )


def _without_text(document: ReadDocument) -> dict[str, Any]:
    fields = document.as_json()
    del fields["passage"]
    return fields


def _predict(
    question: Question, answer: Answer, with_answer: Collection[int]
) -> Prediction:
    f1 = (
        None
        if question.answers_are_patterns
        else token_f1(answer.text, question.answers)
    )
    outcome = outcome_of(answer, is_correct(answer, question), with_answer)
    return Prediction(question, answer, outcome, f1)


def _last_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return "… " + text[-_CONTEXT_CHARACTERS:].partition(" ")[2]


def _first_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return text[:_CONTEXT_CHARACTERS].rpartition(" ")[0] + " …"


class Baseline(enum.StrEnum):
    """What finds the blocks instead of the fine-tuned retriever.

    Attributes:
      CLOSED_BOOK: nothing is read; the most frequent answer of the training questions.
      RANDOM: blocks drawn at random.
      BM25: the best by `BM25Index.search`.
      HYBRID: the best by the sum of its scores and the fine-tuned retriever's.
      STARTING_POINT: the retriever before training.
      ORACLE: a single block, the first of those retrieved that contains an answer.
    """

    CLOSED_BOOK = "closed_book"
    RANDOM = "random"
    BM25 = "bm25"
    HYBRID = "hybrid"
    STARTING_POINT = "starting_point"
    ORACLE = "oracle"

    @property
    def label(self) -> str:
        """Its name in a comparison."""
        return _BASELINE_LABELS[self]


_BASELINE_LABELS = {
    Baseline.CLOSED_BOOK: "closed book",
    Baseline.RANDOM: comparisons.RANDOM_BLOCKS,
    Baseline.BM25: comparisons.BM25,
    Baseline.HYBRID: comparisons.fused_name(comparisons.AFTER_FINETUNING),
    Baseline.STARTING_POINT: comparisons.BEFORE_TRAINING,
    Baseline.ORACLE: "oracle block",
}


@dataclasses.dataclass(frozen=True)
class SameReader:
    """A fine-tuned model that reads blocks which it is given.

    Attributes:
      embeddings: the embeddings of its index.
      answered: what it answered from the blocks that its retriever found.
    """

    answerer: Answerer
    embeddings: KnownRows
    questions: Sequence[Question]
    answered: OpenQaEvaluation

    def read(self, ids: Int[np.ndarray, "question neighbour"]) -> OpenQaEvaluation:
        """Answers each question from the first `num_read` of its blocks; -1 is none."""
        ids = ids[:, : self.answerer.num_read]
        blocks, rows = np.unique(np.maximum(ids, 0), return_inverse=True)
        documents = self.embeddings.read(blocks)[rows.reshape(ids.shape)]
        question_ids = self.answered.question_ids
        queries = np.asarray(self.answerer.embed(question_ids), np.float32)
        scores = np.einsum("qd,qkd->qk", queries, documents)
        found = Neighbours(ids, np.where(ids == NULL_BLOCK, -np.inf, scores))
        return judge_blocks(self.answerer, self.questions, question_ids, found)

    def read_hybrid(self, words: BM25Index) -> OpenQaEvaluation:
        """Answers each question as with `words` in the answerer."""
        texts = [question.question for question in self.questions]
        question_ids = self.answered.question_ids
        answerer = dataclasses.replace(self.answerer, words=words)
        found = answerer.find(texts, question_ids)
        return judge_blocks(self.answerer, self.questions, question_ids, found)

    def read_random(self) -> OpenQaEvaluation:
        """Answers each question from random blocks."""
        num_blocks, k = self.answerer.corpus.num_blocks, self.answerer.num_read
        return self.read(random_blocks(len(self.questions), num_blocks, k))

    def read_oracle(self) -> OpenQaEvaluation:
        """Answers each question from the oracle's block."""
        retrieved = self.answered.retrieved
        relevant = relevant_blocks(self.answerer.corpus, self.questions, retrieved)
        return self.read(oracle_blocks(retrieved, relevant, self.answerer.num_read))

    def read_nothing(self, trained_on: Sequence[Examples]) -> OpenQaEvaluation:
        """Answers every question with the most frequent answer of the training set."""
        if not trained_on:
            raise BadInputError(
                "expected the examples of fine-tuning in its corpus for the baseline "
                f"{Baseline.CLOSED_BOOK.value!r}, found none; leave it out"
            )
        counts = Counter(training_answers(trained_on))
        most = max(counts, key=lambda text: (counts[text], text), default="")
        answers = [
            Answer(question.question, most, 0.0, -np.inf, NULL_BLOCK, 0, 0, ())
            for question in self.questions
        ]
        read = [frozenset[int]()] * len(answers)
        nothing = np.full((len(answers), 0), NULL_BLOCK)
        question_ids = self.answered.question_ids
        return judge_answers(self.questions, question_ids, answers, read, nothing)


def random_blocks(
    num_questions: int, num_blocks: int, k: int
) -> Int[np.ndarray, "question k"]:
    """Draws k different blocks for each question; all of them if there are fewer."""
    drawn = np.random.default_rng(0)
    found = np.full((num_questions, k), NULL_BLOCK)
    for row in found[:, :num_blocks]:
        row[:] = drawn.choice(num_blocks, len(row), replace=False)
    return found


def oracle_blocks(
    retrieved: Int[np.ndarray, "question neighbour"],
    relevant: Sequence[Collection[int]],
    k: int,
) -> Int[np.ndarray, "question k"]:
    """Returns the first relevant block of each question, and -1 in all other places."""
    found = np.full((len(retrieved), k), NULL_BLOCK)
    for row, blocks, right in zip(found, retrieved, relevant, strict=True):
        row[0] = next((block for block in blocks if block in right), NULL_BLOCK)
    return found
