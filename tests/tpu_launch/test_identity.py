"""Which worker a machine is: from metadata as JAX reads them, or the environment."""

import threading

import pytest
from jax._src.clusters import cloud_tpu_cluster

from realm_jax.errors import BadInputError
from tpu_launch.identity import (
    WorkerIdentity,
    command_environment,
    find_identity,
)

TPU_ENV = """ACCELERATOR_TYPE: 'v4-16'
MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'
MEGASCALE_NUM_SLICES: '3'
MEGASCALE_SLICE_ID: '2'
NODE_ID: 'run-trainer-003-2'
WORKER_ID: '1'
"""


@pytest.fixture
def stop():
    """Of a process that was asked to stop: it does not wait."""
    stop = threading.Event()
    stop.set()
    return stop


@pytest.mark.parametrize(
    "endpoints", ["unknown:unknown:10.0.2.1,unknown:unknown:10.0.2.2", "t-w-0,t-w-1"]
)
def test_the_place_is_that_which_jax_finds(metadata, stop, monkeypatch, endpoints):
    metadata |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": endpoints,
        "tpu-env": TPU_ENV,
    }
    monkeypatch.setenv("GCE_METADATA_IP", metadata["host"])
    for name in ("ADDRESS", "NUM_SLICES", "SLICE_ID"):
        monkeypatch.delenv(f"MEGASCALE_{name}", raising=False)
    stale = {"MEGASCALE_SLICE_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "gone"}
    environment = {"GCE_METADATA_HOST": metadata["host"], **stale}
    place = find_identity(3, 2, environment, stop)
    assert place == WorkerIdentity(1, 2, 2, 3, "10.0.0.1")
    jax = cloud_tpu_cluster.GceTpuCluster
    assert place.number == jax.get_process_id() == 5
    assert jax.get_process_count() == 6
    # And what JAX finds in the environment of the command leads to the same.
    for name, value in command_environment(place, {}).items():
        monkeypatch.setenv(name, value)
    assert jax.get_process_id() == 5
    address = cloud_tpu_cluster.get_tpu_env_value("MEGASCALE_COORDINATOR_ADDRESS")
    assert address == "10.0.0.1:8080"
    metadata["tpu-env"] = ""
    assert find_identity(1, 2, environment, stop).number == 1


@pytest.mark.parametrize(
    ("missing", "value", "named"),
    [
        ("agent-worker-number", None, "agent-worker-number"),
        ("agent-worker-number", "2", "a number below 2"),
        ("worker-network-endpoints", None, "2 hosts"),
        ("worker-network-endpoints", "a,b,c", "2 hosts"),
        ("tpu-env", None, "MEGASCALE_NUM_SLICES"),
        ("tpu-env", TPU_ENV.replace("'3'", "'4'"), "MEGASCALE_NUM_SLICES of 3"),
        ("tpu-env", TPU_ENV.replace("'2'", "'3'"), "MEGASCALE_SLICE_ID"),
        ("tpu-env", TPU_ENV.replace("10.0.0.1:8080", ""), "COORDINATOR_ADDRESS"),
    ],
)
def test_what_is_missing_is_named(metadata, stop, missing, value, named):
    metadata |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": "a,b",
        "tpu-env": TPU_ENV,
    }
    metadata.pop(missing)
    if value is not None:
        metadata[missing] = value
    with pytest.raises(BadInputError, match=named) as raised:
        find_identity(3, 2, {"GCE_METADATA_HOST": metadata["host"]}, stop)
    assert "\n" not in str(raised.value)


def test_no_metadata_server(stop):
    with pytest.raises(BadInputError, match="metadata server"):
        find_identity(1, 1, {"GCE_METADATA_HOST": "127.0.0.1:1"}, stop)


def test_nothing_stale_is_inherited():
    stale = {"MEGASCALE_NUM_SLICES": "4", "MEGASCALE_OTHER": "1", "HOME": "/root"}
    alone = command_environment(WorkerIdentity(0, 0, 2, 1, "a"), stale)
    assert alone == {"HOME": "/root", "JAX_COORDINATOR_PORT": "8476"}
    several = command_environment(WorkerIdentity(1, 2, 2, 3, "a"), stale)
    assert several == {
        "HOME": "/root",
        "JAX_COORDINATOR_PORT": "8476",
        "MEGASCALE_COORDINATOR_ADDRESS": "a:8080",
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_PORT": "8080",
        "MEGASCALE_SLICE_ID": "2",
    }
