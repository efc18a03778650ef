"""Reads the curves of a run from its `metrics.jsonl`, and diagnoses its health.

The typical failure is collapse: the retriever drifts away from its own index, retrieved
documents no longer help, and the reader learns to ignore them. The loss hides this,
because the null document alone is not much worse. It shows as retrieval utility that
falls to zero, and as recall that falls after it had risen.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.stages import PRETRAIN

LOSS = "loss"
UTILITY = "retrieval_utility"
RECALL = "recall_at_5"
HELD_OUT_UTILITY = "held_out_utility"
INDEX_STEP = "index_step"
INDEX_AGE_STEPS = "index_age_steps"
INDEX_AGE_SECONDS = "index_age_seconds"

# Utility below this many nats counts as zero: documents change p(y|x) by 1 per cent.
_NO_UTILITY = 0.01
# It must have been above this before "fell to zero" means anything.
_SOME_UTILITY = 0.05
# A masked span that is known by heart, in nats; the quickstart began REALM at 15.
_KNOWN_LOSS = 0.5
# Recall has collapsed when it lost half of its maximum and more than this share.
_RECALL_DROP = 0.1
_CURE = (
    "Refresh the index more often (REFRESH_PERIOD), lower the learning rate, keep the "
    "LayerNorm on the embeddings on, and warm-start the retriever and the reader "
    "longer; then pretrain again from the warm start, for a collapsed run does not "
    "recover."
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric of one stage.

    Attributes:
      stage: as in `metrics.jsonl`: warm_start, pretrain, finetune.
      metric: name as in `metrics.jsonl`.
      steps: updates done, increasing.
      values: one for each step; NaN where the run wrote no number.
    """

    stage: str
    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class Level(enum.StrEnum):
    """Severity of a finding."""

    GOOD = "good"
    NEUTRAL = "neutral"
    WARNING = "warning"
    ALARM = "alarm"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A diagnosis in one line, and what to do about it, if anything."""

    level: Level
    text: str
    advice: str = ""


def read_curves(model_dirs: Iterable[str]) -> tuple[Curve, ...]:
    """Reads the curves of a run from the model directories of its stages."""
    return curves_from_lines(
        line for model_dir in model_dirs for line in read_metrics(model_dir)
    )


def curves_from_lines(lines: Iterable[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Groups lines of metrics into curves; the last line of a step takes precedence.

    Each line has `step`, `stage` and any number of metrics.
    """
    points: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name in ("step", "stage") or isinstance(value, str | bool):
                continue
            curve = points.setdefault((line["stage"], name), {})
            curve[int(line["step"])] = math.nan if value is None else float(value)
    return tuple(
        Curve(stage, metric, *map(tuple, zip(*sorted(values.items()), strict=True)))
        for (stage, metric), values in points.items()
    )


def find_curve(curves: Sequence[Curve], stage: str, metric: str) -> Curve:
    """Returns the curve of a metric, an empty one if it was not measured."""
    for curve in curves:
        if (curve.stage, curve.metric) == (stage, metric):
            return curve
    return Curve(stage, metric, (), ())


@dataclasses.dataclass(frozen=True)
class IndexVersion:
    """One index that the trainer searched.

    Attributes:
      step: the step of the retriever that embedded it.
      first_used: the first step logged with it.
      oldest_steps: its largest logged age in steps; None if not logged.
      oldest_seconds: the same in seconds.
      recall: recall@5 measured with it; None if not measured.
    """

    step: int
    first_used: int
    oldest_steps: float | None
    oldest_seconds: float | None
    recall: float | None


