"""What a report says of how its figures came about: times, machine, versions."""

import importlib.metadata
import os
import platform

import jax

from realm_jax.evaluation.report_data import StageTime
from realm_jax.training.metrics import read_metrics

_VERSIONS = ("realm_jax", "jax", "flax", "optax", "orbax-checkpoint", "scann")


def stage_times(model_dir: str) -> list[StageTime]:
    """How long the updates of each stage took, from the speeds in its metrics."""
    seconds: dict[str, float] = {}
    steps: dict[str, int] = {}
    for line in read_metrics(model_dir):
        stage, step = line["stage"], line["step"]
        new = step - steps.get(stage, 0)
        speed = line["steps_per_second"]
        seconds[stage] = seconds.get(stage, 0.0) + new / speed
        steps[stage] = step
    return [StageTime(stage, seconds[stage], steps[stage]) for stage in steps]


def time_of(model_dir: str, stage: str) -> StageTime | None:
    """How long one stage took; None if there is no such folder or nothing is known."""
    found = stage_times(model_dir) if model_dir else []
    return next((time for time in found if time.stage == stage), None)


def versions() -> dict[str, str]:
    """Of the packages that figures depend on."""
    return {name: importlib.metadata.version(name) for name in _VERSIONS}


def machine() -> str:
    """The devices and the machine around them, in words."""
    device = jax.devices()[0]
    return (
        f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
