"""Compares the models of a run, and a run with its control, by values per question.

Rates are between 0 and 1, likelihoods in nats, times in seconds. Values are given as
label -> metric -> one value per question; those of a metric are of the same questions
under every label.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from realm_jax.metrics.retrieval import (
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
ANSWER_READ = "answer in what was read"
RANDOM_BLOCKS = "random blocks"
BM25 = "BM25"
ENCODER = "The encoder without a projection"
WITHOUT_TOPIC = "without a topic"

SENTENCES, QUERIES = "held-out sentences", "queries"
"""What an adapted encoder is measured with."""

Measured = Mapping[str, Mapping[str, np.ndarray]]


def recall_name(k: int) -> str:
    """Returns the name of the recall@k metric in a comparison."""
    return f"recall@{k}"


def fused_name(label: str) -> str:
    """Returns the label of a retriever that is fused with BM25."""
    return f"{label}, fused with BM25"


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
      differences: between successive models, or of each to the first.
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
    def steps(self) -> list[tuple[str, str]]:
        """The pairs of labels that have differences, in order."""
        return list(dict.fromkeys((d.before, d.after) for d in self.differences))

    def find(self, label: str, metric: str) -> Interval | None:
        """Returns an entry of the table, None if it was not measured."""
        found = {row.label: row.metrics for row in self.rows}
        return found.get(label, {}).get(metric)

    def find_change(self, before: str, after: str, metric: str) -> Interval | None:
        """Returns a difference of the table, None if it was not measured."""
        found = {(d.before, d.after, d.metric): d.interval for d in self.differences}
        return found.get((before, after, metric))


@dataclasses.dataclass(frozen=True)
class ControlFigure:
    """A metric of the chain and of its control, on the same questions.

    Attributes:
      moment: one of the values of `MOMENTS`.
      difference: the chain minus the control, paired by question.
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
      realm_time: time of pre-training; None if it was not measured.
      control_time: time of the continued warm start instead; None likewise.
    """

    figures: Sequence[ControlFigure]
    realm_time: StageTime | None = None
    control_time: StageTime | None = None

    def find(self, moment: str, metric: str) -> ControlFigure | None:
        """Returns an entry of the table, None if it was not measured."""
        found = {(figure.moment, figure.metric): figure for figure in self.figures}
        return found.get((moment, metric))


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


def paired(
    first: np.ndarray, second: np.ndarray, groups: np.ndarray | None = None
) -> tuple[Interval, Interval, Interval]:
    """Returns both means, and second - first by question, with their intervals.

    `groups` are as in `retrieval.bootstrap_interval`.
    """
    return (
        bootstrap_interval(first, groups),
        bootstrap_interval(second, groups),
        paired_bootstrap_difference(first, second, groups),
    )


def compare(per_question: Measured, baselines: Measured | None = None) -> Comparison:
    """Returns all means and the differences of successive models, with intervals.

    `baselines` are values of what was not trained.
    """
    return _compared(
        per_question, itertools.pairwise(per_question), rows_of(baselines or {})
    )


def compare_with_first(
    per_question: Measured, baselines: Measured, groups: np.ndarray | None = None
) -> Comparison:
    """Returns all means and the differences of each model to the first.

    `groups` are as in `retrieval.bootstrap_interval`.
    """
    first, *others = per_question
    pairs = ((first, other) for other in others)
    return _compared(per_question, pairs, rows_of(baselines, groups), groups)


def compare_with_baselines(
    baselines: Measured, model: tuple[str, Mapping[str, np.ndarray]]
) -> Comparison:
    """Returns all means, and the differences of a model to each baseline.

    `model` is its label and its values. Without baselines the comparison is empty.
    """
    if not baselines:
        return Comparison()
    label, values = model
    return _compared({**baselines, label: values}, ((one, label) for one in baselines))


def _compared(
    measured: Measured,
    pairs: Iterable[tuple[str, str]],
    baselines: Sequence[ComparisonRow] = (),
    groups: np.ndarray | None = None,
) -> Comparison:
    differences = [
        Difference(
            before,
            after,
            name,
            paired_bootstrap_difference(ours[name], values, groups),
        )
        for before, after in pairs
        for ours in (measured[before],)
        for name, values in measured[after].items()
        if name in ours
    ]
    return Comparison(rows_of(measured, groups), differences, baselines)


def rows_of(
    per_question: Measured, groups: np.ndarray | None = None
) -> list[ComparisonRow]:
    """Returns the mean of each metric with its interval, under each label."""
    return [
        ComparisonRow(
            label,
            {name: bootstrap_interval(of, groups) for name, of in metrics.items()},
        )
        for label, metrics in per_question.items()
    ]


def rows_of_groups(
    order: Sequence[str], groups: Sequence[str], values: Mapping[str, np.ndarray]
) -> list[ComparisonRow]:
    """Returns a row for each group in `order`; `groups` has that of each question."""
    named = np.asarray(groups, object)
    return rows_of(
        {group: {k: v[named == group] for k, v in values.items()} for group in order}
    )


def by_topic(
    topics: Sequence[str | None], values: Mapping[str, np.ndarray]
) -> list[ComparisonRow]:
    """Returns a row for each topic, the most frequent one first.

    `topics` has None for a question without one; a row for `WITHOUT_TOPIC` is then the
    last. There are no rows if no question has a topic.
    """
    counts = collections.Counter(sorted(topic for topic in topics if topic is not None))
    order = [topic for topic, _ in counts.most_common()]
    if order and None in topics:
        order.append(WITHOUT_TOPIC)
    named = [WITHOUT_TOPIC if topic is None else topic for topic in topics]
    return rows_of_groups(order, named, values)


def compare_with_control(
    with_realm: Measured,
    without_realm: Measured,
    *,
    realm_time: StageTime | None = None,
    control_time: StageTime | None = None,
) -> ControlComparison:
    """Returns the control's means and what REALM adds to them, with intervals.

    `without_realm` has labels of `MOMENTS`, and `with_realm` all of its metrics. The
    times are those of pre-training and of the control's continued warm start.
    """
    figures = []
    for label, metrics in without_realm.items():
        for name, values in metrics.items():
            without, with_it, gain = paired(values, with_realm[label][name])
            figures.append(ControlFigure(MOMENTS[label], name, with_it, without, gain))
    return ControlComparison(figures, realm_time, control_time)


def masked_accuracy(
    with_retrieval: np.ndarray,
    null_only: np.ndarray,
    utility: np.ndarray,
    articles: np.ndarray | None = None,
) -> MaskedAccuracy:
    """Returns masked-span accuracy with intervals; arguments have a value per span.

    Spans of one of the `articles` depend on each other.
    """
    without, with_it, gain = paired(null_only, with_retrieval, articles)
    return MaskedAccuracy(with_it, without, gain, bootstrap_interval(utility, articles))
