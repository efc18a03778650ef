"""TPU VMs: what one pass of `up` asks of Cloud TPU, by the real client library."""

import threading
import time

import pytest

from realm_jax.errors import BadInputError, NotReadyError, StoppedError
from tests.tpu_launch import launching
from tests.tpu_launch.launching import ZONE
from tpu_launch.run import BUILDER, TRAINER
from tpu_launch.tpu_vm import TpuVm

RUN = launching.run()
NAMES = {role: f"{RUN.id}-{role}-" for role in (TRAINER, BUILDER)}


@pytest.fixture
def vm(world):
    return TpuVm("p", [ZONE], time.time() + 3600)


@pytest.fixture
def said():
    return []


def alive(world):
    return sorted(n for n, r in world.resources.items() if r.state != "DELETING")


def first(role):
    return f"{NAMES[role]}1"


def test_a_pass_asks_for_what_is_missing_and_the_next_for_nothing(world, vm, said):
    vm.up(RUN, said.append)
    assert alive(world) == sorted(map(first, NAMES))
    vm.up(RUN, said.append)
    assert len(world.created) == 2
    assert said[-2:] == [
        f"trainer: {first(TRAINER)} is ACCEPTED",
        f"builder: {first(BUILDER)} is ACCEPTED",
    ]


@pytest.mark.parametrize("state", ["SUSPENDED", "SUSPENDING", "FAILED"])
def test_what_is_lost_is_replaced_by_the_next_pass(world, vm, said, state):
    vm.up(RUN, said.append)
    world.resources[first(TRAINER)].state = state
    vm.up(RUN, said.append)
    assert alive(world) == sorted([first(BUILDER), f"{NAMES[TRAINER]}2"])
    assert f"trainer: {first(TRAINER)} is {state}; deleting it" in said
    # Being deleted, it is neither deleted again nor counted.
    vm.up(RUN, said.append)
    assert len(world.created) == 3


def test_other_runs_are_left_alone(world, vm, said):
    other = launching.run(model_dir="gs://bucket/another")
    vm.up(other, said.append)
    vm.up(RUN, said.append)
    theirs = [name for name in alive(world) if name.startswith(other.id)]
    assert len(theirs) == 2
    for one in world.resources.values():
        one.state = "FAILED"
    vm.down(RUN.id, said.append, threading.Event())
    assert alive(world) == theirs
    assert vm.state(RUN.id) == []


def test_a_name_that_somebody_else_has(world, vm, said):
    vm.up(RUN, said.append)
    for one in world.resources.values():
        one.body["tpu"]["nodeSpec"][0]["node"]["labels"] = {"owner": "somebody"}
    with pytest.raises(BadInputError, match=r"no queued resource .* but our own"):
        vm.up(RUN, said.append)


def test_two_at_once_ask_for_one(world, vm, said, monkeypatch):
    """The other has created it between listing and creating; it is theirs."""
    found = TpuVm._find
    vm.up(RUN, said.append)
    looks = iter([[]])
    monkeypatch.setattr(
        TpuVm, "_find", lambda self, run_id: next(looks, None) or found(self, run_id)
    )
    vm.up(RUN, said.append)
    assert len(world.created) == 2


def test_what_was_created_although_the_answer_was_lost(world, vm, said):
    world.fault = lambda method, path: "lost" if method == "POST" else ""
    with pytest.raises(NotReadyError, match="answer was lost"):
        vm.up(RUN, said.append)
    world.fault = lambda method, path: ""
    vm.up(RUN, said.append)
    assert alive(world) == sorted(map(first, NAMES))
    assert len(world.created) == 2


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("401", NotReadyError, "gcloud auth application-default login"),
        ("403", NotReadyError, "roles/tpu.admin"),
        ("quota", NotReadyError, "TPUV4sPerProjectPerZone"),
        ("500", NotReadyError, "Internal error"),
        ("503", NotReadyError, "unavailable"),
        ("400", BadInputError, "correct project, zone, machines or network"),
    ],
)
def test_what_the_service_refuses(world, vm, said, fault, error, message):
    world.fault = lambda method, path: fault if method == "POST" else ""
    with pytest.raises(error, match=message) as raised:
        vm.up(RUN, said.append)
    assert "\n" not in str(raised.value)
    assert said == []


def test_down_waits_until_nothing_is_left(world, vm, said):
    vm.up(RUN, said.append)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="`status` shows what is left"):
        vm.down(RUN.id, said.append, stop)
    assert alive(world) == []
    vm.down(RUN.id, said.append, threading.Event())
    assert vm.state(RUN.id) == []


def test_the_state_is_that_of_the_service(world, vm, said):
    vm.up(RUN, said.append)
    world.resources[first(BUILDER)].state = "FAILED"
    [builder, trainer] = sorted(vm.state(RUN.id), key=lambda one: one.role)
    assert (trainer.role, trainer.name, trainer.state) == (
        *(TRAINER, first(TRAINER)),
        "ACCEPTED",
    )
    assert (builder.state, builder.message) == ("FAILED", "no capacity")


@pytest.mark.parametrize("provisioning", ["on-demand", "spot", "reserved"])
def test_what_is_asked_for(world, said, provisioning):
    run = launching.run(
        "v5litepod-64",
        num_slices=2,
        provisioning=provisioning,
        reservation="mine" if provisioning == "reserved" else "",
        service_account="w@p",
        network="net",
        external_ips=False,
    )
    vm = TpuVm("p", [ZONE], time.time() + 7200)
    vm.up(run, said.append)
    body = world.resources[f"{run.id}-trainer-1"].body
    [spec] = body["tpu"]["nodeSpec"]
    assert spec["multisliceParams"]["nodeCount"] == 2
    node = spec["node"]
    assert node["acceleratorType"] == "v5litepod-64"
    assert node["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert node["serviceAccount"]["email"] == "w@p"
    assert node["networkConfig"] == {"network": "net"}
    assert ("spot" in body) == (provisioning == "spot")
    parent = f"projects/p/locations/{ZONE}"
    reserved = body.get("reservationName")
    assert reserved == (
        f"{parent}/reservations/mine" if provisioning == "reserved" else None
    )
    seconds = body["queueingPolicy"]["validUntilDuration"]
    assert 7100 < float(seconds.removesuffix("s")) <= 7200
    script = node["metadata"]["startup-script"]
    assert f"queued-resources delete {run.id}-trainer-1 --project=p" in script
    # But for the deadline in it, which is now's.
    described = vm.describe(run)
    assert [one for one in script.splitlines() if one not in described] == []
