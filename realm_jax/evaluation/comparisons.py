"""Compares the models of a run, and a run with its control, by values per question.

Rates are between 0 and 1, likelihoods in nats, times in seconds.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax.metrics.retrieval import (
    RESAMPLES,
    Interval,
    bootstrap_interval,
    paired_bootstrap_difference,
)

BEFORE_TRAINING = "Before training"
AFTER_WARM_START = "After the warm start"
AFTER_REALM = "After REALM"
AFTER_FINETUNING = "After fine-tuning"
MOMENTS = {AFTER_REALM: "before fine-tuning", AFTER_FINETUNING: "after fine-tuning"}
"""Rows that a control also has, mapped to their names in the comparison of the two."""
EXACT_MATCH = "exact match"
F1 = "F1"
RANDOM_BLOCKS = "random blocks"
BM25 = "BM25"
WITHOUT_TOPIC = "without a topic"


def recall_name(k: int) -> str:
    """Returns the name of the recall@k metric in a comparison."""
    return f"recall@{k}"


@dataclasses.dataclass(frozen=True)
class StageTime:
    """Running time of a stage, and its number of updates (None if it has none)."""

    stage: str
    seconds: float
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """The results of a model: metric name -> mean with interval."""

    label: str
    metrics: Mapping[str, Interval]


@dataclasses.dataclass(frozen=True)
class Difference:
    """`after` minus `before` on the same questions, for one metric."""

    before: str
    after: str
    metric: str
    interval: Interval


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Results of models on the same questions.

    Attributes:
      rows: models in the order in which they were trained.
      differences: between successive models.
      baselines: what retrieves without having been trained.
    """

    rows: Sequence[ComparisonRow] = ()
    differences: Sequence[Difference] = ()
    baselines: Sequence[ComparisonRow] = ()

    @property
    def metrics(self) -> list[str]:
        """Every metric of any row, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def num_questions(self) -> int | None:
        """Number of values that each mean is over; None if the means differ in it."""
        counts = {i.count for row in self.rows for i in row.metrics.values()}
        return counts.pop() if len(counts) == 1 else None

    def find(self, label: str, metric: str) -> Interval | None:
        """Returns an entry of the table, None if it was not measured."""
        for row in self.rows:
            if row.label == label:
                return row.metrics.get(metric)
        return None

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The pairs of labels that have differences, in order."""
        return list(dict.fromkeys((d.before, d.after) for d in self.differences))

    def find_change(self, before: str, after: str, metric: str) -> Interval | None:
        """Returns a difference of the table, None if it was not measured."""
        for difference in self.differences:
            found = difference.before, difference.after, difference.metric
            if found == (before, after, metric):
                return difference.interval
        return None


@dataclasses.dataclass(frozen=True)
class ControlFigure:
    """A metric of the chain and of its control, on the same questions.

    Attributes:
      moment: one of the values of `MOMENTS`.
      metric: name of the metric.
      with_realm: value of the chain.
      without_realm: value of the control.
      difference: the first minus the second, paired by question.
    """

    moment: str
    metric: str
    with_realm: Interval
    without_realm: Interval
    difference: Interval


@dataclasses.dataclass(frozen=True)
class ControlComparison:
    """The chain and the same chain without REALM updates.

    Attributes:
      figures: metrics in the order in which they were measured.
      realm_time: time of pre-training; None if it was not measured.
      control_time: time of the continued warm start instead; None likewise.
    """

    figures: Sequence[ControlFigure]
    realm_time: StageTime | None = None
    control_time: StageTime | None = None

    def find(self, moment: str, metric: str) -> ControlFigure | None:
        """Returns an entry of the table, None if it was not measured."""
        for figure in self.figures:
            if (figure.moment, figure.metric) == (moment, metric):
                return figure
        return None


@dataclasses.dataclass(frozen=True)
class MaskedAccuracy:
    """Share of held-out masked spans that are predicted completely right.

    Attributes:
      with_retrieval: accuracy marginalised over the retrieved documents.
      null_only: accuracy with the null document alone.
      difference: the first minus the second on the same spans.
      utility: log p(y|x) - log p(y|null,x) of the same spans, in nats. It changes long
        before a span is predicted right.
    """

    with_retrieval: Interval
    null_only: Interval
    difference: Interval
    utility: Interval


