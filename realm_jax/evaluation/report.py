"""Writes the results of a run as an HTML page and as JSON.

`report.html` is self-contained and loads nothing. `report.json` has the same content:
the fields of `ReportData` and the findings, with null for numbers that are not finite.
"""

import dataclasses
import enum
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from realm_jax.evaluation.figures import line_chart
from realm_jax.evaluation.findings import (
    control_verdict,
    duration,
    nats,
    percent,
    points,
    verdicts,
)
from realm_jax.evaluation.report_data import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    EXACT_MATCH,
    ReportData,
    recall_name,
)
from realm_jax.evaluation.templates import page_environment
from realm_jax.evaluation.throughput import work_of_stages
from realm_jax.metrics import curves as curves_lib
from realm_jax.metrics.curves import Curve, Level, find_curve, index_versions
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import title_of
from realm_jax.storage import open_store
from realm_jax.types import NULL_BLOCK

HTML_NAME = "report.html"
JSON_NAME = "report.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class _Chart:
    """Presentation of a metric: its title, its caption and its axis."""

    metric: str
    title: str
    caption: str
    value_format: Callable[[float], str] = "{:.2f}".format
    smooth: bool = True
    include_zero: bool = False


def _nats_on_axis(value: float) -> str:
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0"


_CHARTS = (
    _Chart(curves_lib.LOSS, "Loss", "Mean over the steps since the line before."),
    _Chart(
        curves_lib.UTILITY,
        "Retrieval utility",
        "log p(y|x) − log p(y|null, x), in nats. At zero, documents do not help.",
        value_format=_nats_on_axis,
        include_zero=True,
    ),
    _Chart(
        "held_out_utility",
        "Retrieval utility, held-out sentences",
        "The same in nats, without dropout, on sentences of the validation split: "
        "always the same ones, with every new index and at the end.",
        value_format=_nats_on_axis,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_accuracy",
        "Masked spans right, held-out sentences",
        "Share of their spans with every wordpiece right, over all documents.",
        value_format="{:.0%}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_null_accuracy",
        "The same without documents",
        "Share of these spans that are right given the null document alone.",
        value_format="{:.0%}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "held_out_null_retrieval",
        "Null document, held-out sentences",
        "Mean p(null|x): how much of the retrieval goes to no document at all.",
        value_format="{:.0%}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        curves_lib.RECALL,
        "Recall@5, held-out questions",
        "Always the same questions, searched whenever a new index came into use.",
        value_format="{:.0%}".format,
        smooth=False,
    ),
    _Chart(
        curves_lib.INDEX_AGE_STEPS,
        "Age of the index",
        "In steps, since its retriever was trained. A tick at the top: a new index.",
        value_format="{:,.0f}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "index_drift",
        "Drift of the embeddings",
        "Distance of a block's embedding in the index from a fresh one, as a share of "
        "its length, when the index was replaced.",
        value_format="{:.0%}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "kept_neighbours",
        "Neighbours that stayed",
        "Share of the first 8 blocks of a query that a new index finds, too.",
        value_format="{:.0%}".format,
        smooth=False,
    ),
    _Chart(
        "same_neighbours",
        "Queries answered alike",
        "Share of the queries for which both indexes find the same first 8 blocks.",
        value_format="{:.0%}".format,
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
        value_format="{:.3f}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "index_swap_seconds",
        "Swap",
        "Seconds that training stood still for a new index to take its place; with "
        "blocking refreshes, for all of it to be made.",
        value_format="{:.3f}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "builder_share",
        "Progress of the index builder",
        "How much of the next index was embedded.",
        value_format="{:.0%}".format,
        smooth=False,
        include_zero=True,
    ),
    _Chart(
        "in_batch_accuracy",
        "Right block in the batch",
        "How often a sentence ranks its own block first among those of its batch.",
        value_format="{:.0%}".format,
    ),
    _Chart(
        "answer_read",
        "Answer among what is read",
        "Questions with a right span in one of the blocks that are read.",
        value_format="{:.0%}".format,
    ),
    _Chart(
        "examples_per_second",
        "Speed",
        "Examples a second, whatever the time was spent on; the first steps compile.",
        value_format="{:,.0f}".format,
        smooth=False,
        include_zero=True,
    ),
)


def write_report(data: ReportData, directory: str) -> None:
    """Writes `report.html` and `report.json`, each atomically.

    Args:
      data: the results.
      directory: a local folder or gs://.

    Raises:
      BadInputError: the directory cannot be written.
    """
    page, content = render_html(data), render_json(data)
    store = open_store(directory)
    store.write(JSON_NAME, content.encode())
    store.write(HTML_NAME, page.encode())


