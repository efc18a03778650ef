"""Answers questions from a corpus: search, read, and the best span over all blocks.

The answer is the original text of the best span, never its decoded wordpieces: case,
accents and spacing are those of the document. Only spans of whole words can be answers
(`data/words.py`); probabilities are over these.

Used in fine-tuning, to choose a checkpoint (`dev_exact_match.py`), and by evaluation
and `realm ask` (`evaluation/`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.features import query_row
from realm_jax.data.words import PieceEdges, piece_edges
from realm_jax.errors import BadInputError
from realm_jax.index.searchers import Searcher
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.models.span_reader import SpanReader, SpanScores
from realm_jax.objectives.open_qa import AnswerMarginalization, span_log_probs
from realm_jax.training.initialization import Lengths
from realm_jax.training.partitioning import place_share, whole_batches
from realm_jax.training.zero_shot_recall import embed_questions, search_questions
from realm_jax.types import NULL_BLOCK, Array, Neighbours

Characters = tuple[int, int]
"""Range [start, end) of characters in a block's body."""


@dataclasses.dataclass(frozen=True)
class ReadDocument:
    """A block that was read for a question.

    Attributes:
      block_id: id of the block.
      title: title of its article.
      source_id: identifies the article.
      body: its full text, of which the end may have been truncated for the reader.
      score: f(x, z), the inner product.
      probability: p(z|x) among the blocks that were read.
      answer_probability: p(y|z,x), summed over all spans of whole words with the
        answer's wordpieces.
      places: the occurrences of the answer in `body`, in order.
    """

    block_id: int
    title: str
    source_id: str
    body: str
    score: float
    probability: float
    answer_probability: float
    places: Sequence[Characters]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question, with its source.

    Attributes:
      text: the original characters of the best span; empty if there was none.
      log_probability: log p(z, span|x) of the best span; -inf if there was none.
      block_id: the block that contains it; -1 if there was none.
      start: first character of the answer in the block's body.
      end: one past its last character.
      documents: the blocks that were read, best first.
    """

    text: str
    log_probability: float
    block_id: int
    start: int
    end: int
    documents: Sequence[ReadDocument]

    @property
    def marginal(self) -> float:
        """The answer's probability p(y|x) over all blocks that were read."""
        return sum(d.probability * d.answer_probability for d in self.documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusSearch:
    """A retriever with a corpus and its index, which find blocks for a text.

    Attributes:
      retriever: the towers; the query tower is used.
      params: {"retriever": ...}, and what else the model has.
      corpus: the blocks.
      searcher: the index of this corpus.
      lengths: padded lengths, as in training.
      batch_size: questions that are searched at once; the last batch is padded, so that
        a single shape is compiled.
    """

    retriever: RetrieverConfig
    params: PyTree
    corpus: BlockStore
    searcher: Searcher
    lengths: Lengths
    batch_size: int = 8

    def question_ids(
        self, questions: Sequence[str]
    ) -> Int[np.ndarray, "question query"]:
        """Returns `[CLS] question [SEP]`; longer questions are truncated."""
        vocabulary, length = self.corpus.vocabulary, self.lengths.query
        encoded = vocabulary.encode_batch(questions)
        return np.stack([query_row(e.ids, length, vocabulary) for e in encoded])

    def part_that_fits(self, question: str) -> str:
        """Returns the part of a question that the model reads, in most cases all."""
        encoding = self.corpus.vocabulary.encode(question)
        room = self.lengths.query - 2
        if len(encoding.ids) <= room:
            return question
        return question[: int(encoding.offsets[room - 1, 1])]

    def embed(
        self, question_ids: Int[np.ndarray, "question query"]
    ) -> Float[np.ndarray, "question projection"]:
        """Returns the embedding of each question, on the host."""
        return embed_questions(
            self.retriever,
            self.params["retriever"],
            question_ids,
            batch_size=self.batch_size,
        )

    def search(
        self, question_ids: Int[np.ndarray, "question query"], k: int
    ) -> Neighbours:
        """Returns the k best blocks of each question, on the host."""
        found = search_questions(
            self.retriever,
            self.params["retriever"],
            self.searcher,
            question_ids,
            k,
            batch_size=self.batch_size,
        )
        return Neighbours(np.asarray(found.ids), np.asarray(found.scores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer(CorpusSearch):
    """A fine-tuned model with a corpus and its index, which determine an answer.

    Attributes:
      reader: the span scorer; its parameters are `params["reader"]`.
      num_read: blocks that are read per question (5 in the paper).
      marginalization: combination of retrieval and reading, as in training.
      mesh: mesh over which the questions of a batch are split when they are read; all
        its processes ask the same questions, and get the same answers. None for one
        device. A batch is then `batch_size` questions, or the next number that the mesh
        splits evenly.
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
        return self.read(ids, self.search(ids, self.num_read))

    def read(
        self, question_ids: Int[np.ndarray, "question query"], found: Neighbours
    ) -> list[Answer]:
        """Returns the best span of each question over its best blocks.

        Args:
          question_ids: output of `question_ids`.
          found: at least `num_read` neighbours of each question.

        Raises:
          BadInputError: a block's text does not match its stored wordpieces.
        """
        answers, batch_size = [], whole_batches(self.mesh, self.batch_size)
        for start in range(0, len(question_ids), batch_size):
            rows = np.arange(start, min(start + batch_size, len(question_ids)))
            filled = np.pad(rows, (0, batch_size - len(rows)), mode="edge")
            to_read = Neighbours(
                found.ids[filled, : self.num_read],
                found.scores[filled, : self.num_read],
            )
            answers += self._read_batch(question_ids[filled], to_read)[: len(rows)]
        return answers

    def _read_batch(
        self, question_ids: Int[np.ndarray, "question query"], found: Neighbours
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
            _find_spans(
                self.reader, self.marginalization, self.params["reader"], *inputs
            )
        )
        rows = zip(block_ids, scores, body_starts, *spans, strict=True)
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
        block_ids: Int[np.ndarray, " read"],
        scores: Float[np.ndarray, " read"],
        body_starts: Int[np.ndarray, " read"],
        best: int,
        log_probability: float,
        documents: Float[np.ndarray, " read"],
        answers: Float[np.ndarray, " read"],
        begins: Bool[np.ndarray, "read joined"],
    ) -> Answer:
        """Converts the row of one question in `_Spans` to an answer with text."""
        row, span = divmod(int(best), self.lengths.joined * self.reader.max_span)
        start, width = divmod(span, self.reader.max_span)
        read = {}
        for i in np.flatnonzero(block_ids != NULL_BLOCK):
            text, edges = bodies[int(block_ids[i])]
            pieces = np.flatnonzero(begins[i]) - body_starts[i]
            read[i] = ReadDocument(
                block_id=int(block_ids[i]),
                title=text.title,
                source_id=text.source_id,
                body=text.body,
                score=float(scores[i]),
                probability=_probability(documents[i]),
                answer_probability=_probability(answers[i]),
                places=[
                    (int(edges.offsets[p, 0]), int(edges.offsets[p + width, 1]))
                    for p in pieces
                ],
            )
        if not math.isfinite(log_probability):
            return Answer("", -math.inf, NULL_BLOCK, 0, 0, list(read.values()))
        document = read[row]
        start, end = document.places[np.count_nonzero(begins[row, :start])]
        return Answer(
            text=document.body[start:end],
            log_probability=float(log_probability),
            block_id=document.block_id,
            start=start,
            end=end,
            documents=list(read.values()),
        )


class _Body(NamedTuple):
    """The text of a block, and its words."""

    text: BlockText
    edges: PieceEdges


class _Spans(NamedTuple):
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


# Static arguments compare by value, so a new index or corpus causes no recompilation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _find_spans(
    reader: SpanReader,
    marginalization: AnswerMarginalization,
    params: PyTree,
    ids: Int[Array, "question read joined"],
    segment_ids: Int[Array, "question read joined"],
    scores: Float[Array, "question read"],
    begins_word: Bool[Array, "question read joined"],
    ends_word: Bool[Array, "question read joined"],
) -> _Spans:
    spans = cast(SpanScores, reader.apply({"params": params}, ids, segment_ids))
    ends = _windows(ends_word, reader.max_span)
    whole = (begins_word[..., None] & ends).reshape(spans.valid.shape)
    valid = spans.valid & whole & jnp.isfinite(scores)[:, :, None]
    log_probs = span_log_probs(scores, spans.logits, valid, marginalization)
    flat = log_probs.reshape(len(scores), -1)
    best = flat.argmax(axis=-1)
    same = valid & _same_pieces(ids, best, reader.max_span)
    log_documents = jax.nn.logsumexp(log_probs, axis=-1)
    log_joint = jax.nn.logsumexp(jnp.where(same, log_probs, -jnp.inf), axis=-1)
    return _Spans(
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
    wanted = windows[jnp.arange(len(ids)), document, start][:, None, None]
    widths = jnp.arange(max_span)
    beyond = widths > width[:, None, None, None]
    begins = ((windows == wanted) | beyond).all(axis=-1)
    same = begins[..., None] & (widths == width[:, None, None, None])
    return same.reshape(*ids.shape[:-1], -1)


def _windows(
    values: Shaped[Array, "question read joined"], max_span: int
) -> Shaped[Array, "question read joined width"]:
    """Returns the values at each position and after it, 0 beyond the last."""
    length = values.shape[-1]
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, max_span - 1)))
    return jnp.stack([padded[..., w : w + length] for w in range(max_span)], -1)


def _probability(log_probability: float) -> float:
    """Returns the exponential, and 0 for infinite or NaN values of unread blocks."""
    return math.exp(log_probability) if math.isfinite(log_probability) else 0.0
