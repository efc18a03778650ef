"""The API server of a cluster with JobSet and Kueue, as far as a launch meets it.

A real client talks to it. Like the API server, asked for strict validation, it refuses
what JobSet's schema (`schemas/`) lacks, and the client's models of Jobs.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jsonschema
from kubernetes import client

from tests.tpu_launch.schemas.make_schema import FILE
from tests.tpu_launch.serving import served

_SCHEMA = jsonschema.Draft202012Validator(json.loads(FILE.read_text()))


class RefusedError(Exception):
    """A Status that is answered instead of an object."""

    def __init__(self, code: int, message: str, kind: str = "jobsets"):
        super().__init__(message)
        details = {"details": {"kind": kind}} if kind else {}
        self.code, self.body = code, {"kind": "Status", "message": message, **details}


def require_valid(body: dict[str, Any]) -> None:
    for error in _SCHEMA.iter_errors(body):
        raise RefusedError(400, f"strict decoding error: {error.json_path}")
    for job in body["spec"]["replicatedJobs"]:
        if not _is_job_template(job["template"]):
            raise RefusedError(400, f"strict decoding error: {job['name']}")


def _is_job_template(body: dict[str, Any]) -> bool:
    """Returns whether the client's models take all of it."""
    template = copy.deepcopy(body)
    try:
        for container in template["spec"]["template"]["spec"]["containers"]:
            limits = container["resources"]["limits"]
            if any(type(number) is not int for number in limits.values()):
                return False
            # To the models quantities are texts, never numbers.
            limits |= {name: str(number) for name, number in limits.items()}
        model = client.V1JobTemplateSpec.from_dict(template)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    # What they do not know they leave out.
    return client.ApiClient().sanitize_for_serialization(model) == template


@dataclasses.dataclass
class Cluster:
    """What is in the cluster, by its names.

    A JobSet that is deleted is seen once more, at its end. `logs` are those of pod and
    container, `queues` are Kueue's, and `refusal` has the arguments of the
    `RefusedError` that is every answer. `changes` counts the requests that made one.
    """

    jobsets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    pods: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    logs: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    queues: Collection[str] = ("tpus",)
    namespaces: Collection[str] = ("default",)
    has_jobset: bool = True
    refusal: tuple[int, str, str] | None = None
    changes: int = 0

    def answer(self, request: Any, body: Any) -> tuple[int, Any]:
        """Returns status and body of the answer to a request: an object, or text."""
        try:
            if self.refusal:
                raise RefusedError(*self.refusal)
            return 200, self._answer(request, body)
        except RefusedError as refused:
            return refused.code, refused.body

    def _answer(self, request: Any, body: Any) -> Any:
        parts, method = urlsplit(request.path), request.command
        query = dict(parse_qsl(parts.query))
        match parts.path.split("/")[1:]:
            case ["apis", "jobset.x-k8s.io", "v1alpha2", _, namespace, "jobsets", name]:
                if self.has_jobset and method == "PATCH":
                    kind = request.headers["Content-Type"]
                    assert kind == "application/apply-patch+yaml"
                    return self._apply(namespace, name, query, body)
                if self.has_jobset:
                    return self._jobset(method, name, query)
            case ["apis", "kueue.x-k8s.io", "v1beta1", *_, "localqueues", name]:
                if name not in self.queues:
                    raise RefusedError(404, f"{name} not found", "localqueues")
                return {"metadata": {"name": name}}
            case ["api", "v1", "namespaces", _, "pods"]:
                key, _, value = query["labelSelector"].partition("=")
                found = [p for p in self.pods if p["metadata"]["labels"][key] == value]
                return {"kind": "PodList", "items": found}
            case ["api", "v1", "namespaces", _, "pods", name, "log"]:
                return self.logs[name, query["container"]]
        raise RefusedError(404, "404 page not found", "")

    def _apply(self, namespace: str, name: str, query: Any, body: Any) -> Any:
        if namespace not in self.namespaces:
            raise RefusedError(404, f'"{namespace}" not found', "namespaces")
        assert (query["fieldManager"], query["fieldValidation"]) == ("realm", "Strict")
        require_valid(body)
        before = self.jobsets.get(name, body)
        if before["spec"]["replicatedJobs"] != body["spec"]["replicatedJobs"]:
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