def render_json(data: ReportData) -> str:
    """Returns the report as JSON; numbers that are not finite become null."""
    content = {
        "format_version": FORMAT_VERSION,
        **dataclasses.asdict(data),
        "health": [dataclasses.asdict(f) for f in curves_lib.health(data.curves)],
        "verdicts": [dataclasses.asdict(f) for f in verdicts(data)],
        "index_versions": [
            dataclasses.asdict(version) for version in index_versions(data.curves)
        ],
        "work": [dataclasses.asdict(work) for work in work_of_stages(data.curves)],
    }
    return json.dumps(_plain(content), ensure_ascii=False, indent=1, allow_nan=False)


def render_html(data: ReportData) -> str:
    """Returns the report as a self-contained page."""
    environment = page_environment()
    environment.filters |= {
        "percent": percent,
        "duration": duration,
        "mark": _mark,
        "stage": title_of,
    }
    environment.globals |= {"points": points, "nats": nats}
    return environment.get_template("report.html.jinja").render(
        data=data,
        run=data.run,
        health=curves_lib.health(data.curves),
        verdicts=verdicts(data),
        control_verdict=list(control_verdict(data.control)) if data.control else [],
        versions=index_versions(data.curves),
        tiles=_tiles(data),
        stages=_charts_by_stage(data.curves),
        work=work_of_stages(data.curves),
        Level=Level,
        null_block=NULL_BLOCK,
    )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A number in the summary of the page."""

    title: str
    value: str
    detail: str


def _tiles(data: ReportData) -> list[_Tile]:
    find = data.comparison.find
    tiles = []
    before, after = (
        find(row, recall_name(5)) for row in (AFTER_WARM_START, AFTER_REALM)
    )
    if after:
        detail = f"was {percent(before.mean)} before it" if before else _range(after)
        tiles.append(_Tile("Recall@5 after REALM", percent(after.mean), detail))
    answered = find(AFTER_FINETUNING, EXACT_MATCH)
    if answered:
        detail = f"of {answered.count:,} questions; {_range(answered)}"
        tiles.append(_Tile("Answered exactly", percent(answered.mean), detail))
    masked = data.masked_accuracy
    if masked:
        tiles.append(
            _Tile(
                "Masked spans right",
                percent(masked.with_retrieval.mean),
                f"{percent(masked.null_only.mean)} without documents; utility "
                f"{nats(masked.utility.mean)} nats",
            )
        )
    refreshes = len(index_versions(data.curves))
    if refreshes:
        of_blocks = f"of {data.run.corpus.num_blocks:,} blocks"
        tiles.append(_Tile("Index versions used", str(refreshes), of_blocks))
    return tiles


def _range(interval: Interval) -> str:
    return f"{percent(interval.low)} to {percent(interval.high)}"


@dataclasses.dataclass(frozen=True)
class _Figure:
    """A rendered chart."""

    title: str
    caption: str
    svg: Markup


def _charts_by_stage(curves: Sequence[Curve]) -> dict[str, list[_Figure]]:
    """Returns all charts that have data, by stage in the order the stages ran."""
    stages: dict[str, list[_Figure]] = {}
    swaps = [version.first_used for version in index_versions(curves)[1:]]
    for stage in dict.fromkeys(curve.stage for curve in curves):
        for chart in _CHARTS:
            curve = curves_lib.measured(find_curve(curves, stage, chart.metric))
            if not curve.steps:
                continue
            show = chart.value_format
            label = (
                f"{chart.title} of {title_of(stage)}: {show(curve.values[0])} at "
                f"step {curve.steps[0]:,}, {show(curve.values[-1])} at step "
                f"{curve.steps[-1]:,}, between {show(min(curve.values))} and "
                f"{show(max(curve.values))}"
            )
            svg = line_chart(
                curve,
                label,
                value_format=show,
                smooth=chart.smooth,
                include_zero=chart.include_zero,
                swaps=swaps if chart.metric == curves_lib.INDEX_AGE_STEPS else (),
            )
            stages.setdefault(stage, []).append(
                _Figure(chart.title, chart.caption, Markup(svg))
            )
    return stages


def _mark(text: str, part: str) -> Markup:
    """Escapes a text and highlights every occurrence of a part of it."""
    if not part.strip():
        return escape(text)
    pattern = re.compile(rf"(?<!\w)({re.escape(part)})(?!\w)", re.IGNORECASE)
    pieces = pattern.split(text)
    return Markup("").join(
        Markup("<mark>{}</mark>").format(piece) if index % 2 else escape(piece)
        for index, piece in enumerate(pieces)
    )


def _plain(value: Any) -> Any:
    """Converts values to those that JSON can represent."""
    match value:
        case enum.Enum():
            return value.value
        case np.generic():
            return _plain(value.item())
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value
