"""Measures rankings of documents with graded judgements, query by query.

The definitions are those of trec_eval (`recall_k`, `ndcg_cut_k`, and `recip_rank` of
the first k), which BEIR, `pytrec_eval` and `ranx` share. A grade above 0 is relevant.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

Grades = Mapping[int, int]
"""Document -> grade, of the documents that were judged for a query."""


def best_of_groups(
    scores: Float[np.ndarray, "query block"], group_of: Int[np.ndarray, " block"]
) -> Float[np.ndarray, "query document"]:
    """Returns the highest score of each group of columns.

    `group_of` is the document of each block, from 0; each document has a block.
    """
    order = np.argsort(group_of, kind="stable")
    starts = np.searchsorted(group_of[order], np.arange(group_of.max() + 1))
    return np.maximum.reduceat(scores[:, order], starts, axis=1)


def best_first(
    scores: Float[np.ndarray, "query document"], k: int
) -> Int[np.ndarray, "query neighbour"]:
    """Returns the k best columns of each row, the first one first where two are equal.

    It is -1 where the score is -inf, which stands for "not found".
    """
    found = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(scores, found, 1) > -np.inf, found, -1)


def rank_of_best(
    scores: Float[np.ndarray, "query block"],
    relevant: Sequence[Collection[int]],
    excluded: Sequence[Collection[int]],
) -> Float[np.ndarray, " query"]:
    """Returns the rank of the best relevant column, from 1; inf if none was found.

    Columns of the same score are taken to be ranked before it. A score of -inf stands
    for "not found". Each row has a relevant column, which is not among those `excluded`
    from the ranking.
    """
    ranks = []
    for row, wanted, left_out in zip(scores, relevant, excluded, strict=True):
        best = row[list(wanted)].max()
        ranked = np.ones(len(row), bool)
        ranked[[*wanted, *left_out]] = False
        rank = 1 + np.count_nonzero(row[ranked] >= best)
        ranks.append(rank if best > -np.inf else np.inf)
    return np.array(ranks, np.float64)


def recall(
    found: Int[np.ndarray, "query neighbour"], judged: Sequence[Grades], k: int
) -> Float[np.ndarray, " query"]:
    """Returns the share of a query's relevant documents among the first k."""
    return _each(
        found,
        judged,
        lambda row, grades: (
            sum(grades.get(d, 0) > 0 for d in row[:k])
            / sum(grade > 0 for grade in grades.values())
        ),
    )


def reciprocal_rank(
    found: Int[np.ndarray, "query neighbour"], judged: Sequence[Grades], k: int
) -> Float[np.ndarray, " query"]:
    """Returns 1 / rank of the first relevant document, 0 beyond the first k."""

    def of_query(row: list[int], grades: Grades) -> float:
        ranks = (i for i, d in enumerate(row[:k], start=1) if grades.get(d, 0) > 0)
        return 1.0 / next(ranks, np.inf)

    return _each(found, judged, of_query)


def ndcg(
    found: Int[np.ndarray, "query neighbour"], judged: Sequence[Grades], k: int
) -> Float[np.ndarray, " query"]:
    """Returns the normalised discounted cumulative gain (Järvelin & Kekäläinen 2002).

    DCG is the sum of grade / log2(rank + 1) over the first k, and is divided by that of
    the best order of the judged documents.
    """
    discounts = 1.0 / np.log2(np.arange(k) + 2)

    def dcg(gains: list[int]) -> float:
        return float(np.maximum(gains, 0) @ discounts[: len(gains)])

    def of_query(row: list[int], grades: Grades) -> float:
        best = sorted(grades.values(), reverse=True)[:k]
        return dcg([grades.get(d, 0) for d in row[:k]]) / dcg(best)

    return _each(found, judged, of_query)


def _each(
    found: np.ndarray,
    judged: Sequence[Grades],
    measure: Callable[[list[int], Grades], float],
) -> Float[np.ndarray, " query"]:
    """Returns a measure of each query; each has a relevant document."""
    pairs = zip(found.tolist(), judged, strict=True)
    return np.array([measure(row, grades) for row, grades in pairs], np.float64)
