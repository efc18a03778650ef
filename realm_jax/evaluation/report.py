"""Writes the results of a run as an HTML page and as JSON.

`report.html` is self-contained and loads nothing. `report.json` has the same content:
the fields of `ReportData` and the findings, with null for numbers that are not finite.
"""

import dataclasses
import re
from typing import Any

from markupsafe import Markup, escape

from realm_jax.evaluation.charts import (
    calibration_chart,
    charts_by_stage,
    recall_charts,
)
from realm_jax.evaluation.findings import tiles, verdicts
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.templates import as_json, page_environment, write_page
from realm_jax.evaluation.throughput import work_of_stages
from realm_jax.metrics.curves import health, index_versions, made_at
from realm_jax.run_record import NOT_RECORDED, changed_settings, flat_texts
from realm_jax.types import NULL_BLOCK

_NAME = "report"
HTML_NAME, JSON_NAME = f"{_NAME}.html", f"{_NAME}.json"
FORMAT_VERSION = 1


def write_report(data: ReportData, directory: str) -> None:
    """Writes `report.html` and `report.json` to a folder, local or gs://."""
    write_page(directory, _NAME, page=render_html(data), content=render_json(data))


def render_json(data: ReportData) -> str:
    """Returns the report as JSON; numbers that are not finite become null."""
    derived = _derived(data).items()
    return as_json(
        {
            "format_version": FORMAT_VERSION,
            **dataclasses.asdict(data),
            **{name: list(map(dataclasses.asdict, found)) for name, found in derived},
        }
    )


def render_html(data: ReportData) -> str:
    """Returns the report as a self-contained page."""
    environment = page_environment(
        mark=_mark, flat=flat_texts, changed=changed_settings
    )
    return environment.get_template("report.html.jinja").render(
        data=data,
        run=data.run,
        tiles=tiles(data),
        recall_charts=recall_charts(data.comparison, data.run.questions),
        calibration_charts=[calibration_chart(data.calibration)]
        if data.calibration
        else [],
        stages=charts_by_stage(data.curves, data.run.held_out_questions),
        made_at=made_at,
        null_block=NULL_BLOCK,
        NOT_RECORDED=NOT_RECORDED,
        **_derived(data),
    )


def _derived(data: ReportData) -> dict[str, list[Any]]:
    """Returns what follows from the results, by its name in report.json."""
    return {
        "health": health(data.curves, data.run.held_out_questions),
        "verdicts": verdicts(data),
        "index_versions": index_versions(data.curves),
        "work": work_of_stages(data.curves),
    }


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
