"""Answers questions from a corpus: search, read, and the best span over all blocks.

The answer is the original text of the best span, never its decoded wordpieces: case,
accents and spacing are those of the document. Only spans of whole words can be answers
(`data/words.py`); probabilities are over these.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from realm_jax import multihost
from realm_jax.answering.answers import Answer, ReadDocument
from realm_jax.answering.search import CorpusSearch
from realm_jax.answering.spans import find_spans
from realm_jax.data.blocks import BlockText
from realm_jax.data.words import PieceEdges, piece_edges
from realm_jax.errors import BadInputError
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.placement import num_parts, place_share
from realm_jax.types import NULL_BLOCK, Neighbours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer(CorpusSearch):
    """A fine-tuned model with a corpus and its index, which determine an answer.

    Attributes:
      reader: the span scorer; its parameters are `params["reader"]`.
      num_read: blocks that are read per question (5 in the paper).
      marginalization: combination of retrieval and reading, as in training.
      mesh: mesh over whose devices questions are split when they are read, `batch_size`
        on each, so that an answer does not depend on how many devices there are; all
        its processes ask the same questions, and get the same answers. None for one
        device.
    """

    reader: SpanReader
    num_read: int
    marginalization: AnswerMarginalization
    mesh: Mesh | None = None

    def answer(self, questions: Sequence[str]) -> list[Answer]:
        """Answers questions, in the given order.

        Raises:
          BadInputError: a block's text does not match its stored wordpieces.
        """
        ids = self.question_ids(questions)
        return self.read(questions, ids, self.search(ids, self.num_read))

    def read(
        self,
        questions: Sequence[str],
        question_ids: Int[np.ndarray, "question query"],
        found: Neighbours,
    ) -> list[Answer]:
        """Returns the best span of each question over its best blocks.

        Args:
          questions: the questions.
          question_ids: output of `question_ids`.
          found: at least `num_read` neighbours of each question.

        Raises:
          BadInputError: a block's text does not match its stored wordpieces.
        """
        answers, batch_size = [], self.batch_size * num_parts(self.mesh)
        for start in range(0, len(question_ids), batch_size):
            rows = np.arange(start, min(start + batch_size, len(question_ids)))
            filled = np.pad(rows, (0, batch_size - len(rows)), mode="edge")
            to_read = Neighbours(
                found.ids[filled, : self.num_read],
                found.scores[filled, : self.num_read],
            )
            asked = [questions[int(row)] for row in filled]
            read = self._read_batch(asked, question_ids[filled], to_read)
            answers += read[: len(rows)]
        return answers

    def _read_batch(
        self,
        questions: Sequence[str],
        question_ids: Int[np.ndarray, "question query"],
        found: Neighbours,
    ) -> list[Answer]:
        block_ids, scores = np.asarray(found.ids), np.asarray(found.scores)
        ids, segment_ids = self.corpus.joined_ids(
            question_ids, block_ids, self.lengths.joined
        )
        bodies = self._bodies(np.unique(block_ids[block_ids != NULL_BLOCK]))
        body_starts = segment_ids.argmax(axis=-1)
        edges = self._word_edges(block_ids, body_starts, bodies)
        inputs = place_share(self.mesh, (ids, segment_ids, scores, *edges))
        spans = multihost.fetch(
            find_spans(
                self.reader, self.marginalization, self.params["reader"], *inputs
            )
        )
        rows = zip(questions, block_ids, scores, body_starts, *spans, strict=True)
        return [self._answer(bodies, *row) for row in rows]

    def _bodies(self, block_ids: Int[np.ndarray, " block"]) -> Mapping[int, "_Body"]:
        """Returns text and words of each block.

        Raises:
          BadInputError: a text does not match the stored wordpieces.
        """
        texts = self.corpus.texts(block_ids)
        encodings = self.corpus.vocabulary.encode_batch([text.body for text in texts])
        length = self.lengths.joined
        stored = self.corpus.body_ids(block_ids, length)
        bodies = {}
        for block, text, encoding, ids in zip(
            block_ids.tolist(), texts, encodings, stored, strict=True
        ):
            pieces = encoding.ids[:length]
            if not np.array_equal(np.trim_zeros(ids, "b"), pieces):
                raise BadInputError(
                    f"expected the text of block {block} to have the wordpieces stored "
                    f"for it in {self.corpus.directory}, but it has others; prepare "
                    "the corpus again"
                )
            bodies[block] = _Body(text, piece_edges(text.body, encoding.offsets))
        return bodies

    def _word_edges(
        self,
        block_ids: Int[np.ndarray, "question read"],
        body_starts: Int[np.ndarray, "question read"],
        bodies: Mapping[int, "_Body"],
    ) -> tuple[
        Bool[np.ndarray, "question read joined"],
        Bool[np.ndarray, "question read joined"],
    ]:
        """Marks the first and the last piece of every word of a body."""
        begins, ends = np.zeros((2, *block_ids.shape, self.lengths.joined), bool)
        for row in zip(*np.nonzero(block_ids != NULL_BLOCK), strict=True):
            edges, start = bodies[int(block_ids[row])].edges, body_starts[row]
            for marked, edge in ((begins, edges.begins), (ends, edges.ends)):
                here = marked[row][start:]
                here[: len(edge)] = edge[: len(here)]
        return begins, ends

    def _answer(
        self,
        bodies: Mapping[int, "_Body"],
        question: str,
        block_ids: Int[np.ndarray, " read"],
        scores: Float[np.ndarray, " read"],
        body_starts: Int[np.ndarray, " read"],
        best: int,
        log_probability: float,
        log_documents: Float[np.ndarray, " read"],
        log_answers: Float[np.ndarray, " read"],
        begins: Bool[np.ndarray, "read joined"],
    ) -> Answer:
        """Converts the row of one question in `Spans` to an answer with text."""
        row, span = divmod(int(best), self.lengths.joined * self.reader.max_span)
        first, width = divmod(span, self.reader.max_span)
        read = {}
        for i in np.flatnonzero(block_ids != NULL_BLOCK):
            text, edges = bodies[int(block_ids[i])]
            pieces = np.flatnonzero(begins[i]) - body_starts[i]
            read[i] = ReadDocument(
                block_id=int(block_ids[i]),
                title=text.title,
                source_id=text.source_id,
                text=text.body,
                score=float(scores[i]),
                probability=_probability(log_documents[i]),
                answer_probability=_probability(log_answers[i]),
                places=[
                    (int(edges.offsets[p, 0]), int(edges.offsets[p + width, 1]))
                    for p in pieces
                ],
            )
        documents = list(read.values())
        text, block, start, end = "", NULL_BLOCK, 0, 0
        if math.isfinite(log_probability):
            document = read[row]
            start, end = document.places[np.count_nonzero(begins[row, :first])]
            text, block = document.text[start:end], document.block_id
        return Answer(
            question=question,
            text=text,
            probability=sum(d.probability * d.answer_probability for d in documents),
            log_probability=float(log_probability) if text else -math.inf,
            block_id=block,
            start=start,
            end=end,
            documents=documents,
        )


class _Body(NamedTuple):
    """The text of a block, and its words."""

    text: BlockText
    edges: PieceEdges


def _probability(log_probability: float) -> float:
    """Returns the exponential, and 0 for infinite or NaN values of unread blocks."""
    return math.exp(log_probability) if math.isfinite(log_probability) else 0.0
