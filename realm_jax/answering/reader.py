"""Answers questions from a corpus: search, read, and the best span over all blocks.

The answer is the original text of the best span, never its decoded wordpieces: case,
accents and spacing are those of the document. Only spans of whole words can be answers
(`data/words.py`); probabilities are over these.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from realm_jax import multihost
from realm_jax.answering.answers import Answer, ReadDocument
from realm_jax.answering.hybrid import DEPTH, BM25Index, add_scores
from realm_jax.answering.search import (
    CorpusSearch,
    batches_by_length,
    fill,
    padded_lengths,
    search_embedded,
)
from realm_jax.data.blocks import BlockText
from realm_jax.data.words import PieceEdges, piece_edges
from realm_jax.errors import BadInputError
from realm_jax.models.span_reader import SpanReader, SpanScores
from realm_jax.objectives.open_qa import AnswerMarginalization, span_log_probs
from realm_jax.placement import num_parts, place_share
from realm_jax.types import NULL_BLOCK, Array, Neighbours


class Spans(NamedTuple):
    """Best spans and answer probabilities of a batch of questions.

    Attributes:
      best: index of the best span, counted over all blocks.
      log_probability: its log p(z, span|x).
      log_documents: log p(z|x) of each block.
      log_answers: log p(y|z,x) of each block, where y is the best span's wordpieces.
      begins: True at the positions where these wordpieces begin.
    """

    best: Int[Array, " question"]
    log_probability: Float[Array, " question"]
    log_documents: Float[Array, "question read"]
    log_answers: Float[Array, "question read"]
    begins: Bool[Array, "question read joined"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer(CorpusSearch):
    """A fine-tuned model with a corpus and its index, which determine an answer.

    Attributes:
      reader: the span scorer; its parameters are `params["reader"]`.
      num_read: blocks that are read per question (5 in the paper).
      marginalization: combination of retrieval and reading, as in training.
      retrieval_weight: factor of f(x, z) in this combination.
      words: BM25 over the corpus, whose scores are added to f(x, z); None for f(x, z)
        alone.
      mesh: mesh over whose devices questions are split when they are read, `batch_size`
        on each, so that an answer does not depend on how many devices there are; all
        its processes ask the same questions, and get the same answers. None for one
        device.
    """

    reader: SpanReader
    num_read: int
    marginalization: AnswerMarginalization
    retrieval_weight: float = 1.0
    words: BM25Index | None = None
    mesh: Mesh | None = None

    def answer(self, questions: Sequence[str]) -> list[Answer]:
        """Answers questions, in the given order."""
        ids = self.question_ids(questions)
        return self.read(questions, ids, self.find(questions, ids))

    def find(
        self, questions: Sequence[str], question_ids: Int[np.ndarray, "question query"]
    ) -> Neighbours:
        """Returns the `num_read` best blocks of each question, with their scores."""
        if self.words is None:
            return self.search(question_ids, self.num_read)
        embeddings = self.embed(question_ids)
        found = search_embedded(
            self.searcher, embeddings, self._depth, batch_size=self.batch_size
        )
        spread = (embeddings @ self.searcher.sample().T).std(axis=1)
        by_words = self.words.search(questions, self._depth)
        return add_scores(found, by_words, spread, self.num_read)

    @property
    def _depth(self) -> int:
        """Number of blocks that are searched for, some of which are read."""
        if self.words is None:
            return self.num_read
        return max(self.num_read, min(DEPTH, self.corpus.num_blocks))

    def compile(self, stop: threading.Event | None = None) -> None:
        """Compiles what questions and blocks of any length run, until `stop` is set.

        A length that is not compiled is compiled by the first question that has it.
        """
        query, rows = self.lengths.query, self.batch_size * num_parts(self.mesh)
        for length in padded_lengths(query):
            if stop is not None and stop.is_set():
                return
            self.search((np.arange(query) < length)[None].astype(np.int32), self._depth)
        for length in padded_lengths(self.lengths.joined):
            if stop is not None and stop.is_set():
                return
            scores = np.zeros((rows, self.num_read), np.float32)
            pieces = np.zeros((2, *scores.shape, length), np.int32)
            inputs = (*pieces, scores, *pieces.astype(bool))
            multihost.fetch(self._find_spans(*place_share(self.mesh, inputs)))

    def read(
        self,
        questions: Sequence[str],
        question_ids: Int[np.ndarray, "question query"],
        found: Neighbours,
    ) -> list[Answer]:
        """Returns the best span of each question over its best blocks.

        At least `num_read` neighbours of each question are `found`.
        """
        batch_size = self.batch_size * num_parts(self.mesh)
        ids = np.asarray(found.ids)[:, : self.num_read]
        scores = np.asarray(found.scores)[:, : self.num_read]
        bodies = self.corpus.body_lengths(ids).max(axis=-1)
        lengths = np.count_nonzero(question_ids, axis=-1) + bodies + 1
        longest = self.lengths.joined
        batches = batches_by_length(np.minimum(lengths, longest), longest, batch_size)
        begun = (
            self._begin(rows, question_ids[filled], ids[filled], scores[filled], length)
            for rows, length in batches
            for filled in [fill(rows, batch_size)]
        )
        answers: dict[int, Answer] = {}
        # In pairs: while the devices read a batch, the host prepares the next one.
        for batch, _ in itertools.pairwise(itertools.chain(begun, [None])):
            assert batch is not None
            asked = [questions[int(row)] for row in batch.rows]
            read = self._finish(asked, batch)
            answers.update(zip(batch.rows.tolist(), read, strict=True))
        return [answers[row] for row in range(len(question_ids))]

    def _begin(
        self,
        rows: Int[np.ndarray, " some"],
        question_ids: Int[np.ndarray, "question query"],
        block_ids: Int[np.ndarray, "question read"],
        scores: Float[np.ndarray, "question read"],
        length: int,
    ) -> "_Begun":
        """Hands a batch, of which `rows` are to be answered, to the devices."""
        width = np.count_nonzero(question_ids, axis=-1).max()
        ids, segment_ids = self.corpus.joined_ids(
            question_ids[:, :width], block_ids, length
        )
        bodies = self._bodies(np.unique(block_ids[block_ids != NULL_BLOCK]))
        body_starts = segment_ids.argmax(axis=-1)
        edges = self._word_edges(block_ids, body_starts, bodies, length)
        weighted = scores * np.float32(self.retrieval_weight)
        spans = self._find_spans(
            *place_share(self.mesh, (ids, segment_ids, weighted, *edges))
        )
        return _Begun(rows, block_ids, scores, body_starts, bodies, spans)

    def _find_spans(self, *inputs: Array) -> Spans:
        """Reads a batch on the devices; see `find_spans`."""
        return find_spans(
            self.reader, self.marginalization, self.params["reader"], *inputs
        )

    def _finish(self, questions: Sequence[str], begun: "_Begun") -> list[Answer]:
        """Waits for the devices, and returns the answers to a batch."""
        count, spans = len(begun.rows), multihost.fetch(begun.spans)
        columns = begun.block_ids, begun.scores, begun.body_starts, *spans
        rows = zip(questions, *(column[:count] for column in columns), strict=True)
        return [self._answer(begun.bodies, *row) for row in rows]

    def _bodies(self, block_ids: Int[np.ndarray, " block"]) -> Mapping[int, "_Body"]:
        """Returns text and words of each block."""
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
        length: int,
    ) -> tuple[
        Bool[np.ndarray, "question read joined"],
        Bool[np.ndarray, "question read joined"],
    ]:
        """Marks the first and the last piece of every word of a body."""
        begins, ends = np.zeros((2, *block_ids.shape, length), bool)
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
        row, span = divmod(int(best), begins.shape[-1] * self.reader.max_span)
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


class _Begun(NamedTuple):
    """A batch that the devices are reading; the last rows may be padding.

    Attributes:
      rows: which questions are to be answered.
      scores: f(x, z) of each.
      body_starts: where the body begins in the reader's input.
    """

    rows: Int[np.ndarray, " some"]
    block_ids: Int[np.ndarray, "question read"]
    scores: Float[np.ndarray, "question read"]
    body_starts: Int[np.ndarray, "question read"]
    bodies: Mapping[int, "_Body"]
    spans: Spans


class _Body(NamedTuple):
    """The text of a block, and its words."""

    text: BlockText
    edges: PieceEdges


def _probability(log_probability: float) -> float:
    """Returns the exponential, and 0 for infinite or NaN values of unread blocks."""
    return math.exp(log_probability) if math.isfinite(log_probability) else 0.0


# Static arguments compare by value, so a new index or corpus causes no recompilation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def find_spans(
    reader: SpanReader,
    marginalization: AnswerMarginalization,
    params: PyTree,
    ids: Int[Array, "question read joined"],
    segment_ids: Int[Array, "question read joined"],
    scores: Float[Array, "question read"],
    begins_word: Bool[Array, "question read joined"],
    ends_word: Bool[Array, "question read joined"],
) -> Spans:
    """Returns the best span of whole words of each question.

    Args:
      marginalization: combination of retrieval and reading, as in training.
      ids: `[CLS] x [SEP] body [SEP]` of each block that is read.
      segment_ids: 1 for body and the last [SEP].
      scores: f(x, z), weighted; -inf for a block that was not found.
      begins_word, ends_word: True at the first and at the last piece of every word of a
        body.
    """
    scored = reader.rolled().apply({"params": params}, ids, segment_ids)
    spans = cast(SpanScores, scored)
    ends = _windows(ends_word, reader.max_span)
    whole = (begins_word[..., None] & ends).reshape(spans.valid.shape)
    valid = spans.valid & whole & jnp.isfinite(scores)[:, :, None]
    log_probs = span_log_probs(scores, spans.logits, valid, marginalization)
    flat = log_probs.reshape(len(scores), -1)
    best = flat.argmax(axis=-1)
    same = valid & _same_pieces(ids, best, reader.max_span)
    log_documents = jax.nn.logsumexp(log_probs, axis=-1)
    log_joint = jax.nn.logsumexp(jnp.where(same, log_probs, -jnp.inf), axis=-1)
    return Spans(
        best,
        flat.max(axis=-1),
        log_documents,
        log_joint - log_documents,
        same.reshape(*ids.shape, -1).any(axis=-1),
    )


def _same_pieces(
    ids: Int[Array, "question read joined"],
    best: Int[Array, " question"],
    max_span: int,
) -> Bool[Array, "question read span"]:
    """Marks the spans with the wordpieces of the best one, including itself."""
    length, windows = ids.shape[-1], _windows(ids, max_span)
    document, span = jnp.divmod(best, length * max_span)
    start, width = jnp.divmod(span, max_span)
    # Row by row, so that devices which have a part of the questions exchange nothing.
    wanted = jax.vmap(lambda rows, *place: rows[place])(windows, document, start)
    widths = jnp.arange(max_span)
    beyond = widths > width[:, None, None, None]
    begins = ((windows == wanted[:, None, None]) | beyond).all(axis=-1)
    same = begins[..., None] & (widths == width[:, None, None, None])
    return same.reshape(*ids.shape[:-1], -1)


def _windows(
    values: Shaped[Array, "question read joined"], max_span: int
) -> Shaped[Array, "question read joined width"]:
    """Returns the values at each position and after it, 0 beyond the last."""
    length = values.shape[-1]
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, max_span - 1)))
    return jnp.stack([padded[..., w : w + length] for w in range(max_span)], -1)
