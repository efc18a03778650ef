"""The API server of a cluster with JobSet and Kueue, as far as a launch meets it.

A real client talks to it. It refuses what the API server, strictly validating, and
JobSet's webhooks would: by JobSet's schema (`schemas/`), and by what stands in
pkg/webhooks/jobset_webhook.go of JobSet and pkg/apis/batch/validation of Kubernetes.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jsonschema
from kubernetes import client

from tests.tpu_launch.schemas.make_schema import FILE
from tests.tpu_launch.serving import served

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
    targets = [*rules, spec["successPolicy"]]
    facts = {
        "reasons": _all_of(rules, "onJobFailureReasons") <= _REASONS,
        "actions": {rule["action"] for rule in rules} <= _ACTIONS,
        "names": len({*names}) == len(names) and all(map(_RULE_NAME.fullmatch, names)),
        "targets": _all_of(targets, "targetReplicatedJobs") <= jobs.keys(),
        "labels": all(map(_LABEL.fullmatch, body["metadata"]["labels"].values())),
        **{n: _is_valid(body["metadata"]["name"], job) for n, job in jobs.items()},
    }
    if wrong := [fact for fact, holds in facts.items() if not holds]:
        raise RefusedError(422, f"JobSet is invalid: {wrong}")


def _all_of(rules: Sequence[Mapping[str, Any]], name: str) -> set[str]:
    return {value for rule in rules for value in rule.get(name, ())}


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

    def answer(self, request: Any, body: Any) -> tuple[int, Any]:
        """Returns status and body of the answer to a request: an object, or text."""
        try:
            return 200, self._answer(request, body)
        except RefusedError as refused:
            return refused.code, refused.body

    def _answer(self, request: Any, body: Any) -> Any:
        if self.refusal:
            raise RefusedError(*self.refusal)
        parts, method = urlsplit(request.path), request.command
        query = dict(parse_qsl(parts.query))
        match parts.path.split("/")[1:]:
            case ["apis", "jobset.x-k8s.io", "v1alpha2", _, namespace, "jobsets", name]:
                if self.has_jobset and method == "PATCH":
                    return self._apply(namespace, name, query, request.headers, body)
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
        before = self.jobsets.get(name, body)
        if before["spec"]["replicatedJobs"] != jobs:
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
    configuration = client.Configuration()
    with served(cluster.answer) as address:
        configuration.host = f"http://{address}"
        yield client.ApiClient(configuration)
