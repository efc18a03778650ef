"""Runs on TPU VMs, as queued resources of Cloud TPU (google-cloud-tpu, v2).

`up` is one pass: it asks for what is missing, deletes what is lost, and ends. Whoever
wants preempted slices back calls it again, from cron, say.

Cloud TPU runs the startup script as root on every host of a slice, at every boot.
Completed work remains after a reboot, so the script only does what is missing. It gives
the slices back when their work has ended and at the deadline, so that nobody need be
there.

Credentials are the application default ones. Like `gcloud`, this backend honours
CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU, to use another server, and
CLOUDSDK_AUTH_DISABLE_CREDENTIALS.
"""

import contextlib
import functools
import json
import os
import re
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence

import requests
from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
from google.protobuf import duration_pb2

from realm_jax.errors import BadInputError, NotReadyError
from realm_jax.hardware import RESERVED, SPOT
from tpu_launch import templates
from tpu_launch.run import EngineState, Role, Run, outcome_name

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"
_NO_CREDENTIALS = "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"
_SECONDS = 60.0
# Labels of every slice. Google Cloud requires lowercase.
_RUN, _ROLE = "realm-run", "realm-role"
_State = tpu_v2.QueuedResourceState.State
# States of slices that will not work again.
_LOST = (_State.FAILED, _State.SUSPENDING, _State.SUSPENDED)


def startup_script(
    run: Run, role: Role, name: str, deadline: int, home: str = "/opt/realm"
) -> str:
    """Returns the script that every host of a role's queued resource `name` runs.

    Code and logs are in the folder `home`; the deadline is in Unix seconds.
    """
    worker = {
        "model_dir": run.model_dir,
        "role": role.name,
        "name": name,
        "slices": role.slices,
        "hosts": role.machines.num_hosts,
        "deadline": deadline,
        "max_restarts": run.config.max_restarts,
        "grace": run.config.grace_seconds,
    }
    return templates.render(
        "startup.sh.jinja",
        run=run,
        role=role,
        name=name,
        deadline=deadline,
        home=home,
        outcome=f"{run.model_dir.rstrip('/')}/{outcome_name(role.name)}",
        worker=[f"--{flag}={value}" for flag, value in worker.items()],
    )


class TpuVm:
    """Queued resources of a project."""

    def __init__(self, project: str, zones: Sequence[str], deadline: float):
        """Prepares to work in zones of a project, without asking for anything yet.

        At the deadline, in Unix seconds, slices give themselves back.
        """
        self._project, self._zones, self._deadline = project, zones, deadline

    @functools.cached_property
    def _client(self) -> tpu_v2.TpuClient:
        # Describing a request needs no credentials.
        return _make_client()

    def describe(self, run: Run) -> str:
        """Returns path and body of each request by which `up` creates slices."""
        run.config.require_zone()
        texts = []
        for role in run.roles:
            if not role.machines.runtime:
                raise BadInputError(
                    f"expected a slice that Cloud TPU serves for the {role.name}, got "
                    f"{role.machines.accelerator_type}; choose another, or "
                    "--backend=gke"
                )
            request = self._request(run, role, 1)
            resource = request.queued_resource
            metadata = resource.tpu.node_spec[0].node.metadata
            script = metadata["startup-script"]
            metadata["startup-script"] = "(below)"
            body = tpu_v2.QueuedResource.to_dict(
                resource,
                use_integers_for_enums=False,
                always_print_fields_with_no_presence=False,
            )
            texts.append(
                f"POST /v2/{request.parent}/queuedResources"
                f"?queuedResourceId={request.queued_resource_id}\n"
                f"{json.dumps(body, indent=1, sort_keys=True)}\n\n"
                f"# startup-script of the {role.name}\n{script.rstrip()}"
            )
        return "\n\n".join(texts)

    def up(self, run: Run, say: Callable[[str], None]) -> None:
        """Deletes slices that are lost, and asks for those that are missing."""
        found = self._find(run.id)
        for role in run.roles:
            number, alive = 1, None
            for one in found:
                if _label(one, _ROLE) != role.name:
                    continue
                number = _number(one) + 1
                if one.state.state in _LOST:
                    say(f"{role.name}: {_short(one)} is {_state(one)}; deleting it")
                    self._delete(one)
                elif one.state.state != _State.DELETING:
                    alive = one
            if alive:
                say(f"{role.name}: {_short(alive)} is {_state(alive)}")
                continue
            name = self._create(run, role, number)
            say(f"{role.name}: asked for {role} ({name}, {role.provisioning})")

    def delete(self, run_id: str) -> list[str]:
        """Deletes all slices of a run; returns their names until they are gone."""
        found = self._find(run_id)
        for one in found:
            if one.state.state != _State.DELETING:
                self._delete(one)
        return [*map(_short, found)]

    def state(self, run_id: str) -> list[EngineState]:
        """Returns the states of the run's queued resources."""
        return [
            EngineState(
                _label(one, _ROLE),
                _short(one),
                _state(one),
                one.state.failed_data.error.message,
            )
            for one in self._find(run_id)
        ]

    def _find(self, run_id: str) -> list[tpu_v2.QueuedResource]:
        """Returns the queued resources of a run, in order of their numbers."""
        found = []
        for zone in self._zones:
            with _errors(zone):
                found += self._client.list_queued_resources(
                    parent=self._parent(zone), timeout=_SECONDS, retry=None
                )
        # The service has no filter.
        ours = [one for one in found if _label(one, _RUN) == run_id]
        return sorted(ours, key=_number)

    def _create(self, run: Run, role: Role, number: int) -> str:
        """Asks for the slices of a role; returns the name of the queued resource."""
        request = self._request(run, role, number)
        name = request.queued_resource_id
        try:
            with _errors(name, exceptions.Conflict):
                self._client.create_queued_resource(
                    request, timeout=_SECONDS, retry=None
                )
        except exceptions.Conflict as error:
            # Another `up` was faster, or the answer to an earlier one was lost.
            if name not in map(_short, self._find(run.id)):
                raise BadInputError(
                    f"expected no queued resource {name} in {role.zone} but our own, "
                    "got one; choose another hardware.LaunchConfig.name"
                ) from error
        return name

    def _request(
        self, run: Run, role: Role, number: int
    ) -> tpu_v2.CreateQueuedResourceRequest:
        config, parent = run.config, self._parent(role.zone)
        name = f"{run.id}-{role.name}-{number}"
        script = startup_script(run, role, name, int(self._deadline))
        node = tpu_v2.Node(
            accelerator_type=role.machines.accelerator_type,
            runtime_version=role.machines.runtime,
            labels={_RUN: run.id, _ROLE: role.name},
            metadata={"startup-script": script},
            network_config=tpu_v2.NetworkConfig(
                network=config.network,
                subnetwork=config.subnetwork,
                enable_external_ips=config.external_ips,
            ),
            service_account=tpu_v2.ServiceAccount(
                email=config.service_account, scope=[SCOPE]
            ),
        )
        spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=parent, node=node)
        if role.slices > 1:
            spec.multislice_params = spec.MultisliceParams(
                node_count=role.slices, node_id_prefix=name
            )
        else:
            spec.node_id = name
        seconds = max(1, int(self._deadline - time.time()))
        resource = tpu_v2.QueuedResource(
            tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]),
            queueing_policy=tpu_v2.QueuedResource.QueueingPolicy(
                valid_until_duration=duration_pb2.Duration(seconds=seconds)
            ),
        )
        if role.provisioning == SPOT:
            resource.spot = tpu_v2.QueuedResource.Spot()
        elif role.provisioning == RESERVED:
            # "-": any reservation of the project in this zone that fits.
            reservation = config.reservation or "-"
            resource.reservation_name = f"{parent}/reservations/{reservation}"
        return tpu_v2.CreateQueuedResourceRequest(
            parent=parent,
            queued_resource_id=name,
            queued_resource=resource,
            # Names come back when their resources are gone; requests do not.
            request_id=str(uuid.uuid4()),
        )

    def _delete(self, found: tpu_v2.QueuedResource) -> None:
        request = tpu_v2.DeleteQueuedResourceRequest(name=found.name, force=True)
        # Being provisioned, or gone or going already: the next pass shows which.
        passing = (exceptions.NotFound, exceptions.Conflict, exceptions.BadRequest)
        with contextlib.suppress(*passing), _errors(_short(found), *passing):
            self._client.delete_queued_resource(request, timeout=_SECONDS, retry=None)

    def _parent(self, zone: str) -> str:
        return f"projects/{self._project}/locations/{zone}"


