"""Runs to launch in tests."""

from typing import Any

from realm_jax.hardware import LaunchConfig
from tpu_launch import slices
from tpu_launch.run import BUILDER, TRAINER, Role, Run, run_id

MODEL_DIR = "gs://bucket/my/pretrain"
CODE = "0123456789abcdef" * 4
ZONE = "us-central2-b"
COMMANDS = {
    TRAINER: ("pretrain", "--gin_file=gin/runs/pretrain.gin", '--gin.TASK="my task"'),
    BUILDER: ("build-index", "--gin_file=gin/runs/build_index.gin"),
}


def run(
    trainer: str = "v4-64",
    builder: str = "v4-16",
    num_slices: int = 1,
    model_dir: str = MODEL_DIR,
    **settings: Any,
) -> Run:
    """A run on slices; `builder` "" leaves that role out."""
    config = LaunchConfig(project="p", zone=ZONE, **settings)
    machines = {TRAINER: trainer, **({BUILDER: builder} if builder else {})}
    roles = tuple(
        Role(
            *(role, slices.parse(kind), num_slices if role == TRAINER else 1),
            *(config.provisioning, COMMANDS[role], ZONE),
        )
        for role, kind in machines.items()
    )
    return Run(run_id("realm", model_dir), model_dir, roles, CODE, config)