def compare(
    per_question: Mapping[str, Mapping[str, np.ndarray]],
    baselines: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Returns all means and the differences of successive models, with intervals.

    Args:
      per_question: label -> metric -> one value per question. Values of one metric
        belong to the same questions under every label.
      baselines: the same of what was not trained.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.
    """
    labels = list(per_question)
    differences = [
        Difference(
            before,
            after,
            name,
            paired_bootstrap_difference(
                per_question[before][name], values, resamples=resamples, seed=seed
            ),
        )
        for before, after in itertools.pairwise(labels)
        for name, values in per_question[after].items()
        if name in per_question[before]
    ]
    return Comparison(
        rows_of(per_question, resamples=resamples, seed=seed),
        differences,
        rows_of(baselines or {}, resamples=resamples, seed=seed),
    )


def rows_of(
    per_question: Mapping[str, Mapping[str, np.ndarray]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Returns the mean of each metric with its interval, under each label.

    Args:
      per_question: label -> metric -> one value per question.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.
    """
    return [
        ComparisonRow(
            label,
            {
                name: bootstrap_interval(values, resamples=resamples, seed=seed)
                for name, values in metrics.items()
            },
        )
        for label, metrics in per_question.items()
    ]


def by_topic(
    topics: Sequence[str | None],
    values: Mapping[str, np.ndarray],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Returns a row for each topic, the most frequent one first.

    Args:
      topics: topic of each question, None where it has none.
      values: metric -> one value per question.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.

    Returns:
      The rows, with one for `WITHOUT_TOPIC` at the end if need be; empty if no question
      has a topic.
    """
    counts = collections.Counter(topic for topic in topics if topic is not None)
    named = np.asarray([WITHOUT_TOPIC if t is None else t for t in topics], object)
    order = [topic for topic, _ in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]
    if order and None in topics:
        order.append(WITHOUT_TOPIC)
    chosen = {topic: named == topic for topic in order}
    return rows_of(
        {
            topic: {name: array[rows] for name, array in values.items()}
            for topic, rows in chosen.items()
        },
        resamples=resamples,
        seed=seed,
    )


def compare_with_control(
    with_realm: Mapping[str, Mapping[str, np.ndarray]],
    without_realm: Mapping[str, Mapping[str, np.ndarray]],
    *,
    realm_time: StageTime | None = None,
    control_time: StageTime | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ControlComparison:
    """Returns the control's means and what REALM adds to them, with intervals.

    Args:
      with_realm: results of the chain: label -> metric -> one value per question.
      without_realm: the same of the control, with labels of `MOMENTS`. The chain has
        all of its metrics, for the same questions.
      realm_time: time of pre-training.
      control_time: time of the control's continued warm start.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.
    """
    figures = [
        ControlFigure(
            MOMENTS[label],
            name,
            bootstrap_interval(with_realm[label][name], resamples=resamples, seed=seed),
            bootstrap_interval(values, resamples=resamples, seed=seed),
            paired_bootstrap_difference(
                values, with_realm[label][name], resamples=resamples, seed=seed
            ),
        )
        for label, metrics in without_realm.items()
        for name, values in metrics.items()
    ]
    return ControlComparison(figures, realm_time, control_time)


def masked_accuracy(
    with_retrieval: np.ndarray,
    null_only: np.ndarray,
    utility: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> MaskedAccuracy:
    """Returns masked-span accuracy with intervals; arguments have a value per span."""
    return MaskedAccuracy(
        bootstrap_interval(with_retrieval, resamples=resamples, seed=seed),
        bootstrap_interval(null_only, resamples=resamples, seed=seed),
        paired_bootstrap_difference(
            null_only, with_retrieval, resamples=resamples, seed=seed
        ),
        bootstrap_interval(utility, resamples=resamples, seed=seed),
    )
