"""A Cloud TPU on this machine: its REST API, its slices, and what runs on them.

The service answers over HTTP on loopback, as the real client library and the real
gcloud ask. Time is invented: whoever waits on `World` makes it pass, and with it slices
come, are preempted and go, and their workers train.
"""

import contextlib
import dataclasses
import http.server
import json
import random
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator

from realm_jax.storage import AlreadyExistsError, MissingObjectError
from tpu_launch import worker_state
from tpu_launch.slices import parse
from tpu_launch.worker_state import Done, State, WorkerState

_RESOURCE = re.compile(
    r"/v2/(projects/[^/]+/locations/([^/]+))/queuedResources(?:/(.+))?"
)
_PAGE = 2
# Seconds that a slice spends in each state before the next.
_PHASES = {
    "CREATING": ("WAITING_FOR_RESOURCES", 20),
    "WAITING_FOR_RESOURCES": ("PROVISIONING", 40),
    "PROVISIONING": ("ACTIVE", 40),
    "SUSPENDING": ("SUSPENDED", 30),
    "DELETING": (None, 50),
}
_QUOTA = "Quota limit 'TPUV4sPerProjectPerZone' has been exceeded. Limit: 32 in zone z."
_RATE = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'."
# Fault -> what the service answers instead of doing anything.
_ANSWERS = {
    "429": (429, "RESOURCE_EXHAUSTED", _RATE),
    "quota": (429, "RESOURCE_EXHAUSTED", _QUOTA),
    "500": (500, "INTERNAL", "Internal error encountered."),
    "503": (503, "UNAVAILABLE", "The service is currently unavailable."),
    "401": (401, "UNAUTHENTICATED", "Request had invalid authentication credentials."),
    "403": (403, "PERMISSION_DENIED", "Permission 'tpu.queuedResources' denied."),
    "400": (400, "INVALID_ARGUMENT", "Accelerator type is not supported here."),
}


