"""Names of accelerator types, as Cloud TPU's documentation lists them."""

import pytest

from realm_jax.errors import BadInputError
from realm_jax.hardware import HardwareConfig
from tpu_launch import slices


@pytest.mark.parametrize(
    ("name", "num_chips", "num_devices", "num_hosts", "topology"),
    [
        ("v2-8", 4, 8, 1, "2x2"),
        ("v3-32", 16, 32, 4, "4x4"),
        ("v3-64", 32, 64, 8, "4x8"),
        ("v4-8", 4, 4, 1, "2x2x1"),
        ("v4-16", 8, 8, 2, "2x2x2"),
        ("v4-32", 16, 16, 4, "2x2x4"),
        ("v4-64", 32, 32, 8, "2x4x4"),
        ("v4-128", 64, 64, 16, "4x4x4"),
        ("v5litepod-1", 1, 1, 1, "1x1"),
        ("v5litepod-8", 8, 8, 1, "2x4"),
        ("v5litepod-16", 16, 16, 4, "4x4"),
        ("v5litepod-64", 64, 64, 16, "8x8"),
        ("v2-32", 16, 32, 4, "4x4"),
        ("v2-128", 64, 128, 16, "8x8"),
        ("v5p-128", 64, 64, 16, "4x4x4"),
        ("v5p-12288", 6144, 6144, 1536, "16x16x24"),
        ("v6e-64", 64, 64, 16, "8x8"),
        ("tpu7x-8", 4, 8, 1, "2x2x1"),
        ("tpu7x-128", 64, 128, 16, "4x4x4"),
        ("h100-8", 8, 8, 1, ""),
        ("cpu", 1, 1, 1, ""),
    ],
)
def test_names_stand_for_machines(name, num_chips, num_devices, num_hosts, topology):
    machines = slices.parse(name)
    assert machines.num_chips == num_chips
    assert machines.num_devices == num_devices
    assert machines.num_hosts == num_hosts
    assert machines.topology == topology


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu7x-2", "one of tpu7x-8, tpu7x-16, .* got 'tpu7x-2'"),
        ("v4-48", "expected one of v4-8, v4-16, v4-32, .*got 'v4-48'"),
        ("v2-16", "one of v2-8, v2-32, v2-128, v2-256, v2-512, got 'v2-16'"),
        ("v2-64", "got 'v2-64'"),
        ("v3-16", "one of v3-8, v3-32, v3-64, .*v3-2048, got 'v3-16'"),
        ("v4-65", "got 'v4-65'"),
        ("v5litepod-512", "v5litepod-256, got 'v5litepod-512'"),
        ("v4", "such as v4-64.*got 'v4'"),
        ("b200-8", "known: v2, v3, v4, v5p, v5litepod, v6e, tpu7x, a100"),
    ],
)
def test_what_does_not_exist_is_refused(name, said):
    with pytest.raises(BadInputError, match=said):
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


def test_prices_are_of_chips():
    hardware = HardwareConfig("v4-64", chip_hour_prices={"v4": 3.0})
    assert slices.parse("v4-64").hourly_price(hardware) == 32 * 3.0
    assert slices.parse("v6e-64").hourly_price(hardware) is None


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("v5litepod-1", 48),
        ("v5litepod-4", 192),
        ("v5litepod-8", 384),
        ("v5litepod-16", 192),
        ("v6e-1", 176),
        ("v6e-8", 1440),
        ("v6e-64", 720),
        ("tpu7x-8", 960),
    ],
)
def test_the_memory_of_a_host_is_that_of_its_machine_type(name, gigabytes):
    assert slices.parse(name).host_memory == gigabytes << 30


@pytest.mark.parametrize(
    ("name", "accelerator", "machine_type"),
    [
        ("v3-8", "tpu-v3-device", "ct3-hightpu-4t"),
        ("v3-32", "tpu-v3-slice", "ct3p-hightpu-4t"),
        ("v4-128", "tpu-v4-podslice", "ct4p-hightpu-4t"),
        ("v5litepod-1", "tpu-v5-lite-podslice", "ct5lp-hightpu-1t"),
        ("v5litepod-8", "tpu-v5-lite-podslice", "ct5lp-hightpu-8t"),
        ("v5litepod-16", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t"),
        ("v5p-8", "tpu-v5p-slice", "ct5p-hightpu-4t"),
        ("v6e-8", "tpu-v6e-slice", "ct6e-standard-8t"),
        ("v6e-64", "tpu-v6e-slice", "ct6e-standard-4t"),
        ("tpu7x-128", "tpu7x", "tpu7x-standard-4t"),
    ],
)
def test_nodes_have_the_names_of_gkes_tables(name, accelerator, machine_type):
    assert slices.parse(name).gke == slices.GkeNode(accelerator, machine_type)


def test_who_serves_what():
    """GKE has no v2, and Cloud TPU no TPU7x."""
    assert slices.parse("v2-8").gke is None
    assert slices.parse("tpu7x-8").runtime == ""
