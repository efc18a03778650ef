"""A Cloud TPU on this machine: its REST API, which the real client library asks."""

import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Iterator

import pytest

from tests.tpu_launch.serving import Answer, served

_RESOURCE = re.compile(
    r"/v2/(projects/[^/]+/locations/([^/]+))/queuedResources(?:/(.+))?"
)
_PAGE = 2
_QUOTA = "Quota limit 'TPUV4sPerProjectPerZone' has been exceeded. Limit: 32 in zone z."
# Fault -> what the service answers instead of doing anything.
_ANSWERS = {
    "quota": (429, "RESOURCE_EXHAUSTED", _QUOTA),
    "500": (500, "INTERNAL", "Internal error encountered."),
    "503": (503, "UNAVAILABLE", "The service is currently unavailable."),
    "401": (401, "UNAUTHENTICATED", "Request had invalid authentication credentials."),
    "403": (403, "PERMISSION_DENIED", "Permission 'tpu.queuedResources' denied."),
    "400": (400, "INVALID_ARGUMENT", "Accelerator type is not supported here."),
}


@dataclasses.dataclass
class Resource:
    """A queued resource as the service has it."""

    body: dict
    zone: str
    state: str = "ACCEPTED"

    def json(self):
        state: dict = {"state": self.state}
        if self.state == "FAILED":
            state["failedData"] = {"error": {"code": 8, "message": "no capacity"}}
        return {**self.body, "state": state}


@dataclasses.dataclass
class World:
    """The service and its resources, by name.

    `faults` are what befalls a request, by its method: a key of `_ANSWERS`, or "lost"
    (it is done, and the answer lost). A resource that is being deleted is gone at the
    next listing.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    resources: dict[str, Resource] = dataclasses.field(default_factory=dict)
    created: list[str] = dataclasses.field(default_factory=list)
    num_requests: int = 0

    @contextlib.contextmanager
    def served(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Serves it where the client library looks for it."""
        with served(self._answer) as address:
            patch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", f"http://{address}/")
            patch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
            yield

    def _answer(self, request, body) -> Answer:
        self.num_requests += 1
        fault = self.faults.get(request.command, "")
        if fault in _ANSWERS:
            return _error(*_ANSWERS[fault])
        url = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        done = self._do(request.command, url.path, query, body)
        return None if fault == "lost" else done

    def _do(self, method, path, query, body):
        match = _RESOURCE.fullmatch(path)
        if not match:
            return 200, {"name": path, "done": True}
        parent, zone, name = match.groups()
        operation = {"name": f"{parent}/operations/one", "metadata": {}}
        if method == "POST":
            name = query["queuedResourceId"]
            if name in self.resources:
                return _error(409, "ALREADY_EXISTS", f"Resource '{name}' exists.")
            body = {**body, "name": f"{parent}/queuedResources/{name}"}
            self.resources[name] = Resource(body, zone)
            self.created.append(name)
            return 200, operation
        if method == "GET":
            return 200, self._page(zone, int(query.get("pageToken") or 0))
        if name not in self.resources:
            return _error(404, "NOT_FOUND", f"Resource '{name}' was not found.")
        if query.get("force", "").lower() != "true":
            return _error(400, "FAILED_PRECONDITION", "It has nodes; use force.")
        self.resources[name].state = "DELETING"
        return 200, operation

    def _page(self, zone, start):
        here = [r for r in self.resources.values() if r.zone == zone]
        page = {"queuedResources": [r.json() for r in here[start : start + _PAGE]]}
        if start + _PAGE < len(here):
            page["nextPageToken"] = str(start + _PAGE)
        else:
            self.resources = {
                n: r for n, r in self.resources.items() if r.state != "DELETING"
            }
        return page


def _error(code, status, message):
    return code, {"error": {"code": code, "status": status, "message": message}}