def _short(found: tpu_v2.QueuedResource) -> str:
    return found.name.rpartition("/")[2]


def _number(found: tpu_v2.QueuedResource) -> int:
    number = found.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _label(found: tpu_v2.QueuedResource, label: str) -> str:
    specs = found.tpu.node_spec
    return specs[0].node.labels.get(label, "") if specs else ""


def _state(found: tpu_v2.QueuedResource) -> str:
    return _State(found.state.state).name


def _make_client() -> tpu_v2.TpuClient:
    endpoint = urllib.parse.urlsplit(os.environ.get(_ENDPOINT, ""))
    if not endpoint.netloc:
        try:
            return tpu_v2.TpuClient(transport="rest")
        except auth_exceptions.GoogleAuthError as error:
            raise _no_access(error) from error
    anonymous = os.environ.get(_NO_CREDENTIALS, "").lower() in ("1", "true")
    return tpu_v2.TpuClient(
        transport=TpuRestTransport(
            host=endpoint.netloc,
            url_scheme=endpoint.scheme,
            credentials=AnonymousCredentials() if anonymous else None,
        )
    )


@contextlib.contextmanager
def _errors(what: str, *expected: type[Exception]) -> Iterator[None]:
    """Converts errors of the client to ours, except the expected ones."""
    try:
        yield
    except expected:
        raise
    except exceptions.GoogleAPICallError as error:
        is_quota = re.search(r"quota limit", str(error), re.IGNORECASE)
        is_refused = isinstance(error, (exceptions.Forbidden, exceptions.Unauthorized))
        if is_refused and not is_quota:
            raise _no_access(error) from error
        busy = (exceptions.TooManyRequests, exceptions.ServerError)
        if is_refused or isinstance(error, busy):
            raise NotReadyError(f"{what}: {error.message}") from error
        raise BadInputError(
            f"expected {what} to be something that Cloud TPU knows, got "
            f"{error.message!r}; correct project, zone, machines or network"
        ) from error
    except (exceptions.RetryError, auth_exceptions.TransportError) as error:
        raise NotReadyError(f"{what}: {error}") from error
    except auth_exceptions.GoogleAuthError as error:
        raise _no_access(error) from error
    except (requests.exceptions.RequestException, OSError) as error:
        raise NotReadyError(f"{what}: the answer was lost ({error})") from error


def _no_access(error: Exception) -> NotReadyError:
    return NotReadyError(
        f"expected access to Cloud TPU, got {str(error)!r}; run `gcloud auth "
        "application-default login`, enable tpu.googleapis.com, or have the role "
        "roles/tpu.admin granted"
    )
