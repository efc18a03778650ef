"""Draws the charts of a report: the curves of each stage, and recall after each.

They are inline SVG, which takes colours and fonts from the page around it. Matplotlib
draws with placeholder colours, which are replaced by CSS variables, so that a picture
is readable on a light and on a dark page. Text remains text.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Collection, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    Comparison,
    recall_name,
)
from realm_jax.evaluation.templates import nats, percent
from realm_jax.metrics import curves as curves_lib
from realm_jax.metrics.calibration import Calibration
from realm_jax.metrics.curves import Curve
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import title_of

# Stand-ins for the colours of the page, by the names of their CSS variables.
_COLOURS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "series": "#040404",
}
_INK, _MUTED, _LINE, _SERIES = _COLOURS.values()
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.ymargin": 0.12,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "figure.figsize": (4.8, 2.1),
    "grid.color": _LINE,
    "grid.linewidth": 0.7,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
}
_MARKED_POINTS = 12
# The height of a line of text, as a share of an axis from 0 to 1.
_LINE_OF_TEXT = 0.1
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG = "http://www.w3.org/2000/svg"
# The page is HTML, whose parser knows these two prefixes and no other.
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

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
    """How a metric is drawn.

    Attributes:
      caption: below it; {held_out_questions} becomes the questions with their split.
      text: formats a value; where it is `percent`, no axis goes beyond 0 and 1, unless
        a value does.
      smooth: whether to draw a running mean over a pale line of the values.
      from_zero: whether the axis includes zero, which is then marked.
    """

    title: str
    caption: str
    text: Callable[[float], str] = percent
    smooth: bool = False
    from_zero: bool = True


_COUNT, _DECIMALS, _SECONDS = "{:,.0f}".format, "{:,.2f}".format, "{:,.3f}".format
# Whose axis need not include zero.
_FREE = functools.partial(_Chart, from_zero=False)
_SMOOTH = functools.partial(_FREE, smooth=True)
_CHARTS = {
    curves_lib.LOSS: _SMOOTH(
        "Loss",
        "Of training examples, the mean over the steps since the line before.",
        _DECIMALS,
    ),
    curves_lib.UTILITY: _Chart(
        "Retrieval utility, training sentences",
        "log p(y|x) − log p(y|null, x), in nats. At zero, documents do not help.",
        nats,
        smooth=True,
    ),
    curves_lib.HELD_OUT_UTILITY: _Chart(
        "Retrieval utility, held-out sentences",
        "The same in nats, without dropout, on sentences of the validation split: "
        "always the same ones, with every new index and at the end.",
        nats,
    ),
    "held_out_accuracy": _Chart(
        "Masked spans right, held-out sentences",
        "Validation split: share of the spans with every wordpiece right, over all "
        "documents.",
    ),
    "held_out_null_accuracy": _Chart(
        "The same without documents",
        "Validation split: share of the spans that are right given the null document "
        "alone.",
    ),
    "held_out_null_retrieval": _Chart(
        "Null document, held-out sentences",
        "Validation split: mean p(null|x), how much of the retrieval goes to no "
        "document at all.",
    ),
    curves_lib.RECALL: _FREE(
        "Recall@5, held-out questions",
        "Always the same {held_out_questions}, searched whenever a new index came into "
        "use.",
    ),
    curves_lib.INDEX_AGE_STEPS: _Chart(
        "Age of the index",
        "In steps, since its retriever was trained. A tick at the top: a new index.",
        _COUNT,
    ),
    "index_drift": _Chart(
        "Drift of the embeddings",
        "Distance of a block's embedding in the index from a fresh one, as a share of "
        "its length, when the index was replaced.",
    ),
    "kept_neighbours": _FREE(
        "Neighbours that stayed",
        "Share of the first 8 blocks of a query that a new index finds, too.",
    ),
    "same_neighbours": _FREE(
        "Queries answered alike",
        "Share of the queries for which both indexes find the same first 8 blocks.",
    ),
    "retrieval_kl": _Chart(
        "Divergence of p(z|x)",
        "KL of p(z|x) by the index from that by live embeddings, in nats, when the "
        "index was replaced.",
        _DECIMALS,
    ),
    "index_search_seconds": _Chart(
        "Search",
        "Seconds to search an index for 32 queries, when it was replaced.",
        _SECONDS,
    ),
    "index_swap_seconds": _Chart(
        "Swap",
        "Seconds that training stood still for a new index to take its place; with "
        "blocking refreshes, for all of it to be made.",
        _SECONDS,
    ),
    "builder_share": _Chart(
        "Progress of the index builder",
        "How much of the next index was embedded.",
    ),
    "in_batch_accuracy": _SMOOTH(
        "Right block in the batch",
        "How often a training sentence ranks its own block first among those of its "
        "batch.",
    ),
    "answer_read": _SMOOTH(
        "Answer among what is read",
        "Training questions with a right span in one of the blocks that are read.",
    ),
    "dev_exact_match": _FREE(
        "Exact match, held-out questions",
        "Always the same questions, which are not trained on; the checkpoint that "
        "answers most of them is kept, evaluated and asked.",
    ),
    "examples_per_second": _Chart(
        "Speed",
        "Examples a second, whatever the time was spent on; the first steps compile.",
        "{:,.1f}".format,
    ),
}


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

    Infinite values and NaN are left out. `held_out_questions` is what captions call the
    questions that pre-training searches.
    """
    stages: dict[str, list[RenderedChart]] = {}
    swaps = [version.first_used for version in curves_lib.index_versions(curves)[1:]]
    for stage in dict.fromkeys(curve.stage for curve in curves):
        for metric, chart in _CHARTS.items():
            curve = curves_lib.measured(curves_lib.find_curve(curves, stage, metric))
            if curve.steps:
                is_age = metric == curves_lib.INDEX_AGE_STEPS
                svg = _line_chart(curve, chart, swaps if is_age else ())
                caption = chart.caption.format(held_out_questions=held_out_questions)
                drawn = RenderedChart(chart.title, caption, svg)
                stages.setdefault(stage, []).append(drawn)
    return stages


