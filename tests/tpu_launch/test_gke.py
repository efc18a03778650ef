"""GKE: the JobSet of a run, and what is asked of the cluster by the real client."""

import dataclasses
import hashlib
import json
import re
import shutil
import signal
import subprocess
import tarfile
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.config import kube_config
from urllib3.exceptions import ProtocolError

from realm_jax.errors import BadInputError, NotReadyError
from tests.refused import refused
from tests.tpu_launch import launching
from tests.tpu_launch.fake_kubernetes import Cluster, RefusedError, require_valid, serve
from tpu_launch import gke
from tpu_launch.gke import Gke
from tpu_launch.run import (
    BUILDER,
    TRAINER,
    EngineState,
    Run,
    RunFailedError,
    bundle_name,
)

RUN = launching.run()


def manifest(run: Run) -> dict[str, Any]:
    return yaml.safe_load(gke.manifest(run))


def job_of(body: Mapping[str, Any], role: str) -> dict[str, Any]:
    (job,) = [one for one in body["spec"]["replicatedJobs"] if one["name"] == role]
    return job


def pod_of(body: Mapping[str, Any], role: str) -> dict[str, Any]:
    return job_of(body, role)["template"]["spec"]["template"]["spec"]


def test_engines_are_asked_for_what_was_looked_over():
    """`python -m tests.tpu_launch.launching` writes these files anew."""
    for name, text in launching.described().items():
        assert text == (launching.GOLDEN / name).read_text()
        if name.endswith(".yaml"):
            body = yaml.safe_load(text)
            require_valid(body)
            for part in (body["spec"], pod_of(body, TRAINER)):
                part["gracePeriod"] = 60
                with pytest.raises(RefusedError, match="strict decoding error"):
                    require_valid(body)
                del part["gracePeriod"]


def becomes(body: dict[str, Any], role: str, container: str, code: int, condition: str):
    """What becomes of a pod's end, as in Kubernetes' pod_failure_policy.go."""
    spec, pod = job_of(body, role)["template"]["spec"], "default/realm-2-x-0-3-abcde"
    for index, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", ())
        how = f"matching {rule['action']} rule at index {index}"
        if exits and exits["containerName"] == container and code in exits["values"]:
            who = f"Container {container} for pod {pod}"
            message = f"{who} failed with exit code {code}"
        elif condition in [one["type"] for one in conditions]:
            message = f"Pod {pod} has condition {condition}"
        else:
            continue
        if rule["action"] == "Ignore":
            return REPLACED
        return action(body, role, "PodFailurePolicy", f"{message} {how}")
    if spec.get("backoffLimitPerIndex", spec.get("backoffLimit", 6)):
        return REPLACED
    message = "Job has reached the specified backoff limit"
    return action(body, role, "BackoffLimitExceeded", message)


def action(body: dict[str, Any], role: str, reason: str, message: str) -> str:
    """What becomes of a JobSet by a failed Job, as in JobSet's failure_policy.go."""
    for rule in body["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if (
            reason in rule.get("onJobFailureReasons", [reason])
            and any(re.search(pattern, message) for pattern in patterns)
            and role in rule.get("targetReplicatedJobs", [role])
        ):
            return rule["action"]
    return "RestartJobSet"


PREEMPTED = "DisruptionTarget"
REPLACED = "the pod is replaced"
UNCOUNTED = "RestartJobSetAndIgnoreMaxRestarts"
BECOMES = {
    # Container, exit code, condition of the pod: what becomes of trainer and builder.
    ("realm", 2, ""): ("FailJobSet", "FailJobSet"),
    ("realm", 75, ""): (REPLACED, REPLACED),
    ("realm", 137, PREEMPTED): (UNCOUNTED, REPLACED),
    ("realm", 143, PREEMPTED): (UNCOUNTED, REPLACED),
    # The workers beside the one that is preempted stop with it.
    ("realm", 143, ""): (UNCOUNTED, REPLACED),
    ("realm", 129, ""): (UNCOUNTED, REPLACED),
    ("realm", 1, ""): ("RestartJobSet", REPLACED),
    ("realm", 134, ""): ("RestartJobSet", REPLACED),
    # tar and apt exit with 2 as well.
    ("fetch", 2, ""): ("RestartJobSet", REPLACED),
    ("install", 2, ""): ("RestartJobSet", REPLACED),
}


def test_exit_codes_are_the_contract():
    body = manifest(RUN)
    for ended, expected in BECOMES.items():
        found = tuple(becomes(body, role, *ended) for role in (TRAINER, BUILDER))
        assert found == expected, ended
    for role, reason in (
        *((TRAINER, "DeadlineExceeded"), (BUILDER, "DeadlineExceeded")),
        (BUILDER, "MaxFailedIndexesExceeded"),
    ):
        assert action(body, role, reason, "Job was ...") == "FailJobSet"


