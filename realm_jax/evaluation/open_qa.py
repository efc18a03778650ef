"""Evaluates a model on questions with known answers: recall, exact match and F1."""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import Question
from realm_jax.evaluation.report_data import AnsweredQuestion
from realm_jax.metrics.answers import token_f1
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks
from realm_jax.training.answering import Answer, Answerer
from realm_jax.training.dev_exact_match import is_correct

_CONTEXT_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class RetrievedDocument:
    """A block found for a question.

    Attributes:
      block_id: id of the block.
      title: title of its article.
      score: f(x, z), the inner product.
      relevant: whether it answers the question (`relevant_blocks`).
    """

    block_id: int
    title: str
    score: float
    relevant: bool


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer to a question, with its source and score.

    Attributes:
      question: the question with its reference answers.
      answer: the original characters of the best span; empty if there was none.
      correct: whether the answer is correct by `metrics.answers.is_right`.
      f1: `metrics.answers.token_f1`; None if the answers are patterns.
      log_probability: log p(z, span|x) of the best span; -inf if there was none.
      block_id: the block that contains it; -1 if there was none.
      start: first character of the answer in the block's body.
      end: one past its last character.
      documents: the blocks that were read, best first.
    """

    question: Question
    answer: str
    correct: bool
    f1: float | None
    log_probability: float
    block_id: int
    start: int
    end: int
    documents: Sequence[RetrievedDocument]


@dataclasses.dataclass(frozen=True)
class OpenQaEvaluation:
    """Predictions and scores for a set of questions.

    Attributes:
      predictions: one for each question, in order.
      recall: for each k, 1.0 for each question with a relevant block in its top k,
        else 0.0.
    """

    predictions: Sequence[Prediction]
    recall: Mapping[int, Float[np.ndarray, " question"]]

    @property
    def exact_match(self) -> Float[np.ndarray, " question"]:
        """1.0 for each question that was answered correctly, else 0.0."""
        return np.asarray([p.correct for p in self.predictions], np.float64)

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
    """Answers questions, and scores retrieval and answers.

    Args:
      answerer: the model with its corpus and index.
      questions: the questions.
      recall_at: the values of k in recall@k.

    Raises:
      BadInputError: a block's text does not match its stored wordpieces.
    """
    question_ids = answerer.question_ids([q.question for q in questions])
    found = answerer.search(question_ids, max(answerer.num_read, *recall_at))
    ids = np.asarray(found.ids)
    relevant = relevant_blocks(answerer.corpus, questions, among=ids)
    answers = answerer.read(question_ids, found)
    predictions = [
        _predict(question, answer, blocks)
        for question, answer, blocks in zip(questions, answers, relevant, strict=True)
    ]
    return OpenQaEvaluation(
        predictions, {k: recall_at_k(ids, relevant, k) for k in recall_at}
    )


def answered_question(corpus: BlockStore, prediction: Prediction) -> AnsweredQuestion:
    """Returns a prediction with the text around its answer, for the report."""
    title = before = after = ""
    if prediction.block_id >= 0:
        text = corpus.text(prediction.block_id)
        title = text.title
        before = _last_words(text.body[: prediction.start])
        after = _first_words(text.body[prediction.end :])
    return AnsweredQuestion(
        question=prediction.question.question,
        references=prediction.question.answers,
        answer=prediction.answer,
        correct=prediction.correct,
        probability=math.exp(prediction.log_probability),
        title=title,
        before=before,
        after=after,
    )


def sample_answers(
    corpus: BlockStore, predictions: Sequence[Prediction], count: int, seed: int = 0
) -> list[AnsweredQuestion]:
    """Draws example answers, half of them correct and half wrong, if possible."""
    order = np.random.default_rng(seed).permutation(len(predictions))
    right = [predictions[i] for i in order if predictions[i].correct]
    wrong = [predictions[i] for i in order if not predictions[i].correct]
    num_wrong = min(len(wrong), max(count // 2, count - len(right)))
    chosen = right[: count - num_wrong] + wrong[:num_wrong]
    return [answered_question(corpus, prediction) for prediction in chosen]


def predictions_as_lines(
    predictions: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, np.ndarray]],
) -> str:
    """Returns predictions as JSON lines, which can be joined with references by id.

    Args:
      predictions: one for each question.
      measured: label -> metric -> one value per question, in the same order.
    """
    return "".join(
        json.dumps(
            {
                "id": prediction.question.id,
                "question": prediction.question.question,
                "topic": prediction.question.topic,
                "prediction": prediction.answer,
                "answers": list(prediction.question.answers),
                "correct": prediction.correct,
                "f1": prediction.f1,
                "block": prediction.block_id,
                "start": prediction.start,
                "end": prediction.end,
                "retrieved": [d.block_id for d in prediction.documents],
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


def _predict(
    question: Question, answer: Answer, relevant: Collection[int]
) -> Prediction:
    documents = [
        RetrievedDocument(d.block_id, d.title, d.score, d.block_id in relevant)
        for d in answer.documents
    ]
    return Prediction(
        question=question,
        answer=answer.text,
        correct=is_correct(answer, question),
        f1=None
        if question.answers_are_patterns
        else token_f1(answer.text, question.answers),
        log_probability=answer.log_probability,
        block_id=answer.block_id,
        start=answer.start,
        end=answer.end,
        documents=documents,
    )


def _last_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return "… " + text[-_CONTEXT_CHARACTERS:].partition(" ")[2]


def _first_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return text[:_CONTEXT_CHARACTERS].rpartition(" ")[0] + " …"
