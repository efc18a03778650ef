"""Writes the results of a run as an HTML page and as JSON.

`report.html` is self-contained and loads nothing. `report.json` has the same content:
the fields of `ReportData` and the findings, with null for numbers that are not finite.
"""

import dataclasses
import re
from collections.abc import Iterator

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
from realm_jax.evaluation.findings import verdicts
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.stage_settings import (
    NOT_RECORDED,
    changed_settings,
    flat_settings,
)
from realm_jax.evaluation.templates import (
    as_json,
    nats,
    page_environment,
    percent,
    span,
    write_page,
)
from realm_jax.evaluation.throughput import work_of_stages
from realm_jax.metrics.curves import health, index_versions, made_at
from realm_jax.types import NULL_BLOCK

_NAME = "report"
HTML_NAME, JSON_NAME = f"{_NAME}.html", f"{_NAME}.json"
FORMAT_VERSION = 1


def write_report(data: ReportData, directory: str) -> None:
    """Writes `report.html` and `report.json`, each atomically.

    Args:
      data: the results.
      directory: a local folder or gs://.

    Raises:
      BadInputError: the directory cannot be written.
    """
    write_page(directory, _NAME, page=render_html(data), content=render_json(data))


def render_json(data: ReportData) -> str:
    """Returns the report as JSON; numbers that are not finite become null."""
    derived = {
        "health": health(data.curves, data.run.held_out_questions),
        "verdicts": verdicts(data),
        "index_versions": index_versions(data.curves),
        "work": work_of_stages(data.curves),
    }
    return as_json(
        {
            "format_version": FORMAT_VERSION,
            **dataclasses.asdict(data),
            **{name: list(map(dataclasses.asdict, of)) for name, of in derived.items()},
        }
    )


def render_html(data: ReportData) -> str:
    """Returns the report as a self-contained page."""
    environment = page_environment(
        mark=_mark, flat=flat_settings, changed=changed_settings
    )
    questions = data.run.held_out_questions
    return environment.get_template("report.html.jinja").render(
        data=data,
        run=data.run,
        health=health(data.curves, questions),
        verdicts=verdicts(data),
        tiles=list(_tiles(data)),
        recall_charts=recall_charts(data.comparison, data.run.questions),
        stages=charts_by_stage(data.curves, questions),
        versions=index_versions(data.curves),
        made_at=made_at,
        work=work_of_stages(data.curves),
        null_block=NULL_BLOCK,
        NOT_RECORDED=NOT_RECORDED,
    )


def _tiles(data: ReportData) -> Iterator[tuple[str, str, str]]:
    """Yields the title, the value and the details of each number in the summary."""
    find, questions = data.comparison.find, data.run.questions
    before, after = (
        find(row, recall_name(5)) for row in (AFTER_WARM_START, AFTER_REALM)
    )
    if after:
        detail = f"was {percent(before.mean)} before it" if before else span(after)
        detail = f"of {after.count:,} {questions}; {detail}"
        yield "Recall@5 after REALM", percent(after.mean), detail
    answered, f1 = (find(AFTER_FINETUNING, metric) for metric in (EXACT_MATCH, F1))
    if answered:
        detail = f"of {answered.count:,} {questions}; {span(answered)}"
        detail += f"; F1 {percent(f1.mean)}" if f1 else ""
        yield "Answered exactly", percent(answered.mean), detail
    if masked := data.masked_accuracy:
        detail = (
            f"of {masked.utility.count:,} sentences of the validation split; "
            f"{percent(masked.null_only.mean)} without documents; utility "
            f"{nats(masked.utility.mean)} nats"
        )
        yield "Masked spans right", percent(masked.with_retrieval.mean), detail
    if refreshes := len(index_versions(data.curves)):
        detail = f"of {data.run.corpus.num_blocks:,} blocks"
        yield "Index versions used", str(refreshes), detail


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