def test_what_gke_lacks_is_refused():
    for machines, said in (
        ({"trainer": "v2-8"}, "of v3 to TPU7x for the trainer on GKE, got v2-8"),
        ({"builder": "cpu"}, "for the builder on GKE, got cpu"),
        ({"provisioning": "reserved"}, "name of a reservation, .* got none"),
    ):
        with refused(said):
            manifest(launching.run(**machines))


def expand(text: str) -> str:
    """What Kubernetes makes of an argument, as its expand.go has it."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda m: "$" if m[0] == "$$" else "?", text)


@settings(max_examples=15)
@given(st.text("$()aé=\"'\\ #:{}\n", max_size=12))
def test_arguments_arrive_as_they_are(text):
    roles = [dataclasses.replace(RUN.roles[0], command=("pretrain", text))]
    pod = pod_of(manifest(dataclasses.replace(RUN, roles=(*roles,))), TRAINER)
    assert [*map(expand, pod["containers"][0]["args"])] == ["pretrain", text]


@pytest.mark.full
def test_a_pod_unpacks_the_code_and_becomes_the_command(tmp_path):
    """The scripts run, with a folder in place of /realm and programs that pretend."""
    archive = tmp_path / "code.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(__file__, "code.py")
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    (tmp_path / "launch/bundles").mkdir(parents=True)
    programs = tmp_path / "code/.venv/bin"
    programs.mkdir(parents=True)
    for name, text in {
        "gcloud": 'echo "$@" >> calls; [ "$2" != cp ] || cp "$3" "$4"',
        "python": 'trap "exit 143" TERM; for word; do echo "$word"; done\n'
        "while :; do sleep 0.01; done",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def start(container: dict[str, Any]) -> subprocess.Popen:
        words = [*map(expand, container["command"] + container.get("args", []))]
        words = [re.sub(r"/realm(?=/)", str(tmp_path), word) for word in words]
        path = {"PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.Popen(words, cwd=tmp_path, env=path, stdout=subprocess.PIPE)

    run = launching.run(
        model_dir=str(tmp_path), fetch={"gs://b/wiki": f"{tmp_path}/wiki, all"}
    )
    for digest, exit_code in ((right, 0), ("0" * 64, 1)):
        run = dataclasses.replace(run, code=digest)
        shutil.copy(archive, tmp_path / bundle_name(digest))
        fetching = start(pod_of(manifest(run), TRAINER)["initContainers"][0])
        fetching.communicate()
        assert fetching.returncode == exit_code
    assert (tmp_path / "code/code.py").exists()
    assert "rsync --recursive gs://b/wiki" in (tmp_path / "calls").read_text()
    command = start(pod_of(manifest(RUN), TRAINER)["containers"][0])
    said = [command.stdout.readline().decode().rstrip() for _ in range(5)]
    assert said == ["-m", "realm_jax.cli.main", *launching.COMMANDS[TRAINER]]
    command.send_signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def engine(cluster, monkeypatch):
    monkeypatch.setattr(gke, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(gke, "_LINE_SECONDS", 0.01)
    with serve(cluster) as api:
        monkeypatch.setattr(gke, "_connect", lambda: api)
        yield Gke("default")


@pytest.fixture
def up(engine):
    """Calls `up`; returns what it said."""

    def up(run=RUN):
        said = []
        engine.up(run, said.append)
        return said[0]

    return up


def end(cluster: Cluster, kind: str, message: str) -> None:
    condition = {"type": kind, "status": "True", "message": message}
    cluster.jobsets[RUN.id]["status"] = {"conditions": [condition], "restarts": 2}


def test_a_second_up_changes_nothing(cluster, up):
    run = launching.run(queue="tpus")
    roles = "trainer on 1 x v4-64, builder on 1 x v4-16"
    assert up(run) == f"created JobSet {run.id}: {roles}"
    assert cluster.jobsets[run.id] == manifest(run)
    # Kueue adds to it when it admits it.
    pod_of(cluster.jobsets[run.id], TRAINER)["tolerations"].append({"key": "of-kueue"})
    assert up(run) == f"JobSet {run.id} is there; nothing changed"
    with refused(r"settings with which JobSet .* `down`"):
        up(launching.run(queue="tpus", grace_seconds=5))
    end(cluster, "Failed", "it was bad")
    with pytest.raises(RunFailedError, match="has failed: it was bad; `down`"):
        up(run)
    end(cluster, "Completed", "all done")
    assert up(run) == f"JobSet {RUN.id} is Completed: all done"
    cluster.jobsets[RUN.id]["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(NotReadyError, match="being deleted"):
        up(run)
    assert cluster.changes == 1


def test_what_is_deleted_is_there_until_it_is_gone(cluster, engine, up):
    up()
    found = [engine.delete(RUN.id) for _ in range(4)]
    assert found == [[f"JobSet {RUN.id}"], [f"JobSet {RUN.id}"], [], []]
    assert cluster.jobsets == {}
    assert cluster.changes == 2
    assert engine.state(RUN.id) == []


def add_pod(cluster: Cluster, role: str, host: int, phase: str, at: int, **status: Any):
    name, time = f"{RUN.id}-{role}-0-{host}-{at}", f"2026-01-01T00:00:{at:02}Z"
    labels = {
        "jobset.sigs.k8s.io/jobset-name": RUN.id,
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": str(host),
    }
    metadata = {"name": name, "creationTimestamp": time, "labels": labels}
    container = {"name": "realm", "state": {"running": {}}}
    status = {"phase": phase, "containerStatuses": [container], **status}
    cluster.pods.append({"metadata": metadata, "status": status})
    cluster.logs[name, "realm"] = f"host {host}\nat {at}"


def test_status_is_that_of_the_jobset_and_its_newest_pods(cluster, engine, up):
    up()
    for host in range(8):
        add_pod(cluster, TRAINER, host, "Failed", 0)
        add_pod(cluster, TRAINER, host, "Running", 1)
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "no nodes"}
    add_pod(cluster, BUILDER, 0, "Pending", 0, conditions=[unschedulable])
    found = cluster.jobsets[RUN.id]
    found["status"] = {"restarts": 1}
    starts = f"{RUN.id}-builder", "Starting 0/2, 1 restart", "no nodes"
    assert engine.state(RUN.id) == [
        EngineState(TRAINER, f"{RUN.id}-trainer", "Running 8/8, 1 restart"),
        EngineState(BUILDER, *starts),
    ]
    found["spec"]["suspend"] = True
    assert engine.state(RUN.id)[0].message == "somebody has suspended it"
    found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "tpus"
    assert engine.state(RUN.id)[0].message.startswith("waits in the queue tpus")
    end(cluster, "Failed", "it was bad")
    (container,) = cluster.pods[1]["status"]["containerStatuses"]
    container["state"] = {"terminated": {"exitCode": 2}}
    trainer, _ = engine.state(RUN.id)
    assert trainer.state == "Failed, 2 restarts"
    assert trainer.message == "it was bad; realm has ended with exit code 2"


@pytest.mark.parametrize("follow", [False, True])
def test_logs_are_those_of_the_newest_pods(cluster, engine, up, follow):
    def lines(run_id, role, worker):
        return sorted(engine.logs(run_id, role, worker, follow, threading.Event()))

    up()
    end(cluster, "Completed", "")
    for at in (0, 1):
        for host in (0, 1):
            add_pod(cluster, BUILDER, host, "Running", at)
    first, second = (
        [(f"builder/{n}", f"{w}") for w in ("at 1", f"host {n}")] for n in (0, 1)
    )
    assert lines(RUN.id, None, None) == [*first, *second]
    assert lines(RUN.id, BUILDER, 1) == second
    assert lines(RUN.id, TRAINER, None) == lines("another", None, None) == []


def test_a_stream_that_breaks_off_is_followed_again(cluster, engine, up, monkeypatch):
    up()
    add_pod(cluster, BUILDER, 0, "Running", 0)
    read, asked = gke.client.CoreV1Api.read_namespaced_pod_log, []

    def broken_at_first(*arguments, **options):
        asked.append(options.get("since_seconds", 0))
        if len(asked) > 1:
            return read(*arguments, **options)

        def lines():
            yield b"host 0\n"
            raise ProtocolError("broken")

        return lines()

    monkeypatch.setattr(
        gke.client.CoreV1Api, "read_namespaced_pod_log", broken_at_first
    )
    stop = threading.Event()
    lines = engine.logs(RUN.id, BUILDER, None, True, stop)
    found = [next(lines) for _ in range(3)]
    stop.set()
    assert found == [("builder/0", text) for text in ("host 0", "host 0", "at 0")]
    assert asked[0] == 0 < asked[1]


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("has_jobset", False, BadInputError, "JobSet 0.12 or later in the cluster"),
        ("namespaces", set(), BadInputError, "kubectl create namespace default"),
        ("queues", set(), BadInputError, "a LocalQueue tpus .* got none"),
        ("refusal", (403, "no", "x"), NotReadyError, r"\(403: no\); see `kubectl auth"),
        ("refusal", (500, "no", "x"), NotReadyError, "refuses for now"),
    ],
)
def test_what_a_cluster_lacks_is_one_line(cluster, up, name, value, error, said):
    setattr(cluster, name, value)
    with pytest.raises(error, match=said) as caught:
        up(launching.run(queue="tpus"))
    assert "\n" not in str(caught.value)
    assert cluster.changes == 0


def test_no_cluster_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "config"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    for text in ("", "{", "clusters: []"):
        with refused("in the kubeconfig, got none"):
            Gke("default").state(RUN.id)
        path.write_text(text)
    with serve(Cluster()) as api:
        gone = api.configuration.host
    named = {"name": "x", "cluster": {"server": gone}, "context": {"cluster": "x"}}
    known = {"clusters": [named], "contexts": [named], "current-context": "x"}
    path.write_text(json.dumps(known))
    with pytest.raises(NotReadyError, match=r"does not answer .*; run the same"):
        Gke("default").state(RUN.id)
