"""How fast each stage worked and where its time went, from its lines of metrics."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax.metrics.curves import Curve, find_curve, measured

PARTS = ("device", "search", "host", "checkpoint", "swap")
"""Of the time; `<part>_seconds` in the metrics."""


@dataclasses.dataclass(frozen=True)
class StageWork:
    """A stage from its first line to its last.

    Attributes:
      stage: as in `metrics.jsonl`.
      time_shares: of each of `PARTS`; they add up to 1.
      examples_per_second: all examples over all seconds.
      padding_share: of the positions that were computed; None if not measured.
      model_tflops_per_second: of the whole job; None if not measured.
      model_flops_utilization: None where the peak is not known.
    """

    stage: str
    time_shares: Mapping[str, float]
    examples_per_second: float
    padding_share: float | None
    model_tflops_per_second: float | None
    model_flops_utilization: float | None


def work_of_stages(curves: Sequence[Curve]) -> list[StageWork]:
    """Returns the stages whose time was measured, in the order they ran."""
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
        """Over the lines that have it."""
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
