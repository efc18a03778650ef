"""Both backends ask the same of the service, and understand what it answers.

The client library is the real one, and in the full tests so is gcloud where it is
installed.
"""

import dataclasses
import shlex
import shutil
import subprocess

import pytest

from realm_jax.errors import BadInputError, NoAccessError
from tests.tpu_launch import gcloud_parser, launching
from tests.tpu_launch.fake_tpu import World, served
from tpu_launch import operations
from tpu_launch.backends import gcloud
from tpu_launch.backends.api import ApiBackend
from tpu_launch.backends.backend import BusyError, QuotaError, SliceState, is_quota
from tpu_launch.backends.gcloud import GcloudBackend
from tpu_launch.operations import DeleteSlice

NOW = 1_800_000_000.0
NETWORK = {
    "network": "pods",
    "subnetwork": "pods-west",
    "service_account": "trainer@p.iam.gserviceaccount.com",
    "external_ips": False,
}
JOBS = {
    "on-demand": launching.job("v4-64", ""),
    "spot": launching.job("v5litepod-64", "", 2, provisioning="spot", **NETWORK),
    "reserved": launching.job("v6e-64", "", provisioning="reserved"),
}


def creation(kind="on-demand", attempt=1):
    job = JOBS[kind]
    until = operations.deadline(job, NOW)
    made = (job, job.roles[0], attempt, launching.BUNDLE, NOW, until)
    return operations.create_slice(*made)


@pytest.fixture
def world():
    return World(working=False)


@pytest.fixture
def service(world, monkeypatch, tmp_path):
    """Points both backends at a service of this machine."""
    with served(world) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setenv("CLOUDSDK_CORE_DISABLE_PROMPTS", "1")
        yield world


@pytest.fixture
def api(service):
    return ApiBackend("p")


@pytest.fixture
def command_line(service):
    if not shutil.which("gcloud"):
        pytest.skip("needs gcloud")
    return GcloudBackend("p")


def spec(body):
    return body["tpu"]["nodeSpec"][0]


@pytest.mark.parametrize("kind", JOBS)
def test_what_is_asked_for(api, service, kind):
    operation = creation(kind)
    api.create(operation)
    [(method, path, query, body, _)] = service.requests
    assert (method, path) == (
        "POST",
        "/v2/projects/p/locations/us-central2-b/queuedResources",
    )
    assert query["queuedResourceId"] == operation.name
    assert query["requestId"] == operation.request_id
    node = spec(body)["node"]
    assert spec(body)["parent"] == "projects/p/locations/us-central2-b"
    assert node["acceleratorType"] == operation.accelerator_type
    assert node["runtimeVersion"] == operation.runtime
    assert node["labels"] == operation.labels
    assert node["metadata"] == {"startup-script": operation.startup_script}
    assert body["queueingPolicy"] == {"validUntilDuration": "86400s"}
    if kind == "spot":
        assert body["spot"] == {}
        params = {"nodeCount": 2, "nodeIdPrefix": operation.name}
        assert spec(body)["multisliceParams"] == params
        network = {"network": "pods", "subnetwork": "pods-west"}
        assert node["networkConfig"] == network
        assert node["serviceAccount"]["email"] == NETWORK["service_account"]
    else:
        assert "spot" not in body
        assert spec(body)["nodeId"] == operation.name
        assert node["networkConfig"]["enableExternalIps"] is True
    reservation = (
        "projects/p/locations/us-central2-b/reservations/-"
        if kind == "reserved"
        else None
    )
    assert body.get("reservationName") == reservation


def normal(body):
    """A creation's body; the two write what is not set in different ways."""
    node = spec(body)["node"]
    network = {key: value for key, value in node["networkConfig"].items() if value}
    # gcloud names the default.
    network.setdefault("network", "default")
    account = {key: value for key, value in node["serviceAccount"].items() if value}
    node = {**node, "networkConfig": network, "serviceAccount": account}
    return {**body, "tpu": {"nodeSpec": [{**spec(body), "node": node}]}}


