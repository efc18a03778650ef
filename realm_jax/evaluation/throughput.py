"""Computes the speed of each stage and the breakdown of its time, from its metrics."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax.metrics.curves import Curve, find_curve, measured

PARTS = ("device", "search", "host", "checkpoint", "swap")
"""Parts of the time, `<part>_seconds` in the metrics."""


@dataclasses.dataclass(frozen=True)
class StageWork:
    """Speed and time of a stage, averaged over all its lines of metrics.

    Attributes:
      stage: name as in `metrics.jsonl`.
      time_shares: share of each of `PARTS`; they add up to 1.
      examples_per_second: examples per second of the whole stage.
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


def work_of_stages(curves: Sequence[Curve]) -> list[StageWork]:
    """Returns the stages with measured times, in the order they ran."""
    stages = dict.fromkeys(curve.stage for curve in curves)
    found = [_work_of(curves, stage) for stage in stages]
    return [work for work in found if work is not None]


def _work_of(curves: Sequence[Curve], stage: str) -> StageWork | None:
    rate = measured(find_curve(curves, stage, "steps_per_second"))
    updates = dict(
        zip(rate.steps, np.diff(rate.steps, prepend=0).tolist(), strict=True)
    )
    seconds = {
        step: updates[step] / value
        for step, value in zip(rate.steps, rate.values, strict=True)
    }

    def mean(metric: str, weights: Mapping[int, float]) -> float | None:
        """Returns the weighted mean of a metric over the lines that have it."""
        curve = measured(find_curve(curves, stage, metric))
        found = {
            step: value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if step in weights
        }
        if not found:
            return None
        return float(
            np.average(list(found.values()), weights=[weights[step] for step in found])
        )

    per_update = {part: mean(f"{part}_seconds", updates) for part in PARTS}
    examples = mean("examples_per_second", seconds)
    known = {part: value for part, value in per_update.items() if value is not None}
    if examples is None or not sum(known.values()):
        return None
    return StageWork(
        stage,
        {part: value / sum(known.values()) for part, value in known.items()},
        examples,
        mean("padding_share", updates),
        mean("model_tflops_per_second", seconds),
        mean("model_flops_utilization", seconds),
    )
