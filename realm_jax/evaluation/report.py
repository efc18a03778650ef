"""Writes the results of a run as an HTML page and as JSON.

`report.html` is self-contained and loads nothing. `report.json` has the same content:
the fields of `ReportData` and the findings, with null for numbers that are not finite.
"""

import dataclasses
import enum
import json
import math
import re
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from realm_jax.evaluation.charts import charts_by_stage, recall_charts
from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    EXACT_MATCH,
    F1,
    recall_name,
)
from realm_jax.evaluation.findings import (
    control_verdict,
    duration,
    nats,
    percent,
    points,
    verdicts,
)
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.stage_settings import (
    NOT_RECORDED,
    changed_while_running,
    flat_settings,
)
from realm_jax.evaluation.templates import page_environment
from realm_jax.evaluation.throughput import work_of_stages
from realm_jax.metrics import curves as curves_lib
from realm_jax.metrics.curves import Finding, Level, index_versions
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import title_of
from realm_jax.storage import open_store
from realm_jax.types import NULL_BLOCK

HTML_NAME = "report.html"
JSON_NAME = "report.json"
FORMAT_VERSION = 1


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
        "health": [dataclasses.asdict(f) for f in _health(data)],
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
        "flat": flat_settings,
        "changed": changed_while_running,
    }
    environment.globals |= {
        "points": points,
        "nats": nats,
        "made_at": curves_lib.made_at,
        "NOT_RECORDED": NOT_RECORDED,
    }
    return environment.get_template("report.html.jinja").render(
        data=data,
        run=data.run,
        health=_health(data),
        verdicts=verdicts(data),
        control_verdict=list(control_verdict(data.control, data.run.questions))
        if data.control
        else [],
        versions=index_versions(data.curves),
        tiles=_tiles(data),
        recall_charts=recall_charts(data.comparison, data.run.questions),
        stages=charts_by_stage(data.curves, data.run.held_out_questions),
        work=work_of_stages(data.curves),
        Level=Level,
        null_block=NULL_BLOCK,
    )


def _health(data: ReportData) -> list[Finding]:
    return curves_lib.health(data.curves, data.run.held_out_questions)


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
        detail = f"of {after.count:,} {data.run.questions}; {detail}"
        tiles.append(_Tile("Recall@5 after REALM", percent(after.mean), detail))
    answered, f1 = (find(AFTER_FINETUNING, metric) for metric in (EXACT_MATCH, F1))
    if answered:
        detail = f"of {answered.count:,} {data.run.questions}; {_range(answered)}"
        detail += f"; F1 {percent(f1.mean)}" if f1 else ""
        tiles.append(_Tile("Answered exactly", percent(answered.mean), detail))
    masked = data.masked_accuracy
    if masked:
        tiles.append(
            _Tile(
                "Masked spans right",
                percent(masked.with_retrieval.mean),
                f"of {masked.utility.count:,} sentences of the validation split; "
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
