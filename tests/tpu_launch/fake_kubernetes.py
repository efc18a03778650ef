"""The API server of a cluster with JobSet and Kueue, as far as a launch meets it.

A real client talks to it. It refuses what the API server, strictly validating, and
JobSet's webhooks would: by JobSet's schema (`schemas/`), and by what stands in
pkg/webhooks/jobset_webhook.go of JobSet and pkg/apis/batch/validation of Kubernetes.
"""

import contextlib
import copy
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
from kubernetes import client

from tests.tpu_launch.schemas.make_schema import FILE

SCHEMA = jsonschema.Draft202012Validator(json.loads(FILE.read_text()))
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_LABEL = re.compile(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
# RestartJob has a feature gate, which is off.
_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
_REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"}


class RefusedError(Exception):
    """A Status that is answered instead of an object."""

    def __init__(self, code: int, message: str, kind: str = "jobsets"):
        super().__init__(message)
        details = {"details": {"kind": kind}} if kind else {}
        self.code, self.body = code, {"kind": "Status", "message": message, **details}


def require_valid(body: Mapping[str, Any]) -> None:
    """Refuses what would not be created."""
    for error in SCHEMA.iter_errors(body):
        raise RefusedError(400, f"strict decoding error: {error.json_path}")
    spec = body["spec"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    rules = spec["failurePolicy"]["rules"]
    names = [rule["name"] for rule in rules]
    targets = [*spec["successPolicy"]["targetReplicatedJobs"]]
    for rule in rules:
        targets += rule.get("targetReplicatedJobs", ())
    facts = {
        "reasons": all(
            _REASONS.issuperset(r.get("onJobFailureReasons", ())) for r in rules
        ),
        "actions": {rule["action"] for rule in rules} <= _ACTIONS,
        "names": len({*names}) == len(names) and all(map(_RULE_NAME.fullmatch, names)),
        "targets": {*targets} <= jobs.keys(),
        "labels": all(map(_LABEL.fullmatch, body["metadata"]["labels"].values())),
        **{
            name: _is_valid(body["metadata"]["name"], job) for name, job in jobs.items()
        },
    }
    if wrong := [fact for fact, holds in facts.items() if not holds]:
        raise RefusedError(422, f"JobSet is invalid: {wrong}")


def _is_valid(jobset: str, job: Mapping[str, Any]) -> bool:
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    containers = pod["containers"] + pod["initContainers"]
    last = job["replicas"] - 1, spec["completions"] - 1
    longest = f"{jobset}-{job['name']}-{last[0]}-{last[1]}-abcde"
    rules = spec["podFailurePolicy"]["rules"]
    exits = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    mounts = [[m["mountPath"] for m in one["volumeMounts"]] for one in containers]
    return (
        len(longest) <= 63
        and pod["restartPolicy"] == "Never"
        and spec["completionMode"] == "Indexed"
        and all(("onExitCodes" in r) != ("onPodConditions" in r) for r in rules)
        and all(one["values"] == sorted({*one["values"]} - {0}) for one in exits)
        and {e["containerName"] for e in exits} <= {one["name"] for one in containers}
        and all(len({*paths}) == len(paths) for paths in mounts)
    )


class Cluster:
    """What is in the cluster.

    Attributes:
      jobsets: name -> JobSet; what is deleted is seen once more, at its end.
      pods: pods, in JSON.
      logs: (pod, container) -> text.
      queues: names of Kueue's local queues.
      namespaces: names of the namespaces.
      has_jobset: whether JobSet is installed.
      refusal: arguments of the `RefusedError` that is every answer, or None.
      changes: number of requests that changed something.
    """

    def __init__(self) -> None:
        self.jobsets: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[tuple[str, str], str] = {}
        self.queues, self.namespaces = {"tpus"}, {"default"}
        self.has_jobset = True
        self.refusal: tuple[int, str, str] | None = None
        self.changes = 0

    def answer(self, method: str, url: str, headers: Any, body: Any) -> Any:
        """Returns the answer to a request: an object, or text."""
        if self.refusal:
            raise RefusedError(*self.refusal)
        parts = urlsplit(url)
        query = {key: value[0] for key, value in parse_qs(parts.query).items()}
        match parts.path.split("/")[1:]:
            case ["apis", "jobset.x-k8s.io", "v1alpha2", _, namespace, "jobsets", name]:
                if self.has_jobset and method == "PATCH":
                    return self._apply(namespace, name, query, headers, body)
                if self.has_jobset:
                    return self._jobset(method, name, query)
            case ["apis", "kueue.x-k8s.io", "v1beta1", *_, "localqueues", name]:
                if name in self.queues:
                    return {"metadata": {"name": name}}
                raise RefusedError(
                    404, f'localqueues "{name}" not found', "localqueues"
                )
            case ["api", "v1", "namespaces", _, "pods"]:
                key, _, value = query["labelSelector"].partition("=")
                found = [p for p in self.pods if p["metadata"]["labels"][key] == value]
                return {"kind": "PodList", "items": found}
            case ["api", "v1", "namespaces", _, "pods", name, "log"]:
                return self.logs[name, query["container"]]
        raise RefusedError(404, "404 page not found", "")

    def _apply(
        self, namespace: str, name: str, query: Any, headers: Any, body: dict[str, Any]
    ) -> dict[str, Any]:
        if namespace not in self.namespaces:
            raise RefusedError(404, f'"{namespace}" not found', "namespaces")
        assert headers["Content-Type"] == "application/apply-patch+yaml"
        assert (query["fieldManager"], query["fieldValidation"]) == ("realm", "Strict")
        require_valid(body)
        jobs = body["spec"]["replicatedJobs"]
        if (
            name in self.jobsets
            and self.jobsets[name]["spec"]["replicatedJobs"] != jobs
        ):
            raise RefusedError(422, "spec.replicatedJobs: field is immutable")
        self.jobsets[name] = copy.deepcopy(body)
        self.changes += 1
        return body

    def _jobset(self, method: str, name: str, query: Any) -> dict[str, Any]:
        if (found := self.jobsets.get(name)) is None:
            raise RefusedError(404, f'jobsets.jobset.x-k8s.io "{name}" not found')
        if method == "DELETE":
            assert query["propagationPolicy"] == "Foreground"
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.changes += 1
        elif "deletionTimestamp" in found["metadata"]:
            del self.jobsets[name]
        return found


@contextlib.contextmanager
def serve(cluster: Cluster) -> Iterator[client.ApiClient]:
    """Serves a cluster; yields a client of it."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else None
            try:
                reply = cluster.answer(self.command, self.path, self.headers, body)
                self.send_response(200)
            except RefusedError as refused:
                reply = refused.body
                self.send_response(refused.code)
            text = reply if isinstance(reply, str) else json.dumps(reply)
            kind = "text/plain" if isinstance(reply, str) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PATCH = do_DELETE = _handle  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    try:
        yield client.ApiClient(configuration)
    finally:
        server.shutdown()
        server.server_close()
