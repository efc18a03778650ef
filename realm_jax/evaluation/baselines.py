"""Measures what finds blocks without having been trained: chance, and BM25.

A retriever that is no better than these has learned nothing, or nothing that counting
words does not give. Both are judged by the recall that judges the retriever, over the
same blocks and questions.
"""

import logging
import sys
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.comparisons import BM25, RANDOM_BLOCKS, recall_name
from realm_jax.metrics.answers import answer_tokens
from realm_jax.metrics.retrieval import recall_at_k

# Anserini's, which DPR and its successors compare with.
_K1, _B = 0.9, 0.4
_BLOCKS_AT_A_TIME = 4096


def baseline_recalls(
    corpus: BlockStore,
    questions: Sequence[str],
    relevant: Sequence[Collection[int]],
    *,
    recall_at: Sequence[int],
    max_bm25_blocks: int,
) -> dict[str, dict[str, Float[np.ndarray, " question"]]]:
    """Returns the recall of random blocks and of BM25, by label and metric.

    Args:
      corpus: the blocks.
      questions: the questions as text.
      relevant: the blocks that answer each question, among all of the corpus.
      recall_at: the values of k in recall@k.
      max_bm25_blocks: a larger corpus is not indexed for BM25, which would take it all
        into memory.
    """
    num_blocks = corpus.num_blocks
    found: dict[str, dict[str, np.ndarray]] = {
        RANDOM_BLOCKS: {
            recall_name(k): random_recall(relevant, num_blocks, k) for k in recall_at
        }
    }
    if num_blocks <= max_bm25_blocks:
        ids = bm25_neighbours(corpus, questions, max(recall_at))
        found[BM25] = {recall_name(k): recall_at_k(ids, relevant, k) for k in recall_at}
    return found


def random_recall(
    relevant: Sequence[Collection[int]], num_blocks: int, k: int
) -> Float[np.ndarray, " question"]:
    """Returns the probability that k blocks drawn at random hold a relevant one.

    Args:
      relevant: the relevant blocks of each question.
      num_blocks: number of blocks, of which k different ones are drawn.
      k: number of blocks drawn; all of them if there are no more.
    """
    counts = np.asarray([len(blocks) for blocks in relevant], np.int64)
    drawn = min(k, num_blocks)
    return 1.0 - stats.hypergeom.pmf(0, num_blocks, counts, drawn)


def bm25_neighbours(
    corpus: BlockStore, questions: Sequence[str], k: int
) -> Int[np.ndarray, "question neighbour"]:
    """Returns the k blocks with the highest BM25 score for each question, best first.

    Lucene's variant of BM25, over the words of title and body as `answer_tokens` splits
    them: lowercase, without articles, not stemmed.

    Args:
      corpus: the blocks.
      questions: the questions as text.
      k: neighbours per question.

    Returns:
      Block ids, -1 where no further block shares a word with the question.
    """
    # Its import tries JAX out, which only an evaluation should pay for.
    import bm25s

    # It asks for its debug messages to be shown.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    found = np.full((len(questions), k), -1, np.int64)
    words = _words_of_blocks(corpus)
    if not any(words):
        return found
    index = bm25s.BM25(method="lucene", k1=_K1, b=_B, backend="numpy")
    index.index(words, show_progress=False)
    ids, scores = index.retrieve(
        [answer_tokens(question) for question in questions],
        k=min(k, corpus.num_blocks),
        show_progress=False,
        backend_selection="numpy",
    )
    found[:, : ids.shape[1]] = np.where(scores > 0.0, ids, -1)
    return found


def _words_of_blocks(corpus: BlockStore) -> list[list[str]]:
    # Interned, for a text object a word would take eight times the memory.
    return [
        [sys.intern(word) for word in answer_tokens(f"{text.title} {text.body}")]
        for start in range(0, corpus.num_blocks, _BLOCKS_AT_A_TIME)
        for text in corpus.texts(
            np.arange(start, min(start + _BLOCKS_AT_A_TIME, corpus.num_blocks))
        )
    ]