def _line_chart(curve: Curve, chart: _Chart, swaps: Sequence[int]) -> Markup:
    """Draws one curve over steps; swaps are drawn as ticks at the top."""
    steps, values = np.asarray(curve.steps), np.asarray(curve.values)
    with matplotlib.rc_context(_STYLE):
        figure = Figure()
        axes = figure.add_subplot()
        if chart.from_zero:
            axes.axhline(0.0, color=_MUTED, linewidth=0.9, clip_on=False)
        if chart.smooth:
            axes.plot(steps, values, color=_SERIES, linewidth=0.8, alpha=0.35)
            values = curves_lib.running_mean(values)
        marked = len(steps) <= (1 if chart.smooth else _MARKED_POINTS)
        style = {"marker": "o", "markersize": 4} if marked else {}
        # A point at the edge of the axes is drawn whole.
        axes.plot(steps, values, color=_SERIES, linewidth=1.8, clip_on=False, **style)
        for step in swaps:
            axes.axvline(step, 0.95, 1.0, color=_MUTED, linewidth=1.0)
        _number_axes(axes, chart, curve)
        axes.annotate(
            chart.text(float(values[-1])),
            (steps[-1], values[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
        first, last, least, most = map(
            chart.text,
            (curve.values[0], curve.values[-1], min(curve.values), max(curve.values)),
        )
        label = (
            f"{chart.title} of {title_of(curve.stage)}: {first} at step {steps[0]:,}, "
            f"{last} at step {steps[-1]:,}, between {least} and {most}"
        )
        return _as_inline_svg(figure, f"{curve.stage}-{curve.metric}", label)


def _number_axes(axes: Axes, chart: _Chart, curve: Curve) -> None:
    counts = StrMethodFormatter("{x:,.0f}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(curve.steps) == 1:
        axes.set_xticks(curve.steps)
    axes.xaxis.set_major_formatter(counts)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=chart.text is _COUNT))
    if chart.text is _COUNT:
        axes.yaxis.set_major_formatter(counts)
    elif chart.text is percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0.0), min(high, max(1.0, *curve.values)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def recall_charts(comparison: Comparison, questions: str) -> list[RenderedChart]:
    """Returns charts of recall after each stage beside the baselines, if any."""
    caption = "After each stage, with its 95% interval; dashed, what needs no training."
    return [
        RenderedChart(f"Recall@{k}, {questions}", caption, _recall_chart(comparison, k))
        for k in (_RECALLS_DRAWN if comparison.baselines else ())
    ]


def _recall_chart(comparison: Comparison, k: int) -> Markup:
    metric = recall_name(k)
    stages = {
        _SHORT_LABELS.get(row.label, row.label): row.metrics[metric]
        for row in comparison.rows
        if metric in row.metrics
    }
    means = {name: interval.mean for name, interval in stages.items()}
    lines = {row.label: row.metrics[metric].mean for row in comparison.baselines}
    with matplotlib.rc_context(_STYLE):
        figure = Figure()
        axes = figure.add_subplot()
        # Recall below the axis, where no line crosses the numbers.
        names = [f"{name}\n{percent(mean)}" for name, mean in means.items()]
        _draw_intervals(axes, names, stages.values())
        axes.set_ylim(0.0, 1.0)
        _number_in_percent(axes.yaxis)
        place = -np.inf
        for name, value in sorted(lines.items(), key=lambda line: line[1]):
            axes.axhline(value, color=_MUTED, linestyle=(0, (4, 3)), clip_on=False)
            # Names do not overlap.
            place = max(value, place + _LINE_OF_TEXT)
            across = axes.get_yaxis_transform()
            text = f"{name} {percent(value)}"
            axes.text(1.01, place, text, transform=across, va="center", color=_MUTED)
        drawn = (f"{name} {percent(mean)}" for name, mean in (means | lines).items())
        label = f"{metric}: {', '.join(drawn)}"
        return _as_inline_svg(figure, f"stages-{metric}", label)


def calibration_chart(calibration: Calibration) -> RenderedChart:
    """Returns the reliability curve of answers."""
    bins = calibration.bins
    confidence = [found.confidence for found in bins]
    accuracy = [found.accuracy for found in bins]
    with matplotlib.rc_context(_STYLE):
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=_MUTED, linestyle=(0, (4, 3)), linewidth=0.9)
        _draw_intervals(axes, confidence, accuracy)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="p(y|x)")
        _number_in_percent(axes.xaxis)
        _number_in_percent(axes.yaxis)
        drawn = ", ".join(
            f"{percent(interval.mean)} right at {percent(mid)}"
            for mid, interval in zip(confidence, accuracy, strict=True)
        )
        svg = _as_inline_svg(figure, "calibration", f"Reliability curve: {drawn}")
    return RenderedChart(
        "Reliability of p(y|x)",
        "Share of right answers over their probability, with its 95% interval; dashed, "
        f"where both are equal. Calibration error {percent(calibration.error)}.",
        svg,
    )


def _draw_intervals(axes: Axes, places: Any, intervals: Collection[Interval]) -> None:
    means = [interval.mean for interval in intervals]
    below = [interval.mean - interval.low for interval in intervals]
    above = [interval.high - interval.mean for interval in intervals]
    style = {"color": _SERIES, "marker": "o", "clip_on": False}
    axes.errorbar(places, means, [below, above], **style)


def _number_in_percent(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(4))
    axis.set_major_formatter(PercentFormatter(1.0))


def _as_inline_svg(figure: Figure, salt: str, label: str) -> Markup:
    buffer = io.StringIO()
    # The salt keeps the ids of the charts of one page apart.
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = ElementTree.fromstring(buffer.getvalue())
    svg.attrib |= {"role": "img", "aria-label": label}
    # The page sets the size.
    del svg.attrib["width"], svg.attrib["height"]
    for group in svg.iter(f"{{{_SVG}}}g"):
        # Groups are numbered alike in every chart, and nothing refers to them.
        group.attrib.pop("id", None)
    text = ElementTree.tostring(svg, encoding="unicode")
    for name, stand_in in _COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    return Markup(text)
