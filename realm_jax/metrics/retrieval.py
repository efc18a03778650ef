"""Measures rankings, with confidence intervals.

Of blocks: how often one that is relevant is among the first k. Of documents with graded
judgements, query by query: the definitions of trec_eval (`recall_k`, `ndcg_cut_k`, and
`recip_rank` of the first k), which BEIR, `pytrec_eval` and `ranx` share, but for the
order of equal scores. A grade above 0 is relevant.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import Question
from realm_jax.data.words import answer_tokens, normalise_title
from realm_jax.errors import BadInputError
from realm_jax.metrics.answers import contains_tokens, has_pattern

_CONFIDENCE = 0.95
_RESAMPLES = 10_000
# Below so many, resampling gives intervals that hold the mean too seldom.
_FEW = 30
# Bounds the memory for resampled values.
_VALUES_AT_A_TIME = 4_000_000
Grades = Mapping[int, int]
"""Document -> grade, of the documents that were judged for a query."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """The mean of some values with its interval, and their number.

    Attributes:
      groups: number of groups of values that depend on each other, such as articles of
        sentences; None where each value stands for itself.
    """

    mean: float
    low: float
    high: float
    count: int
    groups: int | None = None

    def percent(self, form: str = ".1f") -> str:
        """Returns rates, or differences of rates, in per cent: "50.0 [45.1, 54.8]"."""
        mean, low, high = (100 * value for value in (self.mean, self.low, self.high))
        return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def relevant_blocks(
    store: BlockStore,
    questions: Sequence[Question],
    among: Int[np.ndarray, "question neighbour"] | None = None,
    *,
    patterns_in: Collection[int] | None = None,
) -> list[frozenset[int]]:
    """Finds the blocks that answer each question.

    A block is relevant if its body contains an answer (`has_answer`, `has_pattern`)
    and, for a question that names its article, the block is of that article
    (`normalise_title`).

    Args:
      among: the blocks to judge for each question, -1 is ignored; by default the whole
        corpus. What was retrieved for a question suffices for its recall, and a corpus
        of Wikipedia's size takes minutes to read, hours where answers are patterns.
      patterns_in: the blocks in which answers that are patterns are looked for, out of
        those to judge; by default all of them.
    """
    judged = None if among is None else _rows_by_block(among)
    block_ids = np.array(range(store.num_blocks) if judged is None else sorted(judged))
    with_patterns = {
        row for row, question in enumerate(questions) if question.answers_are_patterns
    }
    answers = [
        [tokens for answer in question.answers if (tokens := answer_tokens(answer))]
        if row not in with_patterns
        else []
        for row, question in enumerate(questions)
    ]
    titles = [
        None if question.title is None else normalise_title(question.title)
        for question in questions
    ]
    asked_by_word: defaultdict[str, set[int]] = defaultdict(set)
    for row, alternatives in enumerate(answers):
        for tokens in alternatives:
            asked_by_word[tokens[0]].add(row)
    relevant: list[set[int]] = [set() for _ in questions]
    for block_id, block in zip(block_ids, store.iter_texts(block_ids), strict=True):
        words = answer_tokens(block.body)
        by_word = (asked_by_word.get(word, ()) for word in words)
        title = normalise_title(block.title)
        is_matched = patterns_in is None or int(block_id) in patterns_in
        rows = (with_patterns if is_matched else set[int]()).union(*by_word)
        for row in rows if judged is None else rows & judged[block_id]:
            question = questions[row]
            if titles[row] not in (None, title):
                continue
            if contains_tokens(words, answers[row]) or (
                row in with_patterns and has_pattern(block.body, question.answers)
            ):
                relevant[row].add(int(block_id))
    return [frozenset(blocks) for blocks in relevant]


def _rows_by_block(
    ids: Int[np.ndarray, "question neighbour"],
) -> dict[int, set[int]]:
    rows: defaultdict[int, set[int]] = defaultdict(set)
    for row, column in zip(*np.nonzero(ids >= 0), strict=True):
        rows[int(ids[row, column])].add(int(row))
    return dict(rows)


def articles_of(
    store: BlockStore, block_ids: Int[np.ndarray, " row"]
) -> Int[np.ndarray, " row"]:
    """Returns a number for the article of each block, of its own where there is none.

    That is -1, for which a row counts as an article.
    """
    texts = store.texts(np.maximum(block_ids, 0))
    _, articles = np.unique([text.source_id for text in texts], return_inverse=True)
    rows = len(block_ids) + np.arange(len(block_ids))
    return np.where(block_ids < 0, rows, articles)


def recall_at_k(
    retrieved: Int[np.ndarray, "question neighbour"],
    relevant: Sequence[Collection[int]],
    k: int,
) -> Float[np.ndarray, " question"]:
    """Returns 1.0 for each question with a relevant block in its top k, else 0.0.

    Blocks are given best first, -1 where nothing was found. A question without a
    relevant block counts 0.
    """
    if retrieved.shape[1] < k or retrieved.shape[0] != len(relevant):
        raise BadInputError(
            f"recall@{k} of {len(relevant)} questions needs block ids of shape "
            f"[{len(relevant)}, at least {k}], got {list(retrieved.shape)}; search "
            f"with k >= {k}."
        )
    hits = [
        any(int(block) in blocks for block in row if block >= 0)
        for row, blocks in zip(retrieved[:, :k], relevant, strict=True)
    ]
    return np.asarray(hits, np.float64)


def bootstrap_interval(
    values: Float[np.ndarray, " question"],
    groups: Int[np.ndarray, " question"] | None = None,
) -> Interval:
    """Returns the mean with its 95% percentile bootstrap interval (Efron 1979).

    Values of one group depend on each other, such as those of sentences of one article.
    With `groups`, which has that of each value, whole groups are drawn (Davison &
    Hinkley 1997, section 3.8).

    Of fewer than 30 values, or groups, it is Student's interval, for those of
    resampling are too narrow then; where values are 0 or 1 it is Wilson's score
    interval (1927), which stays between them. Wilson's is also that of any number of
    values that are all 0, or all 1. The same values give the same interval.
    """
    values = np.asarray(values, np.float64)
    sample = _Sample.of(values, groups)
    is_few, is_rate = len(sample.sums) < _FEW, bool(np.isin(values, (0.0, 1.0)).all())
    if is_rate and (is_few or sample.mean in (0.0, 1.0)):
        return sample.wilson_interval()
    return sample.student_interval() if is_few else sample.bootstrap()


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Values by their independent groups: the sum and the number of each."""

    sums: Float[np.ndarray, " group"]
    sizes: Int[np.ndarray, " group"]
    is_grouped: bool

    @classmethod
    def of(cls, values: np.ndarray, groups: np.ndarray | None) -> "_Sample":
        count, finite = len(values), np.isfinite(values)
        if not count or not finite.all():
            raise BadInputError(
                f"a bootstrap interval needs at least one value and only finite ones, "
                f"got {count} of which {int(finite.sum())} are finite; check the "
                "evaluation that made them."
            )
        if groups is None:
            return cls(values, np.ones(len(values), int), False)
        _, group_of = np.unique(groups, return_inverse=True)
        return cls(np.bincount(group_of, values), np.bincount(group_of), True)

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.sizes.sum())

    def bootstrap(self) -> Interval:
        count = len(self.sums)
        generator = np.random.default_rng(0)
        rows = max(1, _VALUES_AT_A_TIME // count)
        means = np.empty(_RESAMPLES)
        for start in range(0, _RESAMPLES, rows):
            part = means[start : start + rows]
            drawn = generator.integers(count, size=(len(part), count))
            number = self.sizes[drawn].sum(1) if self.is_grouped else count
            part[:] = self.sums[drawn].sum(1) / number
        tail = (1.0 - _CONFIDENCE) / 2.0
        low, high = np.quantile(means, [tail, 1.0 - tail])
        return self._interval(low, high)

    def student_interval(self, *, is_difference: bool = False) -> Interval:
        """Returns Student's interval, of groups by the linearised ratio of their sums.

        Of differences one more, of zero, counts in the deviation: a few that happen to
        be equal would have none.
        """
        count, number = len(self.sums), self.sizes.sum()
        if count == 1:
            # Nothing is known but that rates differ by 1 at most.
            return self._interval(self.mean - 1.0, self.mean + 1.0)
        errors = np.square(self.sums - self.mean * self.sizes).sum()
        if is_difference:
            errors += np.square(self.mean * number / count)
        deviation = math.sqrt(count / (count - 1) * errors) / number
        width = deviation * float(special.stdtrit(count - 1, 0.5 + _CONFIDENCE / 2.0))
        return self._interval(self.mean - width, self.mean + width)

    def wilson_interval(self) -> Interval:
        """Returns Wilson's score interval of a rate, a group counting as one value."""
        count = len(self.sums)
        z = statistics.NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2.0)
        shrink = count / (count + z**2)
        centre = shrink * self.mean + (1.0 - shrink) / 2.0
        variance = self.mean * (1.0 - self.mean) + z**2 / (4.0 * count)
        width = shrink * z * math.sqrt(variance / count)
        # A rate of 0 or 1 is itself a bound, but for rounding.
        low, high = min(centre - width, self.mean), max(centre + width, self.mean)
        return self._interval(max(0.0, low), min(1.0, high))

    def _interval(self, low: float, high: float) -> Interval:
        groups = len(self.sums) if self.is_grouped else None
        count = int(self.sizes.sum())
        return Interval(self.mean, float(low), float(high), count, groups)


def paired_bootstrap_difference(
    first: Float[np.ndarray, " question"],
    second: Float[np.ndarray, " question"],
    groups: Int[np.ndarray, " question"] | None = None,
) -> Interval:
    """Returns the mean of second - first, with its paired bootstrap interval.

    `groups` are as in `bootstrap_interval`; of few values or groups it is Student's
    interval here, too. Pairing by question removes the variance due to their
    difficulty, so the interval is narrower than two separate ones suggest.
    """
    if np.shape(first) != np.shape(second):
        raise BadInputError(
            f"a paired difference needs the same questions on both sides, got "
            f"{np.shape(first)} and {np.shape(second)} values; evaluate both on one "
            "set."
        )
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    sample = _Sample.of(differences, groups)
    if len(sample.sums) < _FEW:
        return sample.student_interval(is_difference=True)
    return sample.bootstrap()


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


def graded_recall(
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