@pytest.mark.full
@pytest.mark.parametrize("kind", JOBS)
def test_gcloud_asks_for_the_same(api, command_line, service, kind):
    operation = creation(kind)
    api.create(operation)
    service.resources.clear()
    command_line.create(operation)
    bodies = [body for method, *_, body, _ in service.requests if method == "POST"]
    assert len(bodies) == 2
    assert normal(bodies[0]) == normal(bodies[1])


def test_a_slice_from_its_creation_to_its_end(api, service):
    operation = creation("spot")
    require_life(api, service, operation)


@pytest.mark.full
def test_a_slice_from_its_creation_to_its_end_by_gcloud(command_line, service):
    """gcloud takes seconds to say each word."""
    require_life(command_line, service, creation("spot"))


def require_life(backend, world, operation):
    run = {"realm-run": operation.labels["realm-run"]}
    assert backend.state(operation.name, "us-central2-b") is None
    backend.create(operation)
    backend.create(operation)
    found = backend.state(operation.name, "us-central2-b")
    assert (found.name, found.zone) == (operation.name, "us-central2-b")
    assert found.state == SliceState.CREATING
    assert found.labels == operation.labels
    assert (found.accelerator_type, found.slices) == ("v5litepod-64", 2)
    # 2026-11-21T18:00:00Z
    assert found.created == 1795284000
    world.wait(300)
    assert backend.find("us-central2-b", run)[0].state == SliceState.ACTIVE
    assert (
        backend.find("us-central2-b", {"realm-run": None, "realm-role": "builder"})
        == []
    )
    assert backend.find("elsewhere", run) == []
    world.preempt(operation.name)
    assert backend.state(operation.name, "us-central2-b").state == SliceState.SUSPENDING
    backend.delete(DeleteSlice(operation.name, "us-central2-b"))
    assert backend.state(operation.name, "us-central2-b").state == SliceState.DELETING
    world.wait(300)
    backend.delete(DeleteSlice(operation.name, "us-central2-b"))
    assert backend.find("us-central2-b", run) == []
    assert world.creations == {operation.name: 1}


def test_all_pages_of_a_list_are_read(api):
    for attempt in range(1, 6):
        api.create(creation(attempt=attempt))
    assert len(api.find("us-central2-b", {"realm-run": None})) == 5
    assert len(api.find("us-central2-b", {"realm-attempt": "3"})) == 1


def test_a_failed_slice_says_why(api, service):
    operation = creation()
    api.create(operation)
    service.resources[operation.name].fails = "Quota 'TPUS' is used up"
    service.wait(300)
    found = api.state(operation.name, "us-central2-b")
    assert found.state == SliceState.FAILED
    assert found.reason == "Quota 'TPUS' is used up"


