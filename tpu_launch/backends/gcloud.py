"""Manages queued resources through the command line, `gcloud`.

For users who have only gcloud's credentials. Arguments are lists, never shell text; its
output is parsed as JSON, and its errors are classified by their initial status.
"""

import json
import pathlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

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

_PROGRAM = ("gcloud", "compute", "tpus", "queued-resources")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_SECONDS = 300.0
# "ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: Resource ..."
_STATUS = re.compile(r"ERROR: \(gcloud[^)]*\) ([A-Z_]+): (.*)", re.DOTALL)
# Errors of service or network, after gcloud has retried for half a minute.
_SERVICE = re.compile(r"HttpError accessing|connectivity|gcloud crashed|timed out")
_NO_ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED")
# "There was a problem refreshing your current auth tokens: ...", without a status.
_TOKENS = re.compile(r"auth tokens|active account|gcloud auth login")


class GcloudBackend:
    """A backend of one project; see `Backend`."""

    def __init__(self, project: str):
        self._project = project

    def create(self, operation: CreateSlice) -> None:
        """Requests slices; succeeds if the same request has created them already."""
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "startup.sh"
            script.write_text(operation.startup_script)
            try:
                _run(create_arguments(operation, str(script)), operation.name)
            except _AlreadyExistsError:
                require_own(self.state(operation.name, operation.zone), operation)
            except _NotFoundError as error:
                raise _bad_input(operation.name, str(error)) from error

    def state(self, name: str, zone: str) -> FoundSlice | None:
        """Returns a queued resource, or None if there is none of this name."""
        try:
            return from_json(_run(state_arguments(self._project, zone, name), name))
        except _NotFoundError:
            return None

    def find(self, zone: str, labels: Mapping[str, str | None]) -> list[FoundSlice]:
        """Returns the queued resources in a zone with these labels."""
        try:
            found = _run(list_arguments(self._project, zone), zone) or []
        except _NotFoundError as error:
            raise _bad_input(zone, str(error)) from error
        return [one for one in map(from_json, found) if has_labels(one, labels)]

    def delete(self, operation: DeleteSlice) -> None:
        """Begins to delete slices in any state."""
        try:
            _run(delete_arguments(self._project, operation), operation.name)
        except _NotFoundError:
            return
        except _AlreadyExistsError as error:
            raise BusyError(f"{operation.name}: {error}") from error

    def described(self, operation: CreateSlice | DeleteSlice) -> str:
        """Returns the command line, and for a creation the startup script it reads."""
        if isinstance(operation, DeleteSlice):
            return shlex.join(delete_arguments(self._project, operation))
        line = shlex.join(create_arguments(operation, "startup.sh"))
        script = operation.startup_script
        return f"cat > startup.sh << 'END'\n{script}END\n{line}"


def create_arguments(operation: CreateSlice, script: str) -> list[str]:
    """Returns the command line that creates slices.

    Args:
      operation: the slices to create.
      script: path of the startup script.
    """
    labels = ",".join(f"{key}={value}" for key, value in operation.labels.items())
    arguments = [
        *(*_PROGRAM, "create", operation.name),
        *_place(operation.project, operation.zone),
        f"--accelerator-type={operation.accelerator_type}",
        f"--runtime-version={operation.runtime}",
    ]
    if operation.slices > 1:
        arguments += [
            f"--node-count={operation.slices}",
            f"--node-prefix={operation.name}",
        ]
    else:
        arguments.append(f"--node-id={operation.name}")
    if operation.provisioning == SPOT:
        arguments.append("--spot")
    elif operation.provisioning == RESERVED:
        arguments.append("--reserved")
    for flag in ("network", "subnetwork", "service_account"):
        if value := getattr(operation, flag):
            arguments.append(f"--{flag.replace('_', '-')}={value}")
    if not operation.external_ips:
        arguments.append("--internal-ips")
    return [
        *arguments,
        f"--scopes={_SCOPE}",
        f"--labels={labels}",
        f"--metadata-from-file=startup-script={script}",
        f"--valid-until-duration={operation.valid_seconds}s",
        *("--async", "--quiet", "--format=json"),
    ]


def state_arguments(project: str, zone: str, name: str) -> list[str]:
    """Returns the command line that describes one queued resource."""
    return [*_PROGRAM, "describe", name, *_place(project, zone), "--format=json"]


def list_arguments(project: str, zone: str) -> list[str]:
    """Returns the command line that lists all queued resources of a zone."""
    return [*_PROGRAM, "list", *_place(project, zone), "--format=json"]


def delete_arguments(project: str, operation: DeleteSlice) -> list[str]:
    """Returns the command line that deletes slices."""
    return [
        *(*_PROGRAM, "delete", operation.name),
        *_place(project, operation.zone),
        *("--force", "--async", "--quiet", "--format=json"),
    ]


class _AlreadyExistsError(Exception):
    """Raised when a resource exists, or its state does not permit an operation."""


class _NotFoundError(Exception):
    """Raised when a resource does not exist."""


def _place(project: str, zone: str) -> tuple[str, str]:
    return f"--project={project}", f"--zone={zone}"


def _run(arguments: Sequence[str], what: str) -> Any:
    """Runs gcloud and returns its parsed JSON output."""
    try:
        done = subprocess.run(
            arguments,
            check=False,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise BadInputError(
            "expected the program gcloud on PATH, found none; install the Google Cloud "
            "CLI, or use --backend=api"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BusyError(f"{what}: gcloud did not end in {_SECONDS:.0f} s") from error
    if done.returncode:
        raise _error(done.stderr.strip(), what)
    try:
        return json.loads(done.stdout or "null")
    except ValueError as error:
        raise BusyError(f"{what}: gcloud printed no JSON") from error


def _error(said: str, what: str) -> Exception:
    match = _STATUS.search(said)
    status, message = (match[1], match[2]) if match else ("", said)
    line = " ".join(message.split())
    if is_quota(message) and status in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED"):
        return QuotaError(f"{what}: {line}")
    if status == "NOT_FOUND":
        return _NotFoundError(line)
    if status in ("ALREADY_EXISTS", "FAILED_PRECONDITION"):
        return _AlreadyExistsError(line)
    if status in _NO_ACCESS or (not status and _TOKENS.search(said)):
        return NoAccessError(
            f"expected gcloud to have access to {what}, got {line!r}; run `gcloud auth "
            "login`, or have the role roles/tpu.admin granted"
        )
    if status == "INVALID_ARGUMENT" or not (status or _SERVICE.search(said)):
        return _bad_input(what, line)
    return BusyError(f"{what}: {line}")


def _bad_input(what: str, said: str) -> BadInputError:
    return BadInputError(
        f"expected gcloud to work on {what}, got {said!r}; correct project, zone or "
        "machines"
    )
