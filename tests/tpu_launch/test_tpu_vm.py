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
def up(vm):
    """Makes a pass; returns what it said."""

    def up(run=RUN):
        said = []
        vm.up(run, said.append)
        return said

    return up


def alive(world):
    return sorted(n for n, r in world.resources.items() if r.state != "DELETING")


@pytest.mark.parametrize("state", ["SUSPENDED", "SUSPENDING", "FAILED"])
def test_a_pass_asks_for_what_is_missing_or_lost(world, up, vm, state):
    up()
    assert alive(world) == BOTH
    assert up() == [f"{role}: {FIRST[role]} is ACCEPTED" for role in FIRST]
    assert len(world.created) == 2
    world.resources[FIRST[TRAINER]].state = state
    [trainer, builder] = sorted(vm.state(RUN.id), key=lambda one: one.role)[::-1]
    assert (trainer.role, trainer.name) == (TRAINER, FIRST[TRAINER])
    assert (trainer.state, builder.state) == (state, "ACCEPTED")
    assert trainer.message == ("no capacity" if state == "FAILED" else "")
    assert up()[0] == f"trainer: {FIRST[TRAINER]} is {state}; deleting it"
    assert alive(world) == sorted([FIRST[BUILDER], f"{RUN.id}-{TRAINER}-2"])
    # Being deleted, it is neither deleted again nor counted.
    up()
    assert len(world.created) == 3


def test_spot_slices_are_asked_for_as_they_are_described(world, up, vm):
    run = launching.run(provisioning="spot")
    up(run)
    described = vm.describe(run)
    for one in world.resources.values():
        [spec] = one.body["tpu"]["nodeSpec"]
        assert "spot" in one.body
        assert spec["nodeId"] in FIRST.values()
        assert spec["node"]["metadata"]["startup-script"].rstrip() in described
        seconds = one.body["queueingPolicy"]["validUntilDuration"]
        assert 3500 < float(seconds.removesuffix("s")) <= 3600


def test_other_runs_are_left_alone(world, up, vm):
    other = launching.run(model_dir="gs://bucket/another")
    up(other)
    up()
    theirs = [name for name in alive(world) if name.startswith(other.id)]
    assert len(theirs) == 2
    for one in world.resources.values():
        one.state = "FAILED"
    found = [sorted(vm.delete(RUN.id)) for _ in range(3)]
    assert found == [BOTH, BOTH, []]
    assert alive(world) == theirs
    assert vm.state(RUN.id) == []


def test_two_at_once_ask_for_one(world, up, monkeypatch):
    """The other has created it between listing and creating."""
    up()
    find, looks = TpuVm._find, iter([[]] * 3)
    monkeypatch.setattr(
        TpuVm, "_find", lambda self, run_id: next(looks, None) or find(self, run_id)
    )
    up()
    assert len(world.created) == 2
    for one in world.resources.values():
        one.body["tpu"]["nodeSpec"][0]["node"]["labels"] = {"owner": "somebody"}
    with refused(r"no queued resource .* but our own"):
        up()


def test_what_was_created_although_the_answer_was_lost(world, up):
    world.faults = {"POST": "lost"}
    with pytest.raises(NotReadyError, match="answer was lost"):
        up()
    world.faults = {}
    up()
    assert alive(world) == BOTH
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
def test_what_the_service_refuses(world, up, fault, error, message):
    world.faults = {"POST": fault}
    with pytest.raises(error, match=message) as raised:
        up()
    assert "\n" not in str(raised.value)


def test_what_cloud_tpu_lacks_is_refused():
    with refused(r"Cloud TPU serves .* got tpu7x-128"):
        TpuVm("p", [ZONE], 0.0).describe(launching.run("tpu7x-128"))
