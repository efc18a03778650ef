"""Configuration in, operations out: against files that were read by a person."""

import dataclasses
import json
import pathlib
import re
import subprocess

import pytest

from realm_jax.errors import BadInputError
from realm_jax.hardware import HardwareConfig
from tests.tpu_launch import launching
from tpu_launch import operations
from tpu_launch.job import make_job, resource_name, run_id
from tpu_launch.operations import CreateSlice

GOLDEN = pathlib.Path(__file__).parent / "golden"
NOW = 1_800_000_000.25


def as_json(made):
    """Operations as the golden files have them."""
    found = []
    for operation in made:
        values = dataclasses.asdict(operation)
        if "startup_script" in values:
            values["startup_script"] = values["startup_script"].splitlines()
        found.append({"operation": type(operation).__name__, **values})
    return found


RUNS = {
    "v4_64_and_v4_16": launching.job,
    "two_v5litepod_64_spot": lambda: launching.job(
        *("v5litepod-64", "", 2),
        name="big",
        provisioning="spot",
        deadline_hours=1.5,
        network="pods",
        subnetwork="pods-west",
        service_account="trainer@p.iam.gserviceaccount.com",
        external_ips=False,
        fetch={"gs://bucket/my corpus": "/data/my corpus"},
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_operations_are_those_of_the_golden_file(run):
    made = operations.launch(RUNS[run](), launching.BUNDLE, NOW)
    golden = json.loads((GOLDEN / f"{run}.json").read_text())
    assert as_json(made) == golden


@pytest.mark.process("bash reads it")
@pytest.mark.parametrize("run", RUNS)
def test_startup_scripts_are_shell(run):
    for operation in operations.launch(RUNS[run](), launching.BUNDLE, NOW):
        if isinstance(operation, CreateSlice):
            script = operation.startup_script
            checked = subprocess.run(
                ["bash", "-n"], input=script, text=True, check=True
            )
            assert checked.returncode == 0
            assert script.startswith("#!/bin/bash\n")
            # Metadata of a VM: 256 KiB a value.
            assert len(script) < 256 << 10


@pytest.mark.process("bash reads it")
def test_arguments_reach_the_worker_as_they_were_given():
    job = launching.job()
    made = operations.launch(job, launching.BUNDLE, NOW)
    script = made[1].startup_script
    line = script.splitlines()[-1].replace("exec", "printf '%s\\n'", 1)
    said = subprocess.check_output(["bash", "-c", f"checkout=/x\n{line}"], text=True)
    after = said.splitlines()
    # Gin files are those of the bundle.
    expected = [arg.replace("=gin/", "=/x/gin/") for arg in launching.TRAINER]
    program = ["/x/.venv/bin/python", "-m", "realm_jax.cli.main"]
    assert after[after.index("--") + 1 :] == [*program, *expected]


@pytest.mark.parametrize("attempt", [1, 7, 999, 12345])
@pytest.mark.parametrize("name", ["a", "a-run", "r" * 30])
def test_names_are_those_of_cloud_tpu_and_never_the_same(name, attempt):
    names = {
        resource_name(run_id(name, model_dir), role, attempt)
        for model_dir in ("gs://a/b", "gs://a/c")
        for role in ("trainer", "builder")
    }
    assert len(names) == 4
    for one in names:
        # With the number of a slice of several.
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", f"{one}-15")


def test_the_same_attempt_is_the_same_request():
    job = launching.job()
    trainer, builder = job.roles

    def request(role, attempt, now=NOW):
        made = operations.create_slice(job, role, attempt, launching.BUNDLE, now, 2)
        return made.request_id

    assert request(trainer, 1) == request(trainer, 1, NOW + 60)
    ids = {request(role, attempt) for role in job.roles for attempt in (1, 2, 3)}
    assert len(ids) == 6
    assert request(builder, 1) in ids


def test_labels_are_those_of_google_cloud():
    for operation in operations.launch(launching.job(), launching.BUNDLE, NOW):
        if isinstance(operation, CreateSlice):
            for key, value in operation.labels.items():
                assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key)
                assert re.fullmatch(r"[a-z0-9_-]{0,63}", value)
            # A day later, not a moment sooner.
            assert int(operation.labels["realm-expires"]) - NOW >= 24 * 3600
            assert operation.valid_seconds == 24 * 3600


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"project": ""}, "expected a project.*PROJECT"),
        ({"zone": ""}, "expected a zone.*ZONE"),
        ({"name": "My_Run"}, "lowercase.*'My_Run'"),
        ({"name": "r" * 31}, "at most 30"),
    ],
)
def test_settings_that_cannot_be(changes, said):
    config = dataclasses.replace(launching.config(), **changes)
    with pytest.raises(BadInputError, match=said):
        make_job(config, HardwareConfig("v4-64"), "gs://a/b", [], None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"provisioning": "preemptible"}, "on-demand, spot, reserved.*'preemptible'"),
        ({"builder_provisioning": "cheap"}, "'cheap'"),
    ],
)
def test_ways_to_obtain_slices_that_cannot_be(changes, said):
    with pytest.raises(BadInputError, match=said):
        dataclasses.replace(launching.config(), **changes)


@pytest.mark.parametrize(
    ("trainer", "builder", "said"),
    [
        ("tpu7x-64", "v4-16", "does not serve TPU7x"),
        ("v4-65", "v4-16", "'v4-65'"),
        ("h100-8", "v4-16", "expected a TPU slice.*'h100-8'"),
        ("v4-64", "cpu", "expected a TPU slice.*'cpu'"),
        ("v4-64", "", "expected machines for the index builder"),
    ],
)
def test_machines_that_cannot_be(trainer, builder, said):
    hardware = HardwareConfig(trainer, builder=builder)
    with pytest.raises(BadInputError, match=said):
        make_job(launching.config(), hardware, "gs://a/b", [], [])
