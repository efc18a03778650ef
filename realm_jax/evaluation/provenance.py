"""Collects the provenance of a report's results: checkpoint, times, machine."""

import contextlib
import importlib.metadata
import os
import platform

import jax

from realm_jax.evaluation.comparisons import StageTime
from realm_jax.evaluation.report_data import BestCheckpoint, ChosenCheckpoint
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import (
    DEV_EXACT_MATCH,
    HELD_OUT_UTILITY,
    all_details,
    best_step,
)

_VERSIONS = ("realm_jax", "jax", "flax", "optax", "orbax-checkpoint", "scann")


def best_checkpoint(model_dir: str) -> BestCheckpoint | None:
    """Returns the checkpoint of a pre-training run with the highest held-out utility.

    None if no utility was measured, or `model_dir` is "".
    """
    details = all_details(open_store(model_dir)) if model_dir else {}
    best = best_step(details)
    if best is None:
        return None
    last = max(details)
    return BestCheckpoint(
        step=best,
        utility=details[best][HELD_OUT_UTILITY],
        last_step=last,
        last_utility=details[last].get(HELD_OUT_UTILITY),
    )


def chosen_checkpoint(model_dir: str, step: int) -> ChosenCheckpoint | None:
    """Returns the checkpoint of a fine-tuning run that was measured, beside the last.

    None if no exact match was measured while fine-tuning.
    """
    details = all_details(open_store(model_dir))
    last = max(details)
    if not all(DEV_EXACT_MATCH in details[which] for which in (step, last)):
        return None
    of_step, of_last = (details[which][DEV_EXACT_MATCH] for which in (step, last))
    return ChosenCheckpoint(step, of_step, last, of_last)


def stage_times(model_dir: str) -> list[StageTime]:
    """Returns the total time of each stage's updates, by the speeds in its metrics."""
    seconds: dict[str, float] = {}
    steps: dict[str, int] = {}
    for line in read_metrics(model_dir):
        speed = line.get("steps_per_second")
        if not isinstance(speed, int | float) or speed <= 0:
            continue  # Damaged; its updates count at the speed of the next line.
        stage, step = line["stage"], line["step"]
        new = step - steps.get(stage, 0)
        seconds[stage] = seconds.get(stage, 0.0) + new / speed
        steps[stage] = step
    return [StageTime(stage, seconds[stage], steps[stage]) for stage in steps]


def time_of(model_dir: str, stage: str) -> StageTime | None:
    """Returns the total time of a stage's updates, None if it is not known."""
    found = stage_times(model_dir) if model_dir else []
    return next((time for time in found if time.stage == stage), None)


def versions() -> dict[str, str]:
    """Returns the versions of the packages that results depend on.

    An extra, such as scann, may not be installed.
    """
    found = {}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> str:
    """Returns a description of the devices and the host."""
    device = jax.devices()[0]
    return (
        f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
