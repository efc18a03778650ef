"""Draws the charts of a report: the curves of each stage, and recall after each."""

import dataclasses
from collections.abc import Sequence

from markupsafe import Markup

from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    Comparison,
    recall_name,
)
from realm_jax.evaluation.figures import (
    DECIMALS,
    PERCENT,
    ValueFormat,
    line_chart,
    recall_chart,
)
from realm_jax.evaluation.findings import percent
from realm_jax.metrics import curves as curves_lib
from realm_jax.metrics.curves import Curve, find_curve, index_versions
from realm_jax.stages import title_of

_NATS = ValueFormat(signed=True)
_COUNT = ValueFormat(digits=0)
_SECONDS = ValueFormat(digits=3)


_RECALLS_DRAWN = (1, 5)
# What fits below an axis.
_SHORT_LABELS = {
    BEFORE_TRAINING: "untrained",
    AFTER_WARM_START: "warm start",
    AFTER_REALM: "REALM",
    AFTER_FINETUNING: "fine-tuning",
}


@dataclasses.dataclass(frozen=True)
class _Chart:
    """Presentation of a metric: its title, its caption and its axis.

    In a caption, {held_out_questions} becomes the questions with their split.
    """

    metric: str
    title: str
    caption: str
    value_format: ValueFormat = DECIMALS
    smooth: bool = True
    include_zero: bool = False


_CHARTS = (
    _Chart(
        curves_lib.LOSS,
        "Loss",
        "Of training examples, the mean over the steps since the line before.",
    ),
    _Chart(
        curves_lib.UTILITY,
        "Retrieval utility, training sentences",
        "log p(y|x) − log p(y|null, x), in nats. At zero, documents do not help.",
        value_format=_NATS,
        include_zero=True,
    ),
    _Chart(
        "held_out_utility",
        "Retrieval utility, held-out sentences",
        "The same in nats, without dropout, on sentences of the validation split: "
        "always the same ones, with every new index and at the end.",
        value_format=_NATS,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_accuracy",
        "Masked spans right, held-out sentences",
        "Validation split: share of the spans with every wordpiece right, over all "
        "documents.",
        value_format=PERCENT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_null_accuracy",
        "The same without documents",
        "Validation split: share of the spans that are right given the null document "
        "alone.",
        value_format=PERCENT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_null_retrieval",
        "Null document, held-out sentences",
        "Validation split: mean p(null|x), how much of the retrieval goes to no "
        "document at all.",
        value_format=PERCENT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        curves_lib.RECALL,
        "Recall@5, held-out questions",
        "Always the same {held_out_questions}, searched whenever a new index came into "
        "use.",
        value_format=PERCENT,
        smooth=False,
    ),
    _Chart(
        curves_lib.INDEX_AGE_STEPS,
        "Age of the index",
        "In steps, since its retriever was trained. A tick at the top: a new index.",
        value_format=_COUNT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "index_drift",
        "Drift of the embeddings",
        "Distance of a block's embedding in the index from a fresh one, as a share of "
        "its length, when the index was replaced.",
        value_format=PERCENT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "kept_neighbours",
        "Neighbours that stayed",
        "Share of the first 8 blocks of a query that a new index finds, too.",
        value_format=PERCENT,
        smooth=False,
    ),
    _Chart(
        "same_neighbours",
        "Queries answered alike",
        "Share of the queries for which both indexes find the same first 8 blocks.",
        value_format=PERCENT,
        smooth=False,
    ),
    _Chart(
        "retrieval_kl",
        "Divergence of p(z|x)",
        "KL of p(z|x) by the index from that by live embeddings, in nats, when the "
        "index was replaced.",
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "index_search_seconds",
        "Search",
        "Seconds to search an index for 32 queries, when it was replaced.",
        value_format=_SECONDS,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "index_swap_seconds",
        "Swap",
        "Seconds that training stood still for a new index to take its place; with "
        "blocking refreshes, for all of it to be made.",
        value_format=_SECONDS,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "builder_share",
        "Progress of the index builder",
        "How much of the next index was embedded.",
        value_format=PERCENT,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "in_batch_accuracy",
        "Right block in the batch",
        "How often a training sentence ranks its own block first among those of its "
        "batch.",
        value_format=PERCENT,
    ),
    _Chart(
        "answer_read",
        "Answer among what is read",
        "Training questions with a right span in one of the blocks that are read.",
        value_format=PERCENT,
    ),
    _Chart(
        "dev_exact_match",
        "Exact match, held-out questions",
        "Always the same questions, which are not trained on; the checkpoint that "
        "answers most of them is kept, evaluated and asked.",
        value_format=PERCENT,
        smooth=False,
    ),
    _Chart(
        "examples_per_second",
        "Speed",
        "Examples a second, whatever the time was spent on; the first steps compile.",
        value_format=_COUNT,
        smooth=False,
        include_zero=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class RenderedChart:
    """A chart as the page shows it."""

    title: str
    caption: str
    svg: Markup


def charts_by_stage(
    curves: Sequence[Curve], held_out_questions: str
) -> dict[str, list[RenderedChart]]:
    """Returns all charts that have data, by stage in the order the stages ran.

    Args:
      curves: the curves of the run.
      held_out_questions: what captions call the questions that pre-training searches.
    """
    stages: dict[str, list[RenderedChart]] = {}
    swaps = [version.first_used for version in index_versions(curves)[1:]]
    for stage in dict.fromkeys(curve.stage for curve in curves):
        for chart in _CHARTS:
            curve = curves_lib.measured(find_curve(curves, stage, chart.metric))
            if not curve.steps:
                continue
            svg = line_chart(
                curve,
                _description(chart, curve),
                value_format=chart.value_format,
                smooth=chart.smooth,
                include_zero=chart.include_zero,
                swaps=swaps if chart.metric == curves_lib.INDEX_AGE_STEPS else (),
            )
            caption = chart.caption.format(held_out_questions=held_out_questions)
            stages.setdefault(stage, []).append(
                RenderedChart(chart.title, caption, Markup(svg))
            )
    return stages


def _description(chart: _Chart, curve: Curve) -> str:
    show = chart.value_format.text
    return (
        f"{chart.title} of {title_of(curve.stage)}: {show(curve.values[0])} at step "
        f"{curve.steps[0]:,}, {show(curve.values[-1])} at step {curve.steps[-1]:,}, "
        f"between {show(min(curve.values))} and {show(max(curve.values))}"
    )


def recall_charts(comparison: Comparison, questions: str) -> list[RenderedChart]:
    """Returns charts of recall after each stage beside the baselines, if there are any.

    Args:
      comparison: the results.
      questions: what captions call the questions.
    """
    charts = []
    for k in _RECALLS_DRAWN if comparison.baselines else ():
        metric = recall_name(k)
        points = [
            (_SHORT_LABELS.get(row.label, row.label), row.metrics[metric])
            for row in comparison.rows
            if metric in row.metrics
        ]
        references = [
            (row.label, row.metrics[metric].mean) for row in comparison.baselines
        ]
        drawn = [*((name, interval.mean) for name, interval in points), *references]
        label = ", ".join(f"{name} {percent(recall)}" for name, recall in drawn)
        svg = recall_chart(f"stages-{metric}", points, references, f"{metric}: {label}")
        charts.append(
            RenderedChart(
                f"Recall@{k}, {questions}",
                "After each stage, with its 95% interval; dashed, what needs no "
                "training.",
                Markup(svg),
            )
        )
    return charts