ERRORS = {
    "429": (BusyError, "per minute"),
    "500": (BusyError, "Internal error"),
    "503": (BusyError, "unavailable"),
    "lost": (BusyError, "lost"),
    "dropped": (BusyError, "lost"),
    "quota": (QuotaError, "TPUV4sPerProjectPerZone"),
    "401": (NoAccessError, "access to Cloud TPU.*gcloud auth"),
    "403": (NoAccessError, "access to Cloud TPU.*roles/tpu.admin"),
    "400": (BadInputError, "not supported here"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors(api, service, kind):
    expected, said = ERRORS[kind]
    service.fault = lambda method, path: kind
    with pytest.raises(expected, match=said) as error:
        api.create(creation())
    assert type(error.value) is expected
    if kind not in ("quota", "400"):
        with pytest.raises(expected):
            api.state("a", "us-central2-b")
        with pytest.raises(expected):
            api.find("us-central2-b", {})
        with pytest.raises(expected):
            api.delete(DeleteSlice("a", "us-central2-b"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["quota", "403", "400"])
def test_errors_of_gcloud(command_line, service, kind):
    """The others it tries again by itself, for minutes."""
    expected = ERRORS[kind][0]
    service.fault = lambda method, path: kind
    with pytest.raises(expected) as error:
        command_line.create(creation())
    assert type(error.value) is expected


# In the words of version 528, against this service.
GCLOUD_SAYS = {
    "lost": "gcloud crashed (ConnectionError): ('Connection aborted.', ...)",
    "dropped": "gcloud crashed (ConnectionError): ('Connection aborted.', ...)",
    "429": "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Requests' and limit "
    "'Requests per minute' of service 'tpu.googleapis.com'.",
    "quota": "RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPerProjectPerZone' has been "
    "exceeded. Limit: 32 in zone us-central2-b.",
    "500": "HttpError accessing <http://...>: response: <{'status': 500}>, content "
    "<{...}> This may be due to network connectivity issues.",
    "503": "UNAVAILABLE: The service is currently unavailable.",
    "401": "There was a problem refreshing your current auth tokens: ('invalid_grant: "
    "Token has been expired or revoked.', ...) Please run: $ gcloud auth login",
    "403": "PERMISSION_DENIED: Permission 'tpu.queuedResources.create' denied.",
    "400": "INVALID_ARGUMENT: Accelerator type is not supported here.",
}


@pytest.mark.parametrize("kind", GCLOUD_SAYS)
def test_what_gcloud_says(monkeypatch, kind):
    said = f"ERROR: (gcloud.compute.tpus.queued-resources.create) {GCLOUD_SAYS[kind]}"

    def run(arguments, **_):
        assert arguments[0] == "gcloud"
        return subprocess.CompletedProcess(arguments, 1, stdout="", stderr=f"{said}\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ERRORS[kind][0]) as error:
        GcloudBackend("p").create(creation())
    assert type(error.value) is ERRORS[kind][0]


def test_no_gcloud_is_said(monkeypatch):
    def run(arguments, **_):
        raise FileNotFoundError(arguments[0])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BadInputError, match="--backend=api"):
        GcloudBackend("p").state("a", "us-central2-b")


def test_a_name_that_is_taken(api, service):
    operation = creation()
    api.create(dataclasses.replace(operation, labels={"owner": "somebody"}))
    with pytest.raises(BadInputError, match=r"choose another .*name"):
        api.create(operation)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Quota limit 'TPUV4sPerProjectPerZone' has been exceeded.", True),
        ("Quota 'TPUS_PER_TPU_FAMILY' exhausted. Limit 0 in region europe-west4", True),
        ("Quota exceeded for quota metric 'Queries' and limit 'Queries per min", False),
        ("Too many requests", False),
        ("RATE_LIMIT_EXCEEDED: quota", False),
        ('There is no more capacity in the zone "us-central2-b"', False),
    ],
)
def test_which_quota(message, expected):
    assert is_quota(message) is expected


def test_a_command_line_is_a_list_of_arguments():
    operation = dataclasses.replace(creation("spot"), name="a b; rm -rf $HOME")
    arguments = gcloud.create_arguments(operation, "/tmp/a b.sh")
    assert arguments.count("a b; rm -rf $HOME") == 1
    assert "--node-prefix=a b; rm -rf $HOME" in arguments
    assert "--metadata-from-file=startup-script=/tmp/a b.sh" in arguments


def test_what_is_described_is_what_is_asked_for(api):
    operation = creation("spot")
    text = api.described(operation)
    assert text.startswith(
        "POST /v2/projects/p/locations/us-central2-b/queuedResources?queuedRes"
    )
    delete = DeleteSlice("a", "us-central2-b")
    assert api.described(delete).endswith("/queuedResources/a?force=true")
    command_line = GcloudBackend("p")
    line = command_line.described(delete)
    assert shlex.split(line) == gcloud.delete_arguments("p", delete)
    lines = command_line.described(operation).splitlines()
    assert shlex.split(lines[-1]) == gcloud.create_arguments(operation, "startup.sh")


@pytest.mark.full
def test_every_command_line_is_one_of_the_gcloud_that_is_installed(tmp_path):
    lines = [
        *(gcloud.create_arguments(creation(kind), "startup.sh") for kind in JOBS),
        gcloud.delete_arguments("p", DeleteSlice("a", "us-central2-b")),
        gcloud.state_arguments("p", "us-central2-b", "a"),
        gcloud.list_arguments("p", "us-central2-b"),
    ]
    assert gcloud_parser.complaints(lines, tmp_path) == [""] * len(lines)
