"""The compiler for TPUs, on a machine without one, for small programs.

`make tpu-compiler` fetches it. `python -m bench.tpu_compile` compiles the paper's run.
"""

import pytest

from realm_jax.data.corpus_size import CorpusSize
from realm_jax.training.partitioning import MeshConfig
from realm_jax.types import Lengths
from tests.refused import refused
from tests.tpu_launch.planning import BFLOAT16, TINY, on, stage
from tpu_launch.planner import commands, devices, memory
from tpu_launch.slices import parse

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("planner_cache")]

SLICES = ("v3-64", "v4-128", "v5litepod-64", "v5p-128", "v6e-64")
# A chip of two devices, and one of one.
COMPILED_FOR = ("v3-64", "v6e-64")
SMALL = CorpusSize(1_000_000, 1000)


def config(remat="full", batch_size=64):
    return stage(
        bert=TINY | {"remat": remat},
        lengths=Lengths(32, 64, 96),
        train_steps=100,
        batch_size=batch_size,
        num_candidates=4,
        device=BFLOAT16,
    )


@pytest.mark.parametrize("name", COMPILED_FOR)
def test_a_small_run_compiles_for_a_pod(name):
    said = []
    asked = on(name, corpus=SMALL, compiles=True, say=said.append)
    plan = commands.training("pretrain", config(), asked)
    assert not plan.problems
    lines = {line.name: line for line in plan.sections["memory of a device"]}
    assert lines["temporaries"].note == "compiled; remat full"
    # So small an update may need none: all of it is on the chip.
    assert 0 <= lines["temporaries"].value < 1 << 30
    compiled = [text.removeprefix("compiling the ").split(" for ")[0] for text in said]
    assert compiled == ["update", "embedding job", "search"]
    # No [batch, corpus] matrix: that would be 4 MB of a device.
    searching = plan.figure("the index", "searching it takes")
    assert searching < 64 * SMALL.num_blocks * 4 / asked.trainer.num_devices


def test_the_compiler_and_the_counting_agree_that_it_is_too_much():
    asked = on("v2-8", corpus=SMALL, compiles=True)
    found = devices.of_training(config("none", batch_size=64 * 256), asked)
    assert found.temporaries.is_compiled
    assert not found.fits
    assert devices.counted(found.config, asked).temporaries.num_bytes > found.limit


def test_counting_is_within_a_factor_of_two_of_compiling():
    asked = on("v2-8", corpus=SMALL, compiles=True)
    # Near the limit of a device the compiler computes values twice to save memory.
    found = devices.of_training(config("none", batch_size=64 * 16), asked)
    assert found.temporaries.is_compiled
    counted = devices.counted(found.config, asked).temporaries
    assert 0.5 < counted.num_bytes / found.temporaries.num_bytes < 2


def test_devices_are_those_of_the_machines():
    for name in (*SLICES, "v4-8", "v5litepod-1", "v5litepod-8", "v6e-8", "v3-8"):
        machines = parse(name)
        mesh = memory.compiler_mesh(machines, MeshConfig())
        assert mesh.size == machines.num_devices
        assert machines.chip is not None
        kinds = {device.device_kind for device in mesh.devices.flat}
        assert kinds == {machines.chip.kind}
        hosts = {device.process_index for device in mesh.devices.flat}
        assert len(hosts) == machines.num_hosts


def test_axes_need_not_be_sides_of_the_torus_and_only_data_leaves_a_slice():
    for name in SLICES:
        mesh = memory.compiler_mesh(parse(name), MeshConfig(fsdp=8, model=2))
        assert dict(mesh.shape) == {"data": 4, "fsdp": 8, "model": 2}
    machines = parse("v4-16")
    mesh = memory.compiler_mesh(machines, MeshConfig(fsdp=4), num_slices=2)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 4, "model": 1}
    for part, slice_index in ((mesh.devices[:2], 0), (mesh.devices[2:], 1)):
        assert {device.slice_index for device in part.flat} == {slice_index}
    with refused("multiple of the 2 slices"):
        memory.compiler_mesh(machines, MeshConfig(data=1, fsdp=16), num_slices=2)
