"""Runs to launch in tests, and what engines are to read of them.

    python -m tests.tpu_launch.launching

writes `golden/` anew: the paper's run, and one of two slices beside a single host.
"""

import pathlib
from typing import Any
from unittest import mock

from realm_jax.hardware import LaunchConfig
from tests.waiting import Clock
from tpu_launch import gke, slices
from tpu_launch.run import BUILDER, TRAINER, Role, Run, run_id
from tpu_launch.tpu_vm import TpuVm

MODEL_DIR = "gs://bucket/my/pretrain"
CODE = "0123456789abcdef" * 4
ZONE = "us-central2-b"
COMMANDS = {
    TRAINER: ("pretrain", "--gin_file=gin/runs/pretrain.gin", '--gin.TASK="my task"'),
    BUILDER: ("build-index", "--gin_file=gin/runs/build_index.gin"),
}
GOLDEN = pathlib.Path(__file__).parent / "golden"


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
            role,
            slices.parse(kind),
            num_slices if role == TRAINER else 1,
            config.provisioning,
            COMMANDS[role],
            ZONE,
        )
        for role, kind in machines.items()
    )
    return Run(run_id("realm", model_dir), model_dir, roles, CODE, config)


def described() -> dict[str, str]:
    """What is in `golden/`: file -> text."""
    paper = run(
        "v4-128",
        "v4-32",
        fetch={"gs://bucket/wiki": "/data/wiki", "gs://bucket/more": "/data/more"},
        provisioning="spot",
        service_account="realm",
        priority="high",
        queue="tpus",
        grace_seconds=25,
    )
    two_slices = {
        **{"trainer": "v6e-64", "num_slices": 2, "provisioning": "reserved"},
        **{"reservation": "mine", "deadline_hours": 1.5, "max_restarts": 7},
    }
    of_vms = {"service_account": "w@p", "network": "net", "external_ips": False}
    requested, clock = run(builder="", **two_slices, **of_vms), Clock()
    with mock.patch("tpu_launch.tpu_vm.time", clock):
        requests = TpuVm("p", [ZONE], clock.seconds + 7200).describe(requested)
    return {
        "v4_128_and_v4_32.yaml": gke.manifest(paper),
        "two_v6e_64.yaml": gke.manifest(run(builder="v6e-8", **two_slices)),
        "two_v6e_64.txt": f"{requests}\n",
    }


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in described().items():
        (GOLDEN / name).write_text(text)