def index_versions(curves: Sequence[Curve]) -> list[IndexVersion]:
    """Returns the indexes that pre-training searched, in order."""
    ages, seconds, recalls, indexes = (
        by_step(curves, PRETRAIN.name, metric)
        for metric in (INDEX_AGE_STEPS, INDEX_AGE_SECONDS, RECALL, INDEX_STEP)
    )
    used: dict[int, list[int]] = {}
    for step, version in indexes.items():
        used.setdefault(int(version), []).append(step)
    return [
        IndexVersion(
            step=version,
            first_used=steps[0],
            oldest_steps=max((ages[s] for s in steps if s in ages), default=None),
            oldest_seconds=max(
                (seconds[s] for s in steps if s in seconds), default=None
            ),
            recall=next((recalls[s] for s in steps if s in recalls), None),
        )
        for version, steps in used.items()
    ]


def by_step(curves: Sequence[Curve], stage: str, metric: str) -> dict[int, float]:
    """Returns the finite values of a metric by their steps."""
    curve = measured(find_curve(curves, stage, metric))
    return dict(zip(curve.steps, curve.values, strict=True))


def measured(curve: Curve) -> Curve:
    """Returns the curve without missing and infinite values."""
    points = [
        (step, value)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if math.isfinite(value)
    ]
    return dataclasses.replace(
        curve, steps=tuple(s for s, _ in points), values=tuple(v for _, v in points)
    )


