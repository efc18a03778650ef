"""Asks a model questions whose answers are known, and says how often it is right."""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import Question
from realm_jax.evaluation.answering import Answer, Answerer
from realm_jax.evaluation.report_data import AnsweredQuestion
from realm_jax.metrics.answers import is_right
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks

_CONTEXT_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class RetrievedDocument:
    """A block found for a question.

    Attributes:
      block_id: of the block.
      title: of its article.
      score: f(x, z), the inner product.
      relevant: whether it answers the question (`relevant_blocks`).
    """

    block_id: int
    title: str
    score: float
    relevant: bool


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What was answered to a question, and from where.

    Attributes:
      question: as it was asked, with its references.
      answer: the original characters of the best span; empty if there was none.
      correct: by `metrics.answers.is_right`.
      log_probability: log p(z, span|x) of the best span; -inf if there was none.
      block_id: where it was read; -1 if nowhere.
      start: first character of the answer in the block's body.
      end: one past its last character.
      documents: the blocks that were read, best first.
    """

    question: Question
    answer: str
    correct: bool
    log_probability: float
    block_id: int
    start: int
    end: int
    documents: Sequence[RetrievedDocument]


@dataclasses.dataclass(frozen=True)
class OpenQaEvaluation:
    """One prediction per question, in the order asked, and what they score.

    Attributes:
      predictions: of every question.
      recall: k -> 1.0 for each question with a relevant block among the first k.
    """

    predictions: Sequence[Prediction]
    recall: Mapping[int, Float[np.ndarray, " question"]]

    @property
    def exact_match(self) -> Float[np.ndarray, " question"]:
        """1.0 for each question that was answered right, else 0.0."""
        return np.asarray([p.correct for p in self.predictions], np.float64)


def evaluate_open_qa(
    answerer: Answerer,
    questions: Sequence[Question],
    *,
    recall_at: Sequence[int] = (1, 5, 20),
) -> OpenQaEvaluation:
    """Retrieves, reads the best blocks, and takes the best span over all of them.

    Args:
      answerer: the model with its corpus and index.
      questions: what is asked.
      recall_at: the values of k.

    Raises:
      BadInputError: a block's text and its wordpieces do not belong together.
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
    """A prediction with the text around its answer, for a report."""
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
    """Draws answers to show: half of them right and half wrong, if there are enough."""
    order = np.random.default_rng(seed).permutation(len(predictions))
    right = [predictions[i] for i in order if predictions[i].correct]
    wrong = [predictions[i] for i in order if not predictions[i].correct]
    num_wrong = min(len(wrong), max(count // 2, count - len(right)))
    chosen = right[: count - num_wrong] + wrong[:num_wrong]
    return [answered_question(corpus, prediction) for prediction in chosen]


def predictions_as_lines(predictions: Sequence[Prediction]) -> str:
    """JSON lines with the id of each question, to be joined with references by it."""
    return "".join(
        json.dumps(
            {
                "id": prediction.question.id,
                "question": prediction.question.question,
                "prediction": prediction.answer,
                "answers": list(prediction.question.answers),
                "correct": prediction.correct,
                "block": prediction.block_id,
                "start": prediction.start,
                "end": prediction.end,
                "retrieved": [d.block_id for d in prediction.documents],
            },
            ensure_ascii=False,
        )
        + "\n"
        for prediction in predictions
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
        correct=bool(answer.text)
        and is_right(answer.text, question.answers, question.answers_are_patterns),
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
