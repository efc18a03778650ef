"""BM25 over the words of a corpus, and its fusion with a retriever.

Words find rare names that a retriever has never seen, and embeddings find paraphrases.
Each ranks the blocks by itself; the fusion needs neither's scores, so that any searcher
can take part.
"""

import logging
import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.words import answer_tokens
from realm_jax.types import NULL_BLOCK, Neighbours

DEPTH = 1000
"""Blocks of each ranking that are fused."""

# Anserini's, which DPR and its successors compare with.
_K1, _B = 0.9, 0.4
BM25_WEIGHT = 0.5
"""Weight of BM25 beside the retriever's 1, chosen on Cranfield (docs/adapt.md)."""

# As in Cormack et al. 2009.
_RANK_OFFSET = 60


class BM25Index:
    """Ranks the blocks of a corpus by Lucene's variant of BM25.

    It counts the words of title and body as `answer_tokens` splits them: lowercase,
    without articles, not stemmed. All of them are in memory.
    """

    def __init__(self, corpus: BlockStore):
        """Reads and counts the words of all blocks."""
        # Its import tries JAX out, which only those who need it should pay for.
        import bm25s

        # It asks for its debug messages to be shown.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._num_blocks = corpus.num_blocks
        self._index = None
        words = _words_of_blocks(corpus)
        if any(words):
            self._index = bm25s.BM25(method="lucene", k1=_K1, b=_B, backend="numpy")
            self._index.index(words, show_progress=False)

    def search(
        self, questions: Sequence[str], k: int
    ) -> Int[np.ndarray, "question neighbour"]:
        """Returns the k best blocks of each question, best first.

        The id is -1 where no further block shares a word with the question.
        """
        found = np.full((len(questions), k), NULL_BLOCK, np.int64)
        if self._index is None or not questions:
            return found
        ids, scores = self._index.retrieve(
            [answer_tokens(question) for question in questions],
            k=min(k, self._num_blocks),
            show_progress=False,
            backend_selection="numpy",
        )
        found[:, : ids.shape[1]] = np.where(scores > 0.0, ids, NULL_BLOCK)
        return found

    def scores(self, questions: Sequence[str]) -> Float[np.ndarray, "question block"]:
        """Returns the scores of all blocks, -inf without a word of the question."""
        found = np.zeros((len(questions), self._num_blocks), np.float32)
        for row, question in zip(found, questions, strict=True):
            if self._index is not None and (words := answer_tokens(question)):
                row[:] = self._index.get_scores(words)
        return np.where(found > 0.0, found, -np.inf)


def _words_of_blocks(corpus: BlockStore) -> list[list[str]]:
    # Interned, for a text object a word would take eight times the memory.
    return [
        [sys.intern(word) for word in answer_tokens(f"{text.title} {text.body}")]
        for text in corpus.iter_texts()
    ]


def fuse(
    retrieved: Int[np.ndarray, "question neighbour"],
    by_words: Int[np.ndarray, "question other"],
    k: int,
    *,
    bm25_weight: float = BM25_WEIGHT,
) -> Neighbours:
    """Fuses the rankings of a retriever and of BM25 by their reciprocal ranks.

    A block's score is the sum of weight / (60 + rank) over the rankings that have it
    (Cormack et al. 2009), its rank counted from 1. Ids of -1 are no blocks. Returns the
    k best of each question; the smaller id is first where two are equal.
    """
    ids = np.full((len(retrieved), k), NULL_BLOCK, np.int64)
    scores = np.full((len(retrieved), k), -np.inf, np.float32)
    for row, rankings in enumerate(zip(retrieved, by_words, strict=True)):
        total: dict[int, float] = {}
        for ranking, weight in zip(rankings, (1.0, bm25_weight), strict=True):
            seen = {NULL_BLOCK}
            for rank, block in enumerate(ranking.tolist(), start=1):
                # A searcher of one's own may find a block twice.
                if block not in seen and weight:
                    seen.add(block)
                    score = weight / (_RANK_OFFSET + rank)
                    total[block] = total.get(block, 0.0) + score
        best = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:k]
        for place, (block, score) in enumerate(best):
            ids[row, place], scores[row, place] = block, score
    return Neighbours(ids, scores)
