"""Answers questions from the corpus, with the text each answer was read in.

What is predicted is the original text of the best span, never its wordpieces put back
together: case, accents and spacing are those of the document.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.questions import Question, question_examples
from realm_jax.errors import BadInputError
from realm_jax.evaluation.answers import is_right
from realm_jax.evaluation.report_data import AnsweredQuestion
from realm_jax.evaluation.retrieval import recall_at_k, relevant_blocks
from realm_jax.index.searchers import Searcher
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader, SpanScores, span_bounds
from realm_jax.objectives.open_qa import AnswerMarginalization, span_log_probs
from realm_jax.training.held_out import search_questions
from realm_jax.training.initialization import Lengths
from realm_jax.types import NULL_BLOCK, Array, Neighbours

_BATCH = 8
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
      correct: by `evaluation.answers.is_right`.
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
    retriever: Retriever,
    reader: SpanReader,
    params: PyTree,
    *,
    corpus: BlockStore,
    searcher: Searcher,
    questions: Sequence[Question],
    num_read: int,
    lengths: Lengths,
    recall_at: Sequence[int] = (1, 5, 20),
    marginalization: AnswerMarginalization = AnswerMarginalization.JOINT_SOFTMAX,
) -> OpenQaEvaluation:
    """Retrieves, reads the best blocks, and takes the best span over all of them.

    Args:
      retriever: the towers; the query tower is used.
      reader: the span scorer.
      params: {"retriever": ..., "reader": ...}.
      corpus: the blocks.
      searcher: the frozen index that the reader was trained with.
      questions: what is asked.
      num_read: blocks that are read per question (5 in the paper).
      lengths: padded lengths.
      recall_at: the values of k.
      marginalization: as in training.

    Raises:
      BadInputError: a block's text and its wordpieces do not belong together.
    """
    question_ids = question_examples(
        questions, corpus.vocabulary, query_length=lengths.query
    )["question_ids"]
    found = search_questions(
        retriever.config,
        params["retriever"],
        searcher,
        question_ids,
        max(num_read, *recall_at),
    )
    relevant = relevant_blocks(corpus, questions, among=np.asarray(found.ids))
    to_read = jax.tree.map(lambda values: np.asarray(values)[:, :num_read], found)
    spans = _read(
        reader,
        params["reader"],
        corpus,
        question_ids,
        to_read,
        lengths.joined,
        marginalization,
    )
    predictions = [
        _predict(corpus, question, span, Neighbours(ids, scores), blocks)
        for question, span, ids, scores, blocks in zip(
            questions, spans, to_read.ids, to_read.scores, relevant, strict=True
        )
    ]
    return OpenQaEvaluation(
        predictions,
        {k: recall_at_k(np.asarray(found.ids), relevant, k) for k in recall_at},
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


class _Span(NamedTuple):
    """The best span of a question: pieces first..last of the body of a block."""

    block_id: int
    first: int
    last: int
    log_probability: float


_NO_SPAN = _Span(NULL_BLOCK, 0, 0, -math.inf)


def _read(
    reader: SpanReader,
    params: PyTree,
    corpus: BlockStore,
    question_ids: Int[np.ndarray, "question query"],
    found: Neighbours,
    joined_length: int,
    marginalization: AnswerMarginalization,
) -> list[_Span]:
    """Finds the best span of each question over the blocks found for it."""

    @jax.jit
    def best_span(params: PyTree, ids: Array, segment_ids: Array, scores: Array):
        spans = cast(SpanScores, reader.apply({"params": params}, ids, segment_ids))
        found_any = jnp.isfinite(scores)[:, :, None]
        log_probs = span_log_probs(
            scores, spans.logits, spans.valid & found_any, marginalization
        )
        flat = log_probs.reshape(len(scores), -1)
        return flat.argmax(axis=-1), flat.max(axis=-1)

    block_ids, scores = np.asarray(found.ids), np.asarray(found.scores)
    bounds = span_bounds(joined_length, reader.max_span)
    spans = []
    for start in range(0, len(question_ids), _BATCH):
        rows = np.arange(start, min(start + _BATCH, len(question_ids)))
        # The last batch is filled up, so that one shape is compiled.
        filled = np.pad(rows, (0, _BATCH - len(rows)), mode="edge")
        joined = corpus.joined_ids(
            question_ids[filled], block_ids[filled], joined_length
        )
        best = jax.device_get(best_span(params, *joined, scores[filled]))
        spans += [
            _locate(int(place), float(value), block_ids[row], segment_ids, bounds)
            for row, segment_ids, place, value in zip(
                rows, joined[1], *best, strict=False
            )
        ]
    return spans


def _locate(
    place: int,
    log_probability: float,
    block_ids: Int[np.ndarray, " read"],
    segment_ids: Int[np.ndarray, "read joined"],
    bounds: tuple[Int[np.ndarray, " span"], Int[np.ndarray, " span"]],
) -> _Span:
    """Turns a number among the spans of all blocks into pieces of one block's body."""
    if not math.isfinite(log_probability):
        return _NO_SPAN
    document, span = divmod(place, len(bounds[0]))
    body_start = int(np.argmax(segment_ids[document]))
    first, last = (int(bound[span]) - body_start for bound in bounds)
    return _Span(int(block_ids[document]), first, last, log_probability)


def _predict(
    corpus: BlockStore,
    question: Question,
    span: _Span,
    found: Neighbours,
    relevant: Collection[int],
) -> Prediction:
    documents = [
        RetrievedDocument(block, text.title, float(score), block in relevant)
        for block, score, text in _with_texts(corpus, found)
    ]
    if span is _NO_SPAN:
        answer, start, end = "", 0, 0
    else:
        answer, start, end = _original_text(corpus, span)
    return Prediction(
        question=question,
        answer=answer,
        correct=bool(answer)
        and is_right(answer, question.answers, question.answers_are_patterns),
        log_probability=span.log_probability,
        block_id=span.block_id,
        start=start,
        end=end,
        documents=documents,
    )


def _with_texts(
    corpus: BlockStore, found: Neighbours
) -> Iterator[tuple[int, float, BlockText]]:
    real = np.flatnonzero(np.asarray(found.ids) != NULL_BLOCK)
    blocks = np.asarray(found.ids)[real]
    for row, block, text in zip(real, blocks, corpus.texts(blocks), strict=True):
        yield int(block), float(found.scores[row]), text


def _original_text(corpus: BlockStore, span: _Span) -> tuple[str, int, int]:
    """The characters that pieces of a body stand for, and where they stand."""
    body = corpus.text(span.block_id).body
    encoding = corpus.vocabulary.encode(body)
    stored = corpus.body_ids(np.asarray([span.block_id]), span.last + 1)[0]
    if not np.array_equal(stored, encoding.ids[: span.last + 1]):
        raise BadInputError(
            f"expected the text of block {span.block_id} to have the wordpieces stored "
            f"for it in {corpus.directory}, but it has others; prepare the corpus again"
        )
    start = int(encoding.offsets[span.first, 0])
    end = int(encoding.offsets[span.last, 1])
    return body[start:end], start, end


def _last_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return "… " + text[-_CONTEXT_CHARACTERS:].partition(" ")[2]


def _first_words(text: str) -> str:
    if len(text) <= _CONTEXT_CHARACTERS:
        return text
    return text[:_CONTEXT_CHARACTERS].rpartition(" ")[0] + " …"
