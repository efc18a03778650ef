"""Finds the blocks of a corpus that are nearest to a text, by an index of them.

Questions of like length are searched for together, in batches of a few shapes.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.answering.answers import Document
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import query_rows
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import Searcher
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.types import NULL_BLOCK, Lengths, Neighbours

_BATCH = 64


def search_questions(
    config: RetrieverConfig,
    params: PyTree,
    searcher: Searcher,
    question_ids: np.ndarray,
    k: int,
    *,
    batch_size: int = _BATCH,
) -> Neighbours:
    """Embeds and searches at least one question, in batches of a few shapes.

    Questions are int32 [question, query]; each has k neighbours.
    """
    embeddings = embed_questions(config, params, question_ids, batch_size=batch_size)
    return search_embedded(searcher, embeddings, k, batch_size=batch_size)


def search_embedded(
    searcher: Searcher,
    embeddings: Float[np.ndarray, "question projection"],
    k: int,
    *,
    batch_size: int = _BATCH,
) -> Neighbours:
    """Searches for at least one question, in batches of one shape, on the host."""
    found = []
    for start in range(0, len(embeddings), batch_size):
        rows = np.arange(start, min(start + batch_size, len(embeddings)))
        queries = embeddings[fill(rows, batch_size)]
        found.append(jax.device_get(searcher.search(queries, k)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(embeddings)], *found)


def embed_questions(
    config: RetrieverConfig,
    params: PyTree,
    question_ids: np.ndarray,
    *,
    batch_size: int = _BATCH,
) -> Float[np.ndarray, "question projection"]:
    """Embeds one or more questions, int32 [question, query], in a few lengths."""
    embed = query_embedder(config)
    lengths = np.count_nonzero(question_ids, axis=-1)
    order, parts = [], []
    for rows, length in batches_by_length(lengths, question_ids.shape[-1], batch_size):
        ids = question_ids[fill(rows, batch_size), :length]
        order.append(rows)
        parts.append(multihost.fetch(embed(params, ids))[: len(rows)])
    return np.concatenate(parts)[np.argsort(np.concatenate(order))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusSearch:
    """A retriever with a corpus and its index, which find blocks for a text.

    Attributes:
      retriever: the towers; the query tower is used.
      params: {"retriever": ...}, and what else the model has.
      lengths: padded lengths, as in training.
      batch_size: questions that are searched at once; batches with fewer are padded, so
        that one shape is compiled for each padded length.
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
        return query_rows(questions, self.lengths.query, self.corpus.vocabulary)

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
        found = search_embedded(
            self.searcher, self.embed(question_ids), k, batch_size=self.batch_size
        )
        return Neighbours(np.asarray(found.ids), np.asarray(found.scores))

    def documents(
        self, block_ids: Int[np.ndarray, " k"], scores: Float[np.ndarray, " k"]
    ) -> list[Document]:
        """Returns what `search` found for one question, with texts; fewer than k blocks
        where an approximate searcher found fewer."""
        found = np.flatnonzero(block_ids != NULL_BLOCK)
        texts = self.corpus.texts(block_ids[found])
        return [
            Document(
                int(block_ids[i]),
                text.title,
                text.source_id,
                text.body,
                score=float(scores[i]),
            )
            for i, text in zip(found, texts, strict=True)
        ]


_PARTS = 4
_MULTIPLE = 8


def padded_lengths(longest: int) -> list[int]:
    """Returns the lengths that rows are padded to: quarters of the longest, ascending.

    Each is compiled once; more of them would save little padding.
    """
    quarters = (-(-longest * part // _PARTS) for part in range(1, _PARTS + 1))
    return sorted({min(q + -q % _MULTIPLE, longest) for q in quarters})


def batches_by_length(
    lengths: Int[np.ndarray, " row"], longest: int, batch_size: int
) -> Iterator[tuple[Int[np.ndarray, " some"], int]]:
    """Yields the rows of each batch, at most `batch_size`, and their padded length.

    That length depends on the row alone, so that what is computed of a row does not
    depend on the rows beside it. No row is longer than `longest`.
    """
    padded = np.array(padded_lengths(longest))
    chosen = padded[np.searchsorted(padded, lengths)]
    for length in np.unique(chosen):
        rows = np.flatnonzero(chosen == length)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size], int(length)


def fill(rows: Int[np.ndarray, " some"], count: int) -> Int[np.ndarray, " row"]:
    """Repeats the last row until there are `count`, as one shape is compiled."""
    return np.pad(rows, (0, count - len(rows)), mode="edge")
