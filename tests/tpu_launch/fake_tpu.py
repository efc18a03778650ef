"""A Cloud TPU on this machine: its REST API, which the real client library asks."""

import contextlib
import dataclasses
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator

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

    `fault` is asked for every request: a key of `_ANSWERS`, "lost" (it is done, and the
    answer lost), or "". A resource that is being deleted is gone at the next listing.
    """

    fault: Callable[[str, str], str] = lambda method, path: ""
    resources: dict[str, Resource] = dataclasses.field(default_factory=dict)
    created: list[str] = dataclasses.field(default_factory=list)
    requests: list = dataclasses.field(default_factory=list)

    def answer(self, method, path, query, body):
        """Returns status and JSON of a request, after doing what it asks for."""
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


@contextlib.contextmanager
def served(world: World) -> Iterator[str]:
    """Yields the address of the service, such as http://127.0.0.1:1234/."""
    handler = type("Handler", (_Handler,), {"world": world})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    world: World
    protocol_version = "HTTP/1.1"
    # Else an answer of two packets waits for the client's acknowledgement.
    disable_nagle_algorithm = True

    def _serve(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        kind = self.world.fault(self.command, url.path)
        self.world.requests.append((self.command, url.path, query, body))
        if kind in _ANSWERS:
            status, answer = _error(*_ANSWERS[kind])
        else:
            status, answer = self.world.answer(self.command, url.path, query, body)
        if kind == "lost":
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815

    def log_message(self, format, *args):
        pass


def _error(code, status, message):
    return code, {"error": {"code": code, "status": status, "message": message}}
