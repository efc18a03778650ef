"""Writes the results of a run as an HTML page and as JSON.

`report.html` is self-contained and loads nothing. `report.json` has the same content:
the fields of `ReportData` and the findings, with null for numbers that are not finite.

Both also have the speed of each stage and the breakdown of its time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realm_jax.answering.answers import mentions
from realm_jax.evaluation.charts import (
    calibration_chart,
    charts_by_stage,
    recall_charts,
)
from realm_jax.evaluation.findings import tiles, verdicts
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.templates import as_json, page_template, write_page
from realm_jax.metrics.curves import Curve, by_step, health, index_versions
from realm_jax.run_record import NOT_RECORDED, changed_settings, flat_texts
from realm_jax.training.step_timing import Part
from realm_jax.types import NULL_BLOCK

_NAME = "report"
HTML_NAME, JSON_NAME = f"{_NAME}.html", f"{_NAME}.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class StageWork:
    """Speed and time of a stage, averaged over all its lines of metrics.

    Attributes:
      time_shares: share of each measured `Part`, by its value; they add up to 1.
      padding_share: share of padding among computed positions; None if not measured.
      model_tflops_per_second: of the whole job; None if not measured.
      model_flops_utilization: share of the devices' peak; None if that is not known.
    """

    stage: str
    time_shares: Mapping[str, float]
    examples_per_second: float
    padding_share: float | None
    model_tflops_per_second: float | None
    model_flops_utilization: float | None


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
    return page_template("report.html.jinja").render(
        data=data,
        run=data.run,
        tiles=tiles(data),
        recall_charts=recall_charts(data.comparison, data.run.questions),
        calibration_charts=[calibration_chart(data.calibration)]
        if data.calibration
        else [],
        stages=charts_by_stage(data.curves, data.run.held_out_questions),
        mentions=mentions,
        changed_settings=changed_settings,
        flat_texts=flat_texts,
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


def work_of_stages(curves: Sequence[Curve]) -> list[StageWork]:
    """Returns the stages with measured times, in the order they ran."""
    stages = dict.fromkeys(curve.stage for curve in curves)
    found = [_work_of(curves, stage) for stage in stages]
    return [work for work in found if work is not None]


def _work_of(curves: Sequence[Curve], stage: str) -> StageWork | None:
    speed = by_step(curves, stage, "steps_per_second")
    updates = dict(zip(speed, np.diff(list(speed), prepend=0).tolist(), strict=True))
    seconds = {step: updates[step] / speed[step] for step in speed}

    def mean(metric: str, weights: Mapping[int, float]) -> float | None:
        """Returns the weighted mean of a metric over the lines that have it."""
        found = by_step(curves, stage, metric)
        steps = [step for step in found if step in weights]
        total = sum(weights[step] for step in steps)
        return sum(found[s] * weights[s] for s in steps) / total if steps else None

    per_update = {
        part.value: value
        for part in Part
        if (value := mean(f"{part.value}_seconds", updates)) is not None
    }
    total = sum(per_update.values())
    examples = mean("examples_per_second", seconds)
    if examples is None or not total:
        return None
    return StageWork(
        stage,
        {part: value / total for part, value in per_update.items()},
        examples,
        mean("padding_share", updates),
        mean("model_tflops_per_second", seconds),
        mean("model_flops_utilization", seconds),
    )
