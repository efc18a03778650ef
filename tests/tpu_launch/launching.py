"""Jobs to launch in tests."""

from realm_jax.hardware import HardwareConfig, LaunchConfig
from tpu_launch.job import make_job
from tpu_launch.operations import ShipBundle

MODEL_DIR = "gs://bucket/my/pretrain"
DIGEST = "0123456789abcdef" * 4
BUNDLE = ShipBundle(f"{MODEL_DIR}/launch/bundles/{DIGEST}.tar.gz", DIGEST)
TRAINER = ("pretrain", "--gin_file=gin/runs/pretrain.gin", '--gin.TASK="my task"')
BUILDER = ("build-index", "--gin_file=gin/runs/build_index.gin")


def config(**changes):
    return LaunchConfig(project="p", zone="us-central2-b", **changes)


def job(trainer="v4-64", builder="v4-16", slices=1, **changes):
    """A run on slices; `builder` "" leaves that role out."""
    hardware = HardwareConfig(trainer, slices, builder)
    command = BUILDER if builder else None
    return make_job(config(**changes), hardware, MODEL_DIR, TRAINER, command)
