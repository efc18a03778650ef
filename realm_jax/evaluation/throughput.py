"""Computes the speed of each stage and the breakdown of its time, from its metrics."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax.metrics.curves import Curve, by_step
from realm_jax.training.step_timing import Part


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
