"""BM25 over the words of a corpus, and its fusion with a retriever.

Words find rare names that a retriever has never seen, and embeddings find paraphrases.
Each searches by itself, so that any searcher can take part. A search fuses their ranks;
what is read for an answer has the sum of their scores, for the reader weighs f(x, z).
"""

import logging
import sys
from collections.abc import Mapping, Sequence

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

    def search(self, questions: Sequence[str], k: int) -> Neighbours:
        """Returns the k best blocks of each question, best first.

        The id is -1 where no further block shares a word with the question.
        """
        found = _nothing(len(questions), k)
        if self._index is None or not questions:
            return found
        ids, scores = self._index.retrieve(
            [answer_tokens(question) for question in questions],
            k=min(k, self._num_blocks),
            show_progress=False,
            backend_selection="numpy",
        )
        is_found = scores > 0.0
        found.ids[:, : ids.shape[1]] = np.where(is_found, ids, NULL_BLOCK)
        found.scores[:, : ids.shape[1]] = np.where(is_found, scores, -np.inf)
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
    totals = []
    for rankings in zip(retrieved, by_words, strict=True):
        total: dict[int, float] = {}
        for ranking, weight in zip(rankings, (1.0, bm25_weight), strict=True):
            seen = {NULL_BLOCK}
            for rank, block in enumerate(ranking.tolist(), start=1):
                # A searcher of one's own may find a block twice.
                if block not in seen and weight:
                    seen.add(block)
                    score = weight / (_RANK_OFFSET + rank)
                    total[block] = total.get(block, 0.0) + score
        totals.append(total)
    return _best_of(totals, k)


def add_scores(
    retrieved: Neighbours,
    by_words: Neighbours,
    spread: Float[np.ndarray, " question"],
    k: int,
) -> Neighbours:
    """Adds BM25's scores to those of a retriever, in whose units they then are.

    A block's score is f(x, z) + spread * bm25 / the highest bm25 of the question. What
    the retriever did not find counts as the last that it found. `spread` is the
    standard deviation of f(x, z) over the corpus. Returns the k best of each question;
    the smaller id is first where two are equal.
    """
    totals = []
    for nearest, lexical, width in zip(
        _scores_by_block(retrieved), _scores_by_block(by_words), spread, strict=True
    ):
        last = min(nearest.values(), default=0.0)
        most = max(lexical.values(), default=1.0)
        totals.append(
            {
                block: nearest.get(block, last)
                + float(width) * lexical.get(block, 0.0) / most
                for block in {**nearest, **lexical}
            }
        )
    return _best_of(totals, k)


def _scores_by_block(found: Neighbours) -> list[dict[int, float]]:
    rows = zip(np.asarray(found.ids), np.asarray(found.scores), strict=True)
    return [
        {
            block: score
            for block, score in zip(ids.tolist(), scores.tolist(), strict=True)
            if block != NULL_BLOCK
        }
        for ids, scores in rows
    ]


def _best_of(totals: Sequence[Mapping[int, float]], k: int) -> Neighbours:
    """Returns the k best blocks of each question, by their scores."""
    found = _nothing(len(totals), k)
    for row, total in enumerate(totals):
        best = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:k]
        for place, (block, score) in enumerate(best):
            found.ids[row, place], found.scores[row, place] = block, score
    return found


def _nothing(num_questions: int, k: int) -> Neighbours:
    shape = (num_questions, k)
    return Neighbours(
        np.full(shape, NULL_BLOCK, np.int64), np.full(shape, -np.inf, np.float32)
    )
