"""Names of accelerator types, as the documentation of Cloud TPU and GKE lists them."""

import pytest

from realm_jax.hardware import HardwareConfig
from tests.refused import refused
from tpu_launch import slices

# Chips, devices, hosts, topology, GB of a host, and label of its nodes on GKE.
MACHINES = {
    "v2-8": (4, 8, 1, "2x2", 334, ""),
    "v2-32": (16, 32, 4, "4x4", 334, ""),
    "v2-128": (64, 128, 16, "8x8", 334, ""),
    "v3-8": (4, 8, 1, "2x2", 334, "tpu-v3-device"),
    "v3-32": (16, 32, 4, "4x4", 334, "tpu-v3-slice"),
    "v3-64": (32, 64, 8, "4x8", 334, "tpu-v3-slice"),
    "v4-8": (4, 4, 1, "2x2x1", 407, "tpu-v4-podslice"),
    "v4-16": (8, 8, 2, "2x2x2", 407, "tpu-v4-podslice"),
    "v4-32": (16, 16, 4, "2x2x4", 407, "tpu-v4-podslice"),
    "v4-64": (32, 32, 8, "2x4x4", 407, "tpu-v4-podslice"),
    "v4-128": (64, 64, 16, "4x4x4", 407, "tpu-v4-podslice"),
    "v5litepod-1": (1, 1, 1, "1x1", 48, "tpu-v5-lite-podslice"),
    "v5litepod-4": (4, 4, 1, "2x2", 192, "tpu-v5-lite-podslice"),
    "v5litepod-8": (8, 8, 1, "2x4", 384, "tpu-v5-lite-podslice"),
    "v5litepod-16": (16, 16, 4, "4x4", 192, "tpu-v5-lite-podslice"),
    "v5litepod-64": (64, 64, 16, "8x8", 192, "tpu-v5-lite-podslice"),
    "v5p-128": (64, 64, 16, "4x4x4", 448, "tpu-v5p-slice"),
    "v5p-12288": (6144, 6144, 1536, "16x16x24", 448, "tpu-v5p-slice"),
    "v6e-1": (1, 1, 1, "1x1", 176, "tpu-v6e-slice"),
    "v6e-8": (8, 8, 1, "2x4", 1440, "tpu-v6e-slice"),
    "v6e-64": (64, 64, 16, "8x8", 720, "tpu-v6e-slice"),
    "tpu7x-8": (4, 8, 1, "2x2x1", 960, "tpu7x"),
    "tpu7x-128": (64, 128, 16, "4x4x4", 960, "tpu7x"),
    "h100-8": (8, 8, 1, "", 8 * 150, ""),
}


def test_names_stand_for_machines():
    for name, (chips, devices, hosts, topology, gigabytes, gke) in MACHINES.items():
        found = slices.parse(name)
        assert (found.num_chips, found.num_devices) == (chips, devices), name
        assert (found.num_hosts, found.topology) == (hosts, topology), name
        assert (found.host_memory, found.gke) == (gigabytes << 30, gke), name
    assert slices.parse("cpu").num_devices == 1
    # Only GKE has it.
    assert slices.parse("tpu7x-8").runtime == ""
    hardware = HardwareConfig("v4-64", chip_hour_prices={"v4": 3.0})
    assert slices.parse("v4-64").hourly_price(hardware) == 32 * 3.0
    assert slices.parse("v6e-64").hourly_price(hardware) is None


REFUSED = {
    "tpu7x-2": "one of tpu7x-8, tpu7x-16, .* got 'tpu7x-2'",
    "v4-48": "expected one of v4-8, v4-16, v4-32, .*got 'v4-48'",
    "v2-16": "one of v2-8, v2-32, v2-128, v2-256, v2-512, got 'v2-16'",
    "v2-64": "got 'v2-64'",
    "v3-16": "one of v3-8, v3-32, v3-64, .*v3-2048, got 'v3-16'",
    "v4-65": "got 'v4-65'",
    "v5litepod-512": "v5litepod-256, got 'v5litepod-512'",
    "v4": "such as v4-64.*got 'v4'",
    "b200-8": "known: v2, v3, v4, v5p, v5litepod, v6e, tpu7x, a100",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_what_does_not_exist_is_refused(name, said):
    with refused(said):
        slices.parse(name)


def test_one_host_of_a_slice_is_a_slice_that_exists():
    for name in ("v3-64", "v4-64", "v5p-128", "v5litepod-64", "v6e-64", "tpu7x-64"):
        whole = slices.parse(name)
        host = whole.one_host()
        assert host.num_hosts == 1
        assert host.num_devices * whole.num_hosts == whole.num_devices
    alone = slices.parse("v5litepod-8")
    assert alone.one_host() is alone
    # The compiler is told that its eight chips are one host's.
    assert alone.compiler_topology == ("v5e:2x4", {"chips_per_host_bounds": (2, 4, 1)})