class MemoryStore:
    """A store in memory, of what the launcher uses."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}

    def write(self, name, data):
        self.objects[name] = data

    def create(self, name, data):
        if self.objects.setdefault(name, data) != data:
            raise AlreadyExistsError(name)

    def read(self, name):
        if name not in self.objects:
            raise MissingObjectError(name)
        return self.objects[name]

    def exists(self, name):
        return name in self.objects

    def list(self, folder=""):
        return sorted(name for name in self.objects if name.startswith(f"{folder}/"))

    def url(self, name=""):
        return f"memory/{name}"


@dataclasses.dataclass
class Resource:
    """A queued resource as the service has it."""

    body: dict
    zone: str
    state: str = "CREATING"
    since: float = 0.0
    created: float = 0.0
    fails: str = ""

    @property
    def labels(self):
        return self.body["tpu"]["nodeSpec"][0]["node"].get("labels", {})

    @property
    def num_workers(self):
        spec = self.body["tpu"]["nodeSpec"][0]
        count = int(spec.get("multisliceParams", {}).get("nodeCount", 1))
        return count * parse(spec["node"]["acceleratorType"]).num_hosts

    def json(self):
        state: dict = {"state": self.state}
        if self.state == "FAILED":
            state["failedData"] = {"error": {"code": 8, "message": self.fails}}
        created = "2026-11-21T18:00:00.123456789Z"
        return {**self.body, "state": state, "createTime": created}


@dataclasses.dataclass
class World:
    """The service, its slices, the workers on them, and time.

    `fault` is asked for every request: a key of `_ANSWERS`, "lost" (it is done, and the
    answer lost), "dropped" (neither), or "". `on_tick` is called as time passes.
    """

    store: MemoryStore = dataclasses.field(default_factory=MemoryStore)
    steps: int = 100
    steps_of: dict[str, int] = dataclasses.field(default_factory=dict)
    steps_per_minute: int = 10
    checkpoint_every: int = 10
    fault: Callable[[str, str], str] = lambda method, path: ""
    on_tick: Callable[["World"], None] = lambda world: None
    stop_at: float = float("inf")
    working: bool = True
    workers_ahead: float = 0.0
    time: float = 1_000_000.0
    resources: dict[str, Resource] = dataclasses.field(default_factory=dict)
    creations: Counter = dataclasses.field(default_factory=Counter)
    requests: list = dataclasses.field(default_factory=list)
    checkpoints: dict[str, int] = dataclasses.field(default_factory=dict)
    running: dict[str, float] = dataclasses.field(default_factory=dict)
    most_live: int = 0
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)

    def now(self):
        return self.time

    def wait(self, seconds):
        self.wait_anyway(seconds)
        return self.time >= self.stop_at

    def wait_anyway(self, seconds):
        end = self.time + seconds
        while self.time < end:
            self.time = min(end, self.time + 15)
            with self.lock:
                self._pass()
                self.on_tick(self)

    def preempt(self, name):
        resource = self.resources[name]
        resource.state, resource.since = "SUSPENDING", self.time
        self.running.pop(name, None)

    def active(self):
        return [n for n, r in self.resources.items() if r.state == "ACTIVE"]

    def _pass(self):
        for name, resource in list(self.resources.items()):
            after, seconds = _PHASES.get(resource.state, (resource.state, 0))
            if after != resource.state and self.time - resource.since >= seconds:
                if after is None:
                    del self.resources[name]
                    continue
                if resource.fails and after == "ACTIVE":
                    after = "FAILED"
                resource.state, resource.since = after, self.time
            if resource.state == "ACTIVE" and self.working:
                self._work(name, resource)

    def _work(self, name, resource):
        run, role = resource.labels["realm-run"], resource.labels["realm-role"]
        attempt = int(resource.labels["realm-attempt"])
        begun = self.running.setdefault(name, self.time)
        trained = int((self.time - begun) / 60 * self.steps_per_minute)
        kept = self.checkpoints.setdefault(role, 0)
        steps = self.steps_of.get(role, self.steps)
        step = min(steps, self.checkpoints.setdefault(name, kept) + trained)
        self.checkpoints[role] = max(
            kept, step // self.checkpoint_every * self.checkpoint_every
        )
        done = step == steps
        told = self.time + self.workers_ahead
        said = WorkerState(State.DONE if done else State.RUNNING, told, step)
        for worker in range(resource.num_workers):
            worker_state.write_worker(self.store, run, role, attempt, worker, said)
        if done:
            mark = Done(self.time, attempt, step)
            worker_state.mark_done(self.store, run, role, mark)

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
            resource = Resource(body, zone, "CREATING", self.time, self.time)
            self.resources[name] = resource
            self.creations[name] += 1
            self._count_live(resource)
            return 200, operation
        if method == "GET" and not name:
            return 200, self._page(zone, int(query.get("pageToken") or 0))
        if name not in self.resources:
            return _error(404, "NOT_FOUND", f"Resource '{name}' was not found.")
        resource = self.resources[name]
        if method == "DELETE":
            # gcloud writes it as Python does.
            if query.get("force", "").lower() != "true":
                return _error(400, "FAILED_PRECONDITION", "It has nodes; use force.")
            resource.state, resource.since = "DELETING", self.time
            self.running.pop(name, None)
            return 200, operation
        return 200, resource.json()

    def _page(self, zone, start):
        here = [r for r in self.resources.values() if r.zone == zone]
        page = {"queuedResources": [r.json() for r in here[start : start + _PAGE]]}
        if start + _PAGE < len(here):
            page["nextPageToken"] = str(start + _PAGE)
        return page

    def _count_live(self, new):
        same = [r for r in self.resources.values() if r.labels == new.labels]
        roles = [
            r
            for r in self.resources.values()
            if [r.labels.get(k) for k in ("realm-run", "realm-role")]
            == [new.labels.get(k) for k in ("realm-run", "realm-role")]
        ]
        self.most_live = max(self.most_live, len(same), len(roles))


def random_faults(seed: int, share: float) -> Callable[[str, str], str]:
    """Every kind of fault at random, in a share of the requests."""
    source = random.Random(seed)
    kinds = ("429", "500", "503", "lost", "dropped", "quota")

    def fault(method, path):
        if source.random() >= share:
            return ""
        kind = source.choice(kinds)
        return "503" if kind == "quota" and method != "POST" else kind

    return fault


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
        with self.world.lock:
            kind = self.world.fault(self.command, url.path)
            self.world.requests.append((self.command, url.path, query, body, kind))
            if kind in _ANSWERS:
                status, answer = _error(*_ANSWERS[kind])
            elif kind == "dropped":
                self.close_connection = True
                return
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
