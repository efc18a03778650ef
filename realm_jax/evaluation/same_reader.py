"""Lets the fine-tuned reader read blocks that something else has found.

What a retriever is worth to its reader is the difference to what the same reader
answers from the blocks of BM25, of chance, of a retriever that was not trained, or from
a block that is known to contain an answer. p(z|x) of these blocks is our own
retriever's, over the blocks that are read, so that rows differ in their blocks alone.
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int

from realm_jax.answering.answers import Answer
from realm_jax.answering.reader import Answerer
from realm_jax.data.examples import Examples
from realm_jax.data.questions import Question
from realm_jax.errors import BadInputError
from realm_jax.evaluation import comparisons
from realm_jax.evaluation.answer_errors import training_answers
from realm_jax.evaluation.open_qa import OpenQaEvaluation, judge_answers, judge_blocks
from realm_jax.index.embedding_cache import KnownRows
from realm_jax.metrics.retrieval import relevant_blocks
from realm_jax.types import NULL_BLOCK, Neighbours


class Baseline(enum.StrEnum):
    """What finds the blocks instead of the fine-tuned retriever.

    Attributes:
      CLOSED_BOOK: nothing is read; the most frequent answer of the training questions.
      RANDOM: blocks drawn at random.
      BM25: the best by `BM25Index.search`.
      STARTING_POINT: the retriever before training.
      ORACLE: a single block, the first of those retrieved that contains an answer.
    """

    CLOSED_BOOK = "closed_book"
    RANDOM = "random"
    BM25 = "bm25"
    STARTING_POINT = "starting_point"
    ORACLE = "oracle"

    @property
    def label(self) -> str:
        """Its name in a comparison."""
        return _LABELS[self]


_LABELS = {
    Baseline.CLOSED_BOOK: "closed book",
    Baseline.RANDOM: comparisons.RANDOM_BLOCKS,
    Baseline.BM25: comparisons.BM25,
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
    num_questions: int, num_blocks: int, k: int, seed: int = 0
) -> Int[np.ndarray, "question k"]:
    """Draws k different blocks for each question; all of them if there are fewer."""
    drawn = np.random.default_rng(seed)
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
