"""Metrics are sums and counts; they are divided once, when they are written.

`metrics.jsonl` in the model directory holds one JSON object a line. Words used there:
`step`, `stage`, `loss`, `retrieval_utility` (nats), `index_step` (the encoder step of
the index in use), `index_age_steps`, `index_age_seconds`, `recall_at_5` (only on the
steps where the held-out questions were searched), `steps_per_second`.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from clu.metrics import Average

from realm_jax.types import Array

FILE_NAME = "metrics.jsonl"

Means = dict[str, Average]
"""Metric name -> total and count; device scalars until `compute`."""


def mean_of(total: Array, count: Array | float) -> Average:
    """A metric whose value is total / count, mergeable with others of its name."""
    return Average.empty().replace(
        total=jnp.asarray(total, jnp.float32), count=jnp.asarray(count, jnp.float32)
    )


def merge(left: Means, right: Means) -> Means:
    """Adds up totals and counts; a name that only one side has is kept."""
    return {
        name: left[name].merge(right[name]) if name in left and name in right else mean
        for name, mean in {**left, **right}.items()
    }


def compute(means: Means) -> dict[str, float]:
    """Divides; a metric that counted nothing is left out."""
    host = jax.device_get(means)
    return {
        name: float(mean.total / mean.count)
        for name, mean in host.items()
        if mean.count > 0
    }


class MetricsFile:
    """Appends lines to `metrics.jsonl`, cutting off what a lost run had written.

    Args:
      model_dir: local folder of the run.
      stage: written into every line.
      first_step: lines of this stage at or after this step come from a run whose
        later steps are now being repeated; they are dropped.
    """

    def __init__(self, model_dir: str, stage: str, first_step: int):
        self._path = pathlib.Path(model_dir) / FILE_NAME
        self._stage = stage
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [
            line
            for line in read_metrics(model_dir)
            if line["stage"] != stage or line["step"] <= first_step
        ]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self._path)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Adds one line for `step` (the number of updates done)."""
        line = {"step": step, "stage": self._stage, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(model_dir: str) -> Iterator[dict]:
    """Yields the lines of a run's metrics, passing over one cut short by a kill."""
    path = pathlib.Path(model_dir) / FILE_NAME
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
