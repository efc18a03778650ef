"""TPU VMs: what one pass of `up` asks of Cloud TPU, by the real client library."""

import time

import pytest

from realm_jax.errors import BadInputError, NotReadyError
from tests.refused import refused
from tests.tpu_launch import launching
from tests.tpu_launch.launching import ZONE
from tpu_launch.run import BUILDER, TRAINER
from tpu_launch.tpu_vm import TpuVm

RUN = launching.run()
FIRST = {role: f"{RUN.id}-{role}-1" for role in (TRAINER, BUILDER)}
BOTH = sorted(FIRST.values())


@pytest.fixture
def vm(world):
    return TpuVm("p", [ZONE], time.time() + 3600)


@pytest.fixture
def said():
    return []


def alive(world):
    return sorted(n for n, r in world.resources.items() if r.state != "DELETING")


def test_a_pass_asks_for_what_is_missing_and_the_next_for_nothing(world, vm, said):
    vm.up(RUN, said.append)
    assert alive(world) == BOTH
    vm.up(RUN, said.append)
    assert len(world.created) == 2
    assert said[-2:] == [f"{role}: {FIRST[role]} is ACCEPTED" for role in FIRST]


@pytest.mark.parametrize("state", ["SUSPENDED", "SUSPENDING", "FAILED"])
def test_what_is_lost_is_replaced_by_the_next_pass(world, vm, said, state):
    vm.up(RUN, said.append)
    world.resources[FIRST[TRAINER]].state = state
    vm.up(RUN, said.append)
    assert alive(world) == sorted([FIRST[BUILDER], f"{RUN.id}-{TRAINER}-2"])
    assert f"trainer: {FIRST[TRAINER]} is {state}; deleting it" in said
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
    while vm.delete(RUN.id):
        pass
    assert alive(world) == theirs
    assert vm.state(RUN.id) == []


def test_a_name_that_somebody_else_has(world, vm, said):
    vm.up(RUN, said.append)
    for one in world.resources.values():
        one.body["tpu"]["nodeSpec"][0]["node"]["labels"] = {"owner": "somebody"}
    with refused(r"no queued resource .* but our own"):
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
    world.faults = {"POST": "lost"}
    with pytest.raises(NotReadyError, match="answer was lost"):
        vm.up(RUN, said.append)
    world.faults = {}
    vm.up(RUN, said.append)
    assert alive(world) == BOTH
    assert len(world.created) == 2


def test_what_the_service_refuses(world, vm, said):
    for fault, error, message in (
        ("401", NotReadyError, "gcloud auth application-default login"),
        ("403", NotReadyError, "roles/tpu.admin"),
        ("quota", NotReadyError, "TPUV4sPerProjectPerZone"),
        ("500", NotReadyError, "Internal error"),
        ("503", NotReadyError, "unavailable"),
        ("400", BadInputError, "correct project, zone, machines or network"),
    ):
        world.faults = {"POST": fault}
        with pytest.raises(error, match=message) as raised:
            vm.up(RUN, said.append)
        assert "\n" not in str(raised.value)
    assert said == []


def test_what_is_deleted_is_there_until_it_is_gone(world, vm, said):
    vm.up(RUN, said.append)
    assert sorted(vm.delete(RUN.id)) == BOTH
    assert alive(world) == []
    assert sorted(vm.delete(RUN.id)) == BOTH
    assert vm.delete(RUN.id) == vm.state(RUN.id) == []


def test_the_state_is_that_of_the_service(world, vm, said):
    vm.up(RUN, said.append)
    world.resources[FIRST[BUILDER]].state = "FAILED"
    builder, trainer = sorted(vm.state(RUN.id), key=lambda one: one.role)
    assert (trainer.role, trainer.name) == (TRAINER, FIRST[TRAINER])
    assert (trainer.state, builder.state) == ("ACCEPTED", "FAILED")
    assert builder.message == "no capacity"


def test_what_is_asked_for(world, said):
    vm, parent = TpuVm("p", [ZONE], time.time() + 7200), f"projects/p/locations/{ZONE}"
    for provisioning, reservation in (("spot", ""), ("reserved", "mine")):
        run = launching.run(
            *("v5litepod-64", "", 2),
            provisioning=provisioning,
            reservation=reservation,
            service_account="w@p",
            network="net",
            external_ips=False,
        )
        vm.up(run, said.append)
        body = world.resources.pop(f"{run.id}-trainer-1").body
        [spec] = body["tpu"]["nodeSpec"]
        assert spec["multisliceParams"]["nodeCount"] == 2
        node = spec["node"]
        machines = node["acceleratorType"], node["runtimeVersion"]
        assert machines == ("v5litepod-64", "v2-alpha-tpuv5-lite")
        assert node["serviceAccount"]["email"] == "w@p"
        assert node["networkConfig"] == {"network": "net"}
        assert ("spot" in body) == (provisioning == "spot")
        reserved = f"{parent}/reservations/mine" if reservation else None
        assert body.get("reservationName") == reserved
        seconds = body["queueingPolicy"]["validUntilDuration"]
        assert 7100 < float(seconds.removesuffix("s")) <= 7200
        script = node["metadata"]["startup-script"]
        assert f"queued-resources delete {run.id}-trainer-1" in script
        assert "export JAX_COORDINATOR_PORT=8476" in script
        # But for the deadline in it, which is now's.
        described = vm.describe(run)
        assert [one for one in script.splitlines() if one not in described] == []


def test_what_cloud_tpu_lacks_is_refused():
    with refused(r"Cloud TPU serves .* got tpu7x-128"):
        TpuVm("p", [ZONE], 0.0).describe(launching.run("tpu7x-128"))
