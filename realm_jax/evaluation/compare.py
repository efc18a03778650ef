"""Compares two evaluated runs question by question, and lists what they do differently.

Any two evaluations of the same questions can be compared: other settings, another seed,
another corpus, or a later version of this package. Nothing is measured again. The
comparison is written as an HTML page and as JSON.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realm_jax.data.records import json_object
from realm_jax.errors import BadInputError
from realm_jax.evaluation.comparisons import AFTER_FINETUNING, EXACT_MATCH, paired
from realm_jax.evaluation.report import JSON_NAME as REPORT_NAME
from realm_jax.evaluation.templates import (
    as_json,
    page_template,
    percent,
    points,
    span,
    write_page,
)
from realm_jax.manifests import FileRecord, require_fields, unseal
from realm_jax.metrics.retrieval import Interval
from realm_jax.run_record import (
    NOT_RECORDED,
    RunRecord,
    SettingChange,
    changed_settings,
    changes,
    flat_texts,
    record_of,
)
from realm_jax.storage import Store, open_store

PREDICTIONS_NAME = "predictions.jsonl"
_NAME = "compare"
HTML_NAME = f"{_NAME}.html"
_NUM_SHOWN = 20
_FIELDS = {
    "id": str,
    "question": str,
    "answers": list,
    "prediction": str,
    "correct": bool,
}


@dataclasses.dataclass(frozen=True)
class EvaluatedRun:
    """What an evaluation has left of a run.

    Attributes:
      place: folder or file that it was read from.
      records: id -> line of the predictions.
      values: label -> metric -> one value per question, in the order of `records`.
      facts: what the report says of corpus, machine and versions, flat.
      starts: stage -> what it recorded at its last start.
    """

    place: str
    records: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Mapping[str, np.ndarray]]
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, RunRecord] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ComparedFigure:
    """A metric of both runs; `difference` is the second minus the first, paired."""

    label: str
    metric: str
    first: Interval
    second: Interval
    difference: Interval


@dataclasses.dataclass(frozen=True)
class ChangedAnswer:
    """A question that one of the runs answers right, and the other does not."""

    question: str
    references: Sequence[str]
    first: str
    second: str


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
      first, second: where the runs were read from.
      figures: metrics that both have.
      settings: stage -> what differs; the stage "" has what the reports say.
      lost: questions that the first alone answers.
      won: questions that the second alone answers.
    """

    first: str
    second: str
    num_questions: int
    figures: Sequence[ComparedFigure]
    settings: Mapping[str, Sequence[SettingChange]]
    lost: Sequence[ChangedAnswer]
    won: Sequence[ChangedAnswer]


def read_run(place: str) -> EvaluatedRun:
    """Reads an evaluation, local or in gs://.

    `place` is a folder with predictions.jsonl and report.json, or a file of predictions
    alone, whose name ends in `.jsonl`.
    """
    is_file = place.endswith(".jsonl")
    folder, name = os.path.split(place) if is_file else (place, PREDICTIONS_NAME)
    store = open_store(folder or ".")
    url = store.url(name)
    data, report = store.read(name), {} if is_file else _read_report(store)
    wanted = report.get("files", {}).get(name)
    if wanted and FileRecord(**wanted) != FileRecord.of(data):
        raise BadInputError(
            f"expected the predictions that {store.url(REPORT_NAME)} names in {url}, "
            "got others; evaluate the run again."
        )
    records = _read_predictions(data, url)
    return EvaluatedRun(
        place=place,
        records={record["id"]: record for record in records},
        values=_values_of(records, url),
        facts=_facts_of(report.get("run", {})),
        starts={
            stage["stage"]: record_of(stage["starts"][-1], store.url(REPORT_NAME))
            for stage in report.get("recorded", ())
            if stage["starts"]
        },
    )


def compare_runs(first: EvaluatedRun, second: EvaluatedRun) -> RunComparison:
    """Compares two runs by every metric that both have.

    The questions of the second may be in another order.
    """
    _require_same_questions(first, second)
    place = {key: row for row, key in enumerate(second.records)}
    order = np.asarray([place[key] for key in first.records])
    figures = [
        ComparedFigure(label, metric, *paired(values, theirs[metric][order]))
        for label, ours in first.values.items()
        for theirs in (second.values.get(label, {}),)
        for metric, values in ours.items()
        if metric in theirs
    ]
    lost, won = _changed_answers(first, second)
    return RunComparison(
        first=first.place,
        second=second.place,
        num_questions=len(first.records),
        figures=figures,
        settings=_changes(first, second),
        lost=lost,
        won=won,
    )