def running_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns means over a centred window of a twentieth of the curve.

    Infinite and missing values are left out; a window without others gives NaN.
    """
    array = np.asarray(values, np.float64)
    finite = np.isfinite(array)
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    half = len(array) // 40
    row = np.arange(len(array))
    low, high = np.maximum(row - half, 0), np.minimum(row + half + 1, len(array))
    count = counts[high] - counts[low]
    return np.where(
        count > 0, (totals[high] - totals[low]) / np.maximum(count, 1), np.nan
    )


def made_at(step: int) -> str:
    """Returns when an index was made whose retriever had taken `step` updates."""
    return f"after update {step:,}" if step else "before the first update"


def health(
    curves: Sequence[Curve], questions: str = "held-out questions"
) -> list[Finding]:
    """Diagnoses known failures of REALM pre-training, worst first.

    `questions` is what findings call the questions that pre-training searches, such as
    "held-out dev questions". There is one finding for each problem, a single good one
    if there is none, and nothing if the run has no pre-training curves and no loss is
    infinite or NaN.
    """
    utility = measured(find_curve(curves, PRETRAIN.name, UTILITY))
    recall = measured(find_curve(curves, PRETRAIN.name, RECALL))
    held_out = measured(find_curve(curves, PRETRAIN.name, HELD_OUT_UTILITY))
    found = [*_diverged(curves)]
    if utility.steps or recall.steps:
        loss = measured(find_curve(curves, PRETRAIN.name, LOSS))
        collapse = [*_collapse(utility, recall, questions)]
        found += collapse or _without_use(utility, loss)
        found += _stale_index(curves)
        if not found:
            found = [_no_collapse(utility, held_out, recall, questions)]
    return sorted(found, key=lambda finding: finding.level is not Level.ALARM)


def _diverged(curves: Sequence[Curve]) -> Iterator[Finding]:
    for curve in curves:
        broken = [
            step
            for step, value in zip(curve.steps, curve.values, strict=True)
            if not math.isfinite(value)
        ]
        if curve.metric == LOSS and broken:
            yield Finding(
                Level.ALARM,
                f"The loss of {curve.stage} is not a number from step {broken[0]:,} "
                "on.",
                "Lower the learning rate or lengthen its warm-up, and start the stage "
                "again from its last good checkpoint.",
            )


def _collapse(utility: Curve, recall: Curve, questions: str) -> Iterator[Finding]:
    """Detects recall that fell after it had risen, and utility that fell to zero."""
    smooth = running_mean(utility.values)
    at_end = _at_end(utility)
    utility_fell = bool(
        smooth.size and smooth.max() > _SOME_UTILITY and at_end < _NO_UTILITY
    )
    recall_fell = False
    what = []
    if recall.steps:
        best = int(np.argmax(recall.values))
        top, last = recall.values[best], recall.values[-1]
        recall_fell = last < 0.5 * top and top - last > _RECALL_DROP
        if recall_fell:
            what.append(
                f"recall@5 fell from {top:.0%} at step {recall.steps[best]:,} to "
                f"{last:.0%} at step {recall.steps[-1]:,} ({questions})"
            )
    if utility_fell:
        what.append(
            f"retrieval utility fell from {smooth.max():.2f} to {at_end:.2f} nats on "
            "training sentences"
        )
    if what and (recall_fell or not recall.steps):
        yield Finding(
            Level.ALARM,
            f"Collapse: {' and '.join(what)}. The reader is learning to ignore "
            "documents.",
            _CURE,
        )
    elif what:
        yield Finding(
            Level.WARNING,
            f"{what[0][0].upper()}{what[0][1:]} though recall@5 held: the reader "
            "answers without its documents, perhaps because it knows the text by "
            "heart.",
            "Train for fewer steps, on more text, or with a smaller reader.",
        )


def _at_end(curve: Curve) -> float:
    """Returns the mean of a curve's last quarter, as single points are noisy."""
    last = curve.values[-max(3, len(curve.values) // 4) :]
    return float(np.mean(last)) if last else math.nan


def _without_use(utility: Curve, loss: Curve) -> Iterator[Finding]:
    smooth = running_mean(utility.values)
    if not smooth.size or smooth.max() > _SOME_UTILITY:
        return
    if _at_end(utility) >= _NO_UTILITY:
        return
    if loss.values and loss.values[0] < _KNOWN_LOSS:
        yield Finding(
            Level.ALARM,
            "The reader knew the training sentences by heart when REALM began (a loss "
            f"of {loss.values[0]:.2f} nats), so documents did not help it, and nothing "
            "taught the retriever.",
            "Give it more text or fewer updates of the warm start, or go on from a "
            "model that was trained on other text.",
        )
        return
    yield Finding(
        Level.ALARM,
        "Retrieval utility on training sentences never rose above zero: documents "
        "do not help the reader, so nothing teaches the retriever.",
        "Warm-start the retriever and the reader longer (WARM_START); check that "
        "the sentences stand in the corpus that is searched.",
    )


def _stale_index(curves: Sequence[Curve]) -> Iterator[Finding]:
    """Detects an index that was no longer replaced towards the end."""
    ages = measured(find_curve(curves, PRETRAIN.name, INDEX_AGE_STEPS))
    versions = [version.step for version in index_versions(curves)]
    if len(versions) < 2 or not ages.steps:
        return
    usual = float(np.median(np.diff(versions)))
    if ages.values[-1] > 4 * usual:
        yield Finding(
            Level.WARNING,
            f"The index was {ages.values[-1]:,.0f} steps old at the end; it used to "
            f"be replaced every {usual:,.0f} steps.",
            "See whether the index builder still ran: its log and "
            "jobs/index_builder.json in the model directory.",
        )


def _no_collapse(
    utility: Curve, held_out: Curve, recall: Curve, questions: str
) -> Finding:
    """Says where utility and recall ended, each with what it was measured on."""
    parts = []
    if utility.steps:
        parts.append(f"{_at_end(utility):+.2f} nats on training sentences")
    if held_out.steps:
        parts.append(f"{held_out.values[-1]:+.2f} on those of the validation split")
    text = f"retrieval utility ended at {' and '.join(parts)}" if parts else ""
    if recall.steps:
        text += ", " if text else ""
        text += f"recall@5 at {recall.values[-1]:.1%} of the {questions}"
    if held_out.steps and held_out.values[-1] < -_NO_UTILITY:
        return Finding(
            Level.WARNING,
            f"No sign of collapse, but documents make sentences harder that were not "
            f"trained on: {text}.",
            "Train for fewer steps or on more text.",
        )
    return Finding(Level.GOOD, f"No sign of collapse: {text}.")
