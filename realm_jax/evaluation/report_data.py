"""Provides the content of a report as plain data that can be written as JSON.

Probabilities and rates are between 0 and 1, likelihoods in nats, times in seconds.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax.metrics.curves import Curve
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


def recall_name(k: int) -> str:
    """Returns the name of the recall@k metric in a comparison."""
    return f"recall@{k}"


@dataclasses.dataclass(frozen=True)
class CorpusInfo:
    """The corpus that was searched.

    Attributes:
      name: name of the corpus.
      num_documents: number of articles.
      num_blocks: number of blocks.
      fingerprint: fingerprint of the block store.
      attribution: source and licence of the text, for the foot of the page.
    """

    name: str
    num_documents: int
    num_blocks: int
    fingerprint: str
    attribution: str = ""


@dataclasses.dataclass(frozen=True)
class StageTime:
    """Running time of a stage, and its number of updates (None if it has none)."""

    stage: str
    seconds: float
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Description of a run and its machine.

    Attributes:
      title: title of the page.
      finished: date and time, as displayed.
      corpus: the corpus that was searched.
      parameters: model -> number of parameters.
      settings: name -> value, for repeating the run.
      machine: description of the machine.
      versions: package -> version.
      stages: stages in the order in which they ran.
    """

    title: str
    finished: str
    corpus: CorpusInfo
    parameters: Mapping[str, int]
    settings: Mapping[str, str]
    machine: str
    versions: Mapping[str, str]
    stages: Sequence[StageTime] = ()

    @property
    def seconds(self) -> float:
        """Time of all stages, in seconds."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def longest_seconds(self) -> float:
        """Time of the longest stage, in seconds."""
        return max((stage.seconds for stage in self.stages), default=0.0)


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
    """Models in the order in which they were trained, and differences between them."""

    rows: Sequence[ComparisonRow] = ()
    differences: Sequence[Difference] = ()

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


@dataclasses.dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint of pre-training, and the last for comparison.

    Attributes:
      step: step of the checkpoint with the highest held-out utility.
      utility: its mean retrieval utility on held-out sentences, in nats.
      last_step: step of the last checkpoint.
      last_utility: its utility; None if it was not measured.
    """

    step: int
    utility: float
    last_step: int
    last_utility: float | None = None


@dataclasses.dataclass(frozen=True)
class ExampleDocument:
    """A document of an example; the null document has no title and no snippet.

    Attributes:
      block_id: -1 for the null document.
      title: title of its article.
      snippet: the beginning of its body, or the part around the answer.
      retrieval_probability: p(z|x).
      answer_probability: p(y|z,x).
    """

    block_id: int
    title: str
    snippet: str
    retrieval_probability: float
    answer_probability: float


@dataclasses.dataclass(frozen=True)
class MaskedExample:
    """A masked sentence and the effect of retrieval on it (REALM, table 3).

    Attributes:
      before: the sentence up to the masked span, with the space before it, if any.
      answer: the masked span.
      after: the sentence after the masked span, with the space after it, if any.
      documents: all candidates, the null document included.
      marginal: p(y|x).
    """

    before: str
    answer: str
    after: str
    documents: Sequence[ExampleDocument]
    marginal: float


@dataclasses.dataclass(frozen=True)
class AnsweredQuestion:
    """A question of the test set with its answer and where it was found.

    Attributes:
      question: the question.
      references: right answers.
      answer: the original characters of the best span; empty if there was none.
      correct: whether it is right by exact match.
      probability: probability of the answer's span among all spans that were read.
      title: article of the block in which it was found.
      before: text of the block before the answer.
      after: text of the block after the answer.
    """

    question: str
    references: Sequence[str]
    answer: str
    correct: bool
    probability: float
    title: str
    before: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The content of a report; parts that were not measured are empty."""

    run: RunInfo
    curves: Sequence[Curve] = ()
    comparison: Comparison = Comparison()
    control: ControlComparison | None = None
    masked_accuracy: MaskedAccuracy | None = None
    examples: Sequence[MaskedExample] = ()
    questions: Sequence[AnsweredQuestion] = ()
    best_checkpoint: BestCheckpoint | None = None


def compare(
    per_question: Mapping[str, Mapping[str, np.ndarray]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Returns all means and the differences of successive models, with intervals.

    Args:
      per_question: label -> metric -> one value per question. Values of one metric
        belong to the same questions under every label.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.
    """
    rows = [
        ComparisonRow(
            label,
            {
                name: bootstrap_interval(values, resamples=resamples, seed=seed)
                for name, values in metrics.items()
            },
        )
        for label, metrics in per_question.items()
    ]
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
    return Comparison(rows, differences)


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