def summary_lines(comparison: RunComparison) -> list[str]:
    """Returns a line for each metric: both means and the paired difference."""
    return [
        f"{figure.label}, {figure.metric}: {percent(figure.first.mean)} and "
        f"{percent(figure.second.mean)}, {points(figure.difference.mean)} points (95% "
        f"interval {span(figure.difference, points)})"
        for figure in comparison.figures
    ]


def write_comparison(comparison: RunComparison, directory: str) -> None:
    """Writes `compare.html` and `compare.json` to a folder, local or gs://."""
    content = as_json({"format_version": 1, **dataclasses.asdict(comparison)})
    write_page(directory, _NAME, page=render_comparison(comparison), content=content)


def render_comparison(comparison: RunComparison) -> str:
    """Returns the comparison as a self-contained page."""
    template = page_template("compare.html.jinja")
    return template.render(comparison=comparison, num_shown=_NUM_SHOWN)


def _require_same_questions(first: EvaluatedRun, second: EvaluatedRun) -> None:
    ours, theirs = (
        {key: (of["question"], of["answers"]) for key, of in run.records.items()}
        for run in (first, second)
    )
    different = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    alone = ours.keys() ^ theirs.keys()
    if alone or different:
        example = min(alone | different)
        raise BadInputError(
            f"expected the same questions in {first.place} and {second.place}, got "
            f"{len(alone)} that only one of them has and {len(different)} with other "
            f"words or answers, such as {example!r}; evaluate both with the same "
            "QUESTIONS and SPLIT."
        )


def _changes(
    first: EvaluatedRun, second: EvaluatedRun
) -> dict[str, Sequence[SettingChange]]:
    """Returns what differs in the reports (under "") and in each recorded stage."""
    found = {"": changes(first.facts, second.facts, missing="–")}
    for stage in {**first.starts, **second.starts}:
        ours, theirs = first.starts.get(stage), second.starts.get(stage)
        if ours and theirs:
            found[stage] = changed_settings(ours, theirs)
        else:
            said = ("recorded" if of else NOT_RECORDED for of in (ours, theirs))
            found[stage] = [SettingChange("settings", *said)]
    return {stage: listed for stage, listed in found.items() if listed}


def _changed_answers(
    first: EvaluatedRun, second: EvaluatedRun
) -> tuple[list[ChangedAnswer], list[ChangedAnswer]]:
    """Returns what the first alone answers right, and what the second alone does."""
    lost, won = [], []
    for key, one in first.records.items():
        other = second.records[key]
        if one["correct"] != other["correct"]:
            texts = one["prediction"], other["prediction"]
            changed = ChangedAnswer(one["question"], one["answers"], *texts)
            (lost if one["correct"] else won).append(changed)
    return lost, won


def _read_report(store: Store) -> dict[str, Any]:
    """Returns a report; an empty one if there is none."""
    if not store.exists(REPORT_NAME):
        return {}
    try:
        # Earlier releases wrote no checksum.
        return unseal(store.read(REPORT_NAME), required=False)
    except ValueError as error:
        raise BadInputError(
            f"expected a report in {store.url(REPORT_NAME)}, got one that cannot be "
            f"read ({error}); evaluate the run again."
        ) from error


def _read_predictions(data: bytes, url: str) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        place = f"{url}:{number}"
        record = json_object(line, place)
        try:
            require_fields(record, _FIELDS)
        except ValueError as error:
            raise BadInputError(
                f"{place}: expected a prediction with {', '.join(_FIELDS)}, but "
                f"{error}; evaluate the run again."
            ) from error
        records.append(record)
    if not records:
        raise BadInputError(
            f"expected predictions in {url}, got none; evaluate the run again."
        )
    return records


def _values_of(
    records: Sequence[Mapping[str, Any]], url: str
) -> dict[str, dict[str, np.ndarray]]:
    """Returns what was measured of each question; earlier versions tell less."""
    measured = [
        record.get("measured", {AFTER_FINETUNING: {EXACT_MATCH: record["correct"]}})
        for record in records
    ]
    try:
        return {
            label: {
                metric: np.asarray([of[label][metric] for of in measured], np.float64)
                for metric in metrics
            }
            for label, metrics in measured[0].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"expected the same figures of every question in {url}, got some without "
            f"({type(error).__name__}: {error}); evaluate the run again."
        ) from error


def _facts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a report says of a run, but for what differs in any two."""
    kept = ("corpus", "split", "parameters", "settings", "machine", "versions")
    return flat_texts({name: run[name] for name in kept if name in run})
