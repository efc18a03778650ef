"""Compares two evaluated runs question by question, and lists what they do differently.

Any two evaluations of the same questions can be compared: other settings, another seed,
another corpus, or a later version of this package. Nothing is measured again.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from realm_jax.data.records import json_object
from realm_jax.errors import BadInputError
from realm_jax.evaluation.comparisons import AFTER_FINETUNING, EXACT_MATCH
from realm_jax.evaluation.report import JSON_NAME
from realm_jax.evaluation.report_data import RecordedStage
from realm_jax.evaluation.stage_settings import (
    NOT_RECORDED,
    SettingChange,
    changed_settings,
    changed_texts,
    flat_settings,
)
from realm_jax.metrics.retrieval import (
    RESAMPLES,
    Interval,
    bootstrap_interval,
    paired_bootstrap_difference,
)
from realm_jax.settings import start_of
from realm_jax.storage import open_store

PREDICTIONS_NAME = "predictions.jsonl"
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
      questions: id -> (question, right answers).
      predictions: id -> (predicted text, whether it is right).
      values: label -> metric -> one value per question, in the order of `questions`.
      facts: what the report says of corpus, machine and versions, flat.
      recorded: what each stage recorded.
    """

    place: str
    questions: Mapping[str, tuple[str, tuple[str, ...]]]
    predictions: Mapping[str, tuple[str, bool]]
    values: Mapping[str, Mapping[str, np.ndarray]]
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recorded: Sequence[RecordedStage] = ()


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
      first: where the first run was read from.
      second: the same of the second.
      num_questions: number of questions that both were asked.
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
    """Reads an evaluation.

    Args:
      place: a folder with predictions.jsonl and report.json, or a file of predictions
        alone (`.jsonl`), local or gs://.

    Raises:
      BadInputError: there are no predictions, or a file cannot be read.
    """
    is_file = place.endswith(".jsonl")
    folder, name = os.path.split(place) if is_file else (place, PREDICTIONS_NAME)
    store = open_store(folder or ".")
    url = store.url(name)
    records = _read_predictions(store.read(name), url)
    report: dict[str, Any] = {}
    if not is_file and store.exists(JSON_NAME):
        report = json_object(store.read(JSON_NAME), store.url(JSON_NAME))
    return EvaluatedRun(
        place=place,
        questions={r["id"]: (r["question"], tuple(r["answers"])) for r in records},
        predictions={r["id"]: (r["prediction"], r["correct"]) for r in records},
        values=_values_of(records, url),
        facts=_facts_of(report.get("run", {})),
        recorded=[
            RecordedStage(
                stage["stage"],
                [start_of(record, store.url(JSON_NAME)) for record in stage["starts"]],
            )
            for stage in report.get("recorded", ())
        ],
    )


def compare_runs(
    first: EvaluatedRun,
    second: EvaluatedRun,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> RunComparison:
    """Compares two runs by every metric that both have.

    Args:
      first: the run that the other is compared with.
      second: the other run; its questions may be in another order.
      resamples: number of bootstrap resamples.
      seed: seed of the bootstrap.

    Raises:
      BadInputError: they were not asked the same questions with the same answers.
    """
    _require_same_questions(first, second)
    place = {key: row for row, key in enumerate(second.questions)}
    order = np.asarray([place[key] for key in first.questions])
    figures = [
        _figure(label, metric, values, theirs[metric][order], resamples, seed)
        for label, ours in first.values.items()
        for theirs in (second.values.get(label, {}),)
        for metric, values in ours.items()
        if metric in theirs
    ]
    return RunComparison(
        first=first.place,
        second=second.place,
        num_questions=len(first.questions),
        figures=figures,
        settings=_changes(first, second),
        lost=list(_changed_answers(first, second, right_in_first=True)),
        won=list(_changed_answers(first, second, right_in_first=False)),
    )


def _figure(
    label: str,
    metric: str,
    first: np.ndarray,
    second: np.ndarray,
    resamples: int,
    seed: int,
) -> ComparedFigure:
    return ComparedFigure(
        label,
        metric,
        bootstrap_interval(first, resamples=resamples, seed=seed),
        bootstrap_interval(second, resamples=resamples, seed=seed),
        paired_bootstrap_difference(first, second, resamples=resamples, seed=seed),
    )


def _require_same_questions(first: EvaluatedRun, second: EvaluatedRun) -> None:
    ours, theirs = first.questions, second.questions
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
    changes = {"": changed_texts(first.facts, second.facts)}
    starts = [
        {stage.stage: stage.starts for stage in run.recorded} for run in (first, second)
    ]
    for stage in dict.fromkeys([*starts[0], *starts[1]]):
        ours, theirs = (of_run.get(stage, ()) for of_run in starts)
        if ours and theirs:
            changes[stage] = changed_settings(ours[-1], theirs[-1])
        elif ours or theirs:
            changes[stage] = [
                SettingChange(
                    "settings",
                    "recorded" if ours else NOT_RECORDED,
                    "recorded" if theirs else NOT_RECORDED,
                )
            ]
    return {stage: found for stage, found in changes.items() if found}


def _changed_answers(
    first: EvaluatedRun, second: EvaluatedRun, *, right_in_first: bool
) -> Iterator[ChangedAnswer]:
    for key, (question, references) in first.questions.items():
        (one, was_right), (other, is_right) = (
            run.predictions[key] for run in (first, second)
        )
        if was_right != is_right and was_right == right_in_first:
            yield ChangedAnswer(question, references, one, other)


def _read_predictions(data: bytes, url: str) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        place = f"{url}:{number}"
        record = json_object(line, place)
        missing = _FIELDS.keys() - record.keys()
        wrong = [name for name in _FIELDS if name not in missing]
        wrong = [name for name in wrong if not isinstance(record[name], _FIELDS[name])]
        if missing or wrong:
            raise BadInputError(
                f"{place}: expected a prediction with {', '.join(_FIELDS)}, got one "
                f"without a usable {min([*missing, *wrong])}; evaluate the run again."
            )
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
    if "measured" not in records[0]:
        correct = np.asarray([record["correct"] for record in records], np.float64)
        return {AFTER_FINETUNING: {EXACT_MATCH: correct}}
    try:
        return {
            label: {
                metric: np.asarray(
                    [record["measured"][label][metric] for record in records],
                    np.float64,
                )
                for metric in metrics
            }
            for label, metrics in records[0]["measured"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"expected the same figures of every question in {url}, got some without "
            f"({type(error).__name__}: {error}); evaluate the run again."
        ) from error


def _facts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a report says of a run, but for what differs in any two."""
    kept = ("corpus", "split", "parameters", "settings", "machine", "versions")
    return flat_settings({name: run[name] for name in kept if name in run})
