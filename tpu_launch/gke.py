"""Runs on Google Kubernetes Engine: applies, reads and deletes the JobSet of a run.

Trainer and builder are two replicated jobs of `templates/jobset.yaml.jinja`, by which
GKE starts, restarts, ends and deletes them. Exit codes are the contract (docs/pods.md,
"What becomes of it"). The cluster is that of kubectl's current context.
"""

import contextlib
import functools
import hashlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from realm_jax.errors import BAD_INPUT, NOT_READY, BadInputError, NotReadyError
from realm_jax.hardware import RESERVED
from tpu_launch import templates
from tpu_launch.processes import STOP_CODES
from tpu_launch.run import EngineState, Run, RunFailedError

_VERSION = "0.12"
"""Oldest JobSet that will do: 0.10 reads messages of failed Jobs; until 0.12 a replaced
first pod of a slice kept the others from starting."""
_DIGEST = "realm-manifest"
"""Annotation: checksum of all that was asked for. Kueue, say, changes what is there."""
_JOBSETS = ("jobset.x-k8s.io", "v1alpha2")
_SECONDS = (10.0, 60.0)
_POLL_SECONDS = 5.0
_LINE_SECONDS = 0.5
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_ROLE_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
_SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
_HOST_LABEL = "batch.kubernetes.io/job-completion-index"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# What every container waits for.
_STARTING = ("ContainerCreating", "PodInitializing")


def manifest(run: Run) -> str:
    """Returns the JobSet of a run, in YAML."""
    for role in run.roles:
        if not role.machines.gke:
            raise BadInputError(
                f"expected a slice of v3 to TPU7x for the {role.name} on GKE, got "
                f"{role.machines.accelerator_type}; choose another, or --backend=tpu_vm"
            )
        if role.provisioning == RESERVED and not run.config.reservation:
            raise BadInputError(
                "expected the name of a reservation, which GKE does not look for, got "
                "none; set hardware.LaunchConfig.reservation"
            )
    render = functools.partial(
        templates.render,
        "jobset.yaml.jinja",
        run=run,
        bad_input=BAD_INPUT,
        not_ready=NOT_READY,
        stopped=STOP_CODES,
    )
    return render(digest=hashlib.sha256(render(digest="").encode()).hexdigest())


