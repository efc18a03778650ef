"""Manages queued resources through the Cloud TPU API (google-cloud-tpu, v2).

Credentials are the application default ones. Like `gcloud`, this backend honours
CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU, to use another server, and
CLOUDSDK_AUTH_DISABLE_CREDENTIALS.
"""

import contextlib
import functools
import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import requests
from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
from google.protobuf import duration_pb2

from realm_jax.errors import BadInputError, NoAccessError
from realm_jax.hardware import RESERVED, SPOT
from tpu_launch.backends.backend import (
    BusyError,
    FoundSlice,
    QuotaError,
    from_json,
    has_labels,
    is_quota,
    require_own,
)
from tpu_launch.operations import CreateSlice, DeleteSlice

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"
_NO_CREDENTIALS = "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"
_SECONDS = 60.0


class ApiBackend:
    """A backend of one project; see `Backend`."""

    def __init__(self, project: str, client: tpu_v2.TpuClient | None = None):
        self._project = project
        self._given = client

    @functools.cached_property
    def _client(self) -> tpu_v2.TpuClient:
        # Created on first use, because describing a request needs no credentials.
        return self._given or _make_client()

    def create(self, operation: CreateSlice) -> None:
        """Requests slices; succeeds if the same request has created them already."""
        request = create_request(operation)
        try:
            with _errors(operation.name, exceptions.Conflict):
                self._client.create_queued_resource(
                    request, timeout=_SECONDS, retry=None
                )
        except exceptions.Conflict:
            require_own(self.state(operation.name, operation.zone), operation)

    def state(self, name: str, zone: str) -> FoundSlice | None:
        """Returns a queued resource, or None if there is none of this name."""
        path = f"{_parent(self._project, zone)}/queuedResources/{name}"
        try:
            with _errors(name, exceptions.NotFound):
                found = self._client.get_queued_resource(
                    name=path, timeout=_SECONDS, retry=None
                )
        except exceptions.NotFound:
            return None
        return from_json(_json(found))

    def find(self, zone: str, labels: Mapping[str, str | None]) -> list[FoundSlice]:
        """Returns the queued resources in a zone with these labels.

        The filter is applied here, because the service has none.
        """
        with _errors(zone):
            pages = self._client.list_queued_resources(
                parent=_parent(self._project, zone), timeout=_SECONDS, retry=None
            )
            found = [from_json(_json(resource)) for resource in pages]
        return [one for one in found if has_labels(one, labels)]

    def delete(self, operation: DeleteSlice) -> None:
        """Begins to delete slices in any state."""
        request = delete_request(self._project, operation)
        try:
            with _errors(
                *(operation.name, exceptions.NotFound),
                *(exceptions.Conflict, exceptions.BadRequest),
            ):
                self._client.delete_queued_resource(
                    request, timeout=_SECONDS, retry=None
                )
        except exceptions.NotFound:
            return
        except (exceptions.Conflict, exceptions.BadRequest) as error:
            # Being provisioned, or deleted already: the next poll shows which.
            raise BusyError(f"{operation.name}: {error.message}") from error

    def described(self, operation: CreateSlice | DeleteSlice) -> str:
        """Returns method, path and body of the request."""
        parent = f"/v2/{_parent(self._project, operation.zone)}/queuedResources"
        if isinstance(operation, DeleteSlice):
            return f"DELETE {parent}/{operation.name}?force=true"
        query = {
            "queuedResourceId": operation.name,
            "requestId": operation.request_id,
        }
        body = _json(create_request(operation).queued_resource)
        return f"POST {parent}?{urllib.parse.urlencode(query)}\n" + json.dumps(
            body, indent=1
        )


def create_request(operation: CreateSlice) -> tpu_v2.CreateQueuedResourceRequest:
    """Returns the request that creates slices."""
    parent = _parent(operation.project, operation.zone)
    node = tpu_v2.Node(
        accelerator_type=operation.accelerator_type,
        runtime_version=operation.runtime,
        labels=dict(operation.labels),
        metadata={"startup-script": operation.startup_script},
        network_config=tpu_v2.NetworkConfig(
            network=operation.network,
            subnetwork=operation.subnetwork,
            enable_external_ips=operation.external_ips,
        ),
        service_account=tpu_v2.ServiceAccount(
            email=operation.service_account, scope=[SCOPE]
        ),
    )
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=parent, node=node)
    if operation.slices > 1:
        spec.multislice_params = tpu_v2.QueuedResource.Tpu.NodeSpec.MultisliceParams(
            node_count=operation.slices, node_id_prefix=operation.name
        )
    else:
        spec.node_id = operation.name
    resource = tpu_v2.QueuedResource(
        tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]),
        queueing_policy=tpu_v2.QueuedResource.QueueingPolicy(
            valid_until_duration=duration_pb2.Duration(seconds=operation.valid_seconds)
        ),
    )
    if operation.provisioning == SPOT:
        resource.spot = tpu_v2.QueuedResource.Spot()
    elif operation.provisioning == RESERVED:
        # Any reservation of the project in this zone that fits.
        resource.reservation_name = f"{parent}/reservations/-"
    return tpu_v2.CreateQueuedResourceRequest(
        parent=parent,
        queued_resource_id=operation.name,
        queued_resource=resource,
        request_id=operation.request_id,
    )


def delete_request(
    project: str, operation: DeleteSlice
) -> tpu_v2.DeleteQueuedResourceRequest:
    """Returns the request that deletes a queued resource with its slices."""
    return tpu_v2.DeleteQueuedResourceRequest(
        name=f"{_parent(project, operation.zone)}/queuedResources/{operation.name}",
        force=True,
    )


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


def _parent(project: str, zone: str) -> str:
    return f"projects/{project}/locations/{zone}"


def _json(message: Any) -> dict[str, Any]:
    return json.loads(
        type(message).to_json(
            message,
            use_integers_for_enums=False,
            always_print_fields_with_no_presence=False,
        )
    )


@contextlib.contextmanager
def _errors(what: str, *expected: type[Exception]) -> Iterator[None]:
    """Converts errors of the client to those of a backend, except the expected ones."""
    try:
        yield
    except expected:
        raise
    except (exceptions.TooManyRequests, exceptions.Forbidden) as error:
        if is_quota(str(error)):
            raise QuotaError(f"{what}: {error.message}") from error
        if isinstance(error, exceptions.TooManyRequests):
            raise BusyError(f"{what}: {error.message}") from error
        raise _no_access(error) from error
    except (exceptions.ServerError, exceptions.RetryError) as error:
        raise BusyError(f"{what}: {error.message}") from error
    except exceptions.Unauthorized as error:
        raise _no_access(error) from error
    except exceptions.GoogleAPICallError as error:
        raise BadInputError(
            f"expected {what} to be something that Cloud TPU knows, got "
            f"{error.message!r}; correct project, zone, machines or network"
        ) from error
    except auth_exceptions.TransportError as error:
        raise BusyError(f"{what}: {error}") from error
    except auth_exceptions.GoogleAuthError as error:
        raise _no_access(error) from error
    except (requests.exceptions.RequestException, OSError) as error:
        raise BusyError(f"{what}: the answer was lost ({error})") from error


def _no_access(error: Exception) -> NoAccessError:
    return NoAccessError(
        f"expected access to Cloud TPU, got {str(error)!r}; run `gcloud auth "
        "application-default login`, enable tpu.googleapis.com, or have the role "
        "roles/tpu.admin granted"
    )
