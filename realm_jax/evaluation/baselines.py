"""Measures what finds blocks without having been trained: chance, and BM25.

A retriever that is no better than these has learned nothing, or nothing that counting
words does not give. Both are judged by the recall that judges the retriever, over the
same blocks and questions.
"""

import logging
from collections.abc import Callable, Collection, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import Question
from realm_jax.evaluation.comparisons import BM25, RANDOM_BLOCKS, recall_name
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks

# Times that the patterns of a question are matched in a block: 15 microseconds each.
_MOST_MATCHED = 4_000_000

_log = logging.getLogger(__name__)


def baseline_recalls(
    corpus: BlockStore,
    questions: Sequence[Question],
    *,
    recall_at: Sequence[int],
    max_blocks: int,
    bm25: Callable[[], Int[np.ndarray, "question neighbour"]] | None = None,
) -> dict[str, dict[str, Float[np.ndarray, " question"]]]:
    """Returns the recall of random blocks and of BM25, by label and metric.

    Where answers are patterns and matching all of them in all blocks would take more
    than a minute or so, random blocks are those of a sample; their label says so. A
    corpus of more than `max_blocks` is not measured, because all of it would have to be
    read: by chance, how many blocks answer a question decides, and BM25 takes every
    word into memory. `bm25` returns what `BM25Index.search` finds, where others need
    it, too.
    """
    num_blocks = corpus.num_blocks
    if num_blocks > max_blocks:
        _log.log(
            logging.WARNING if max_blocks else logging.DEBUG,
            "random blocks and BM25 are left out: the corpus has %s blocks and "
            "MAX_BM25_BLOCKS is %s",
            f"{num_blocks:,}",
            f"{max_blocks:,}",
        )
        return {}
    with_patterns = np.array([q.answers_are_patterns for q in questions], bool)
    sample = _sample(num_blocks, int(with_patterns.sum()), max(recall_at))
    relevant = relevant_blocks(corpus, questions, patterns_in=sample)
    texts = [question.question for question in questions]
    ids = bm25() if bm25 else BM25Index(corpus).search(texts, max(recall_at))
    label, judged, found = RANDOM_BLOCKS, np.full(len(questions), num_blocks), relevant
    if sample is not None:
        label = f"{RANDOM_BLOCKS} (estimated)"
        judged = np.where(with_patterns, len(sample), num_blocks)
        found = relevant_blocks(corpus, questions, ids)
    return {
        label: {recall_name(k): random_recall(relevant, judged, k) for k in recall_at},
        BM25: {recall_name(k): recall_at_k(ids, found, k) for k in recall_at},
    }


def _sample(num_blocks: int, num_questions: int, k: int) -> frozenset[int] | None:
    """Returns the blocks, at least k, in which patterns are matched; None for all."""
    size = max(k, _MOST_MATCHED // max(1, num_questions))
    if size >= num_blocks:
        return None
    _log.warning(
        "the recall of random blocks is estimated from %s of %s blocks for the %s "
        "questions whose answers are patterns; all would take long",
        f"{size:,}",
        f"{num_blocks:,}",
        f"{num_questions:,}",
    )
    drawn = np.random.default_rng(0).choice(num_blocks, size, replace=False)
    return frozenset(drawn.tolist())


def random_recall(
    relevant: Sequence[Collection[int]],
    num_blocks: int | Int[np.ndarray, " question"],
    k: int,
) -> Float[np.ndarray, " question"]:
    """Returns the probability that k blocks drawn at random hold a relevant one.

    Different blocks are drawn, all if there are no more than k. `num_blocks` is one
    number for all questions, or one each. Of relevant blocks in a random sample it is
    an estimate without bias, for k blocks of the sample are k blocks of all.
    """
    counts = np.asarray([len(blocks) for blocks in relevant], np.int64)
    drawn = np.minimum(k, num_blocks)
    return 1.0 - stats.hypergeom.pmf(0, num_blocks, counts, drawn)