class Gke:
    """JobSets of a namespace."""

    def __init__(self, namespace: str):
        """Prepares to work in a namespace; a client is made when it is needed."""
        self._namespace = namespace

    @functools.cached_property
    def _api(self) -> client.ApiClient:
        # Describing a JobSet needs no cluster.
        return _connect()

    def describe(self, run: Run) -> str:
        """Returns the JobSet in YAML, as `kubectl apply -f -` takes it."""
        return manifest(run).rstrip()

    def up(self, run: Run, say: Callable[[str], None]) -> None:
        """Applies the JobSet, unless it is there or has failed (RunFailedError)."""
        body, before = yaml.safe_load(manifest(run)), self._find(run.id)
        if before is None:
            self._require_queue(run.config.queue)
        elif said := _why_it_stays(before, body):
            return say(f"JobSet {run.id} is {said}")
        try:
            self._jobset(
                "patch",
                run.id,
                body,
                field_manager="realm",
                field_validation="Strict",
                force=True,
                _content_type="application/apply-patch+yaml",
            )
        except BadInputError as error:
            if before is None:
                raise
            raise BadInputError(
                f"expected the settings with which JobSet {run.id} was created, got "
                "others; `down`, and `up` again, to go on with these from the last "
                "checkpoint"
            ) from error
        roles = ", ".join(f"{role.name} on {role}" for role in run.roles)
        say(f"{'changed' if before else 'created'} JobSet {run.id}: {roles}")
        if not run.config.queue:
            say("without a queue of Kueue, the deadline begins anew at each restart")

    def delete(self, run_id: str) -> list[str]:
        """Deletes the JobSet with its pods; returns its name until they are gone."""
        found = self._find(run_id)
        if found is None:
            return []
        if "deletionTimestamp" not in found["metadata"]:
            self._jobset("delete", run_id, propagation_policy="Foreground")
        return [f"JobSet {run_id}"]

    def state(self, run_id: str) -> list[EngineState]:
        """Returns the states of the replicated jobs, by the JobSet and its pods."""
        found = self._find(run_id)
        if found is None:
            return []
        pods, end = self._pods(found), _end(found)
        restarts = found.get("status", {}).get("restarts", 0)
        states = []
        for job in found["spec"]["replicatedJobs"]:
            newest = [pod for (role, _), pod in pods.items() if role == job["name"]]
            message = next(filter(None, map(_why_it_waits, newest)), "")
            running = sum(pod["status"]["phase"] == "Running" for pod in newest)
            total = job["replicas"] * _hosts(job)
            state = f"{'Running' if running == total else 'Starting'} {running}/{total}"
            if end:
                state, message = end[0], "; ".join(filter(None, (end[1], message)))
            elif found["spec"].get("suspend"):
                state, message = "Suspended", _why_suspended(found)
            if restarts:
                state += f", {restarts} restart{'s' if restarts > 1 else ''}"
            name = f"{run_id}-{job['name']}"
            states.append(EngineState(job["name"], name, state, message))
        return states

    def logs(
        self,
        run_id: str,
        role: str | None,
        worker: int | None,
        follow: bool,
        stop: threading.Event,
    ) -> Iterator[tuple[str, str]]:
        """Yields what the newest pod of each worker has written, as `stored_lines`.

        Until the command of a pod has started, that is what prepares the pod.
        """
        lines: queue.Queue[tuple[str, str]] = queue.Queue()
        readers: dict[tuple[str, str], threading.Thread] = {}
        broken: dict[tuple[str, str], float] = {}
        is_over, look_at = False, 0.0
        while not stop.is_set():
            if time.monotonic() >= look_at:
                found = self._find(run_id)
                is_over = found is None or _end(found) is not None
                for (name, number), pod in self._pods(found).items():
                    wanted = role in (None, name) and worker in (None, number)
                    key = pod["metadata"]["name"], _newest_container(pod)
                    if wanted and key[1] and (key not in readers or key in broken):
                        who, since = f"{name}/{number}", broken.pop(key, None)
                        readers[key] = threading.Thread(
                            target=self._read,
                            args=(who, key, follow, since, lines, broken),
                            daemon=True,
                        )
                        readers[key].start()
                look_at = time.monotonic() + _POLL_SECONDS
            reads = any(reader.is_alive() for reader in readers.values())
            try:
                yield lines.get(timeout=_LINE_SECONDS if reads or follow else 0)
            except queue.Empty:
                if not reads and (is_over or not follow):
                    return

    def _read(
        self,
        who: str,
        key: tuple[str, str],
        follow: bool,
        since: float | None,
        lines: "queue.Queue[tuple[str, str]]",
        broken: dict[tuple[str, str], float],
    ) -> None:
        """Puts the lines of a container, of all time or since a break.

        A stream that is followed and breaks off is noted in `broken`, with the time.
        """
        pod, container = key
        options = {}
        if since is not None:
            # Of whole seconds, so that a line may come twice, and none is left out.
            options["since_seconds"] = math.ceil(time.monotonic() - since) + 1
        try:
            for line in client.CoreV1Api(self._api).read_namespaced_pod_log(
                pod,
                self._namespace,
                container=container,
                follow=follow,
                _preload_content=False,
                **options,
            ):
                lines.put((who, line.decode(errors="replace").rstrip("\n")))
        except (ApiException, urllib3.exceptions.HTTPError):
            if follow:
                broken[key] = time.monotonic()

    def _find(self, run_id: str) -> dict[str, Any] | None:
        return self._jobset("get", run_id)

    def _jobset(self, verb: str, *arguments: Any, **options: Any) -> Any:
        objects = client.CustomObjectsApi(self._api)
        call = getattr(objects, f"{verb}_namespaced_custom_object")
        where = (*_JOBSETS, self._namespace, "jobsets")
        return self._ask(call, *where, *arguments, **options)

    def _pods(
        self, found: Mapping[str, Any] | None
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Returns the newest pod of each worker of a JobSet, by role and number."""
        if found is None:
            return {}
        listing = self._ask(
            client.CoreV1Api(self._api).list_namespaced_pod,
            self._namespace,
            label_selector=f"{_JOBSET_LABEL}={found['metadata']['name']}",
            # Making objects of the answer takes the client seconds.
            _preload_content=False,
        ).json()
        hosts = {job["name"]: _hosts(job) for job in found["spec"]["replicatedJobs"]}
        pods = {}
        for pod in sorted(
            listing["items"], key=lambda pod: pod["metadata"]["creationTimestamp"]
        ):
            labels = pod["metadata"]["labels"]
            role = labels[_ROLE_LABEL]
            first = int(labels[_SLICE_LABEL]) * hosts[role]
            pods[role, first + int(labels[_HOST_LABEL])] = pod
        return dict(sorted(pods.items()))

    def _require_queue(self, name: str) -> None:
        if not name:
            return
        get = client.CustomObjectsApi(self._api).get_namespaced_custom_object
        for version in ("v1beta2", "v1beta1"):
            where = ("kueue.x-k8s.io", version, self._namespace, "localqueues", name)
            with contextlib.suppress(BadInputError):
                if self._ask(get, *where):
                    return
        raise BadInputError(
            f"expected a LocalQueue {name} of Kueue in the namespace "
            f"{self._namespace}, got none; see `kubectl get localqueues`, or leave "
            "hardware.LaunchConfig.queue empty"
        )

    def _ask(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Returns the answer to a call; None if the object is not there."""
        try:
            return call(*arguments, **options, _request_timeout=_SECONDS)
        except ApiException as error:
            status = _status(error)
            message = status.get("message") or error.reason
            kind = status.get("details", {}).get("kind")
            if error.status == 404 and kind not in (None, "namespaces"):
                return None
            if error.status == 404:
                raise self._absent(kind) from error
            if error.status in (400, 409, 422):
                raise BadInputError(
                    f"expected a JobSet that the cluster accepts, got: {message}; this "
                    f"needs JobSet {_VERSION} or later"
                ) from error
            raise NotReadyError(
                f"the cluster refuses for now ({error.status}: {message}); see "
                f"`kubectl auth can-i create jobsets -n {self._namespace}`, and run "
                "the same command again"
            ) from error
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise NotReadyError(
                f"the cluster of kubectl's context does not answer ({reason}); run the "
                "same command again later"
            ) from error

    def _absent(self, kind: str | None) -> BadInputError:
        if kind:
            return BadInputError(
                f"expected a namespace {self._namespace} in the cluster, got none; "
                f"run `kubectl create namespace {self._namespace}`"
            )
        return BadInputError(
            f"expected JobSet {_VERSION} or later in the cluster, got none; see "
            "https://jobset.sigs.k8s.io/docs/installation"
        )


def _connect() -> client.ApiClient:
    configuration = client.Configuration()
    try:
        config.load_kube_config(client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(
            f"expected a cluster in the kubeconfig, got none ({reason}); run `gcloud "
            "container clusters get-credentials CLUSTER --location=LOCATION`"
        ) from error
    return client.ApiClient(configuration)


def _status(error: ApiException) -> dict[str, Any]:
    """Returns the Status by which Kubernetes says why; {} if it sent none."""
    with contextlib.suppress(ValueError):
        status = json.loads(error.body or "")
        if isinstance(status, dict):
            return status
    return {}


def _why_it_stays(before: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Returns why a JobSet is not applied anew, "" if it is; refuses a failed one."""
    metadata, end = before["metadata"], _end(before)
    if "deletionTimestamp" in metadata:
        raise NotReadyError(
            f"expected no JobSet {metadata['name']} that is being deleted, got one; "
            "run the same command again in a minute"
        )
    if end and end[0] == "Failed":
        raise RunFailedError(
            f"JobSet {metadata['name']} has failed: {end[1]}; `down`, and `up` again, "
            "to go on from the last checkpoint"
        )
    if end:
        return ": ".join(end)
    return "there; nothing changed" if _digest(before) == _digest(body) else ""


def _digest(body: Mapping[str, Any]) -> str | None:
    return body["metadata"].get("annotations", {}).get(_DIGEST)


def _hosts(job: Mapping[str, Any]) -> int:
    return job["template"]["spec"]["parallelism"]


def _end(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns how a JobSet has ended, and why; None if it has not."""
    for condition in found.get("status", {}).get("conditions", ()):
        kind, is_true = condition["type"], condition["status"] == "True"
        if kind in ("Completed", "Failed") and is_true:
            return kind, condition.get("message", "")
    return None


def _why_suspended(found: Mapping[str, Any]) -> str:
    name = found["metadata"].get("labels", {}).get(_QUEUE_LABEL)
    if not name:
        return "somebody has suspended it"
    return f"waits in the queue {name}, or its time is up: see `kubectl get workloads`"


def _containers(pod: Mapping[str, Any]) -> list[Any]:
    """Returns the containers of a pod with their states, in the order they start."""
    kinds = ("initContainerStatuses", "containerStatuses")
    return [one for kind in kinds for one in pod["status"].get(kind, ())]


def _newest_container(pod: Mapping[str, Any]) -> str:
    """Returns the container that was started last, "" if none was."""
    started = [one["name"] for one in _containers(pod) if "waiting" not in one["state"]]
    return started[-1] if started else ""


def _why_it_waits(pod: Mapping[str, Any]) -> str:
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("message", "")
    for one in _containers(pod):
        waiting, ended = one["state"].get("waiting"), one["state"].get("terminated")
        if waiting and waiting["reason"] not in _STARTING:
            return f"{one['name']}: {waiting['reason']}: {waiting.get('message', '')}"
        if ended and ended["exitCode"]:
            return f"{one['name']} has ended with exit code {ended['exitCode']}"
    return ""
