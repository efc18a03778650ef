"""Defines the interface of backends, with the states and errors that they share."""

import dataclasses
import datetime
import enum
import re
from collections.abc import Mapping
from typing import Any, Protocol

from realm_jax.errors import BadInputError
from tpu_launch.operations import CreateSlice, DeleteSlice


class SliceState(enum.StrEnum):
    """State of a queued resource, in the words of the Cloud TPU API."""

    UNKNOWN = "STATE_UNSPECIFIED"
    CREATING = "CREATING"
    ACCEPTED = "ACCEPTED"
    WAITING = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    FAILED = "FAILED"
    DELETING = "DELETING"


# States that precede ACTIVE. Slices in any other state but these and ACTIVE are lost.
PENDING = (
    SliceState.CREATING,
    SliceState.ACCEPTED,
    SliceState.WAITING,
    SliceState.PROVISIONING,
)


@dataclasses.dataclass(frozen=True)
class FoundSlice:
    """A queued resource that exists.

    Attributes:
      name: its name.
      zone: its zone.
      state: joint state of its slices.
      labels: labels of its slices.
      created: time of its creation, in Unix seconds.
      accelerator_type: accelerator type of each slice.
      slices: number of slices.
      reason: reason of a failure, or "".
    """

    name: str
    zone: str
    state: SliceState
    labels: Mapping[str, str]
    created: float
    accelerator_type: str
    slices: int
    reason: str = ""


class BusyError(Exception):
    """Raised when the service did not carry out an operation, or its answer was lost.

    The same operation can be retried later.
    """


class QuotaError(BusyError):
    """Raised when the project's quota is exhausted; retrying soon is of no use."""


class Backend(Protocol):
    """Creates, finds and deletes queued resources of one project.

    All methods raise `BusyError`, or its subclass `QuotaError`, for failures that may
    be temporary, `NoAccessError` if credentials are refused or cannot be renewed, and
    `BadInputError` for permanent failures, such as a zone without such slices.
    """

    def create(self, operation: CreateSlice) -> None:
        """Requests slices; succeeds if the same request has created them already.

        Raises:
          BadInputError: a queued resource of this name has another origin.
        """
        ...

    def state(self, name: str, zone: str) -> FoundSlice | None:
        """Returns a queued resource, or None if there is none of this name."""
        ...

    def find(self, zone: str, labels: Mapping[str, str | None]) -> list[FoundSlice]:
        """Returns a zone's queued resources with these labels (None: any value)."""
        ...

    def delete(self, operation: DeleteSlice) -> None:
        """Begins to delete slices in any state; succeeds if there are none."""
        ...

    def described(self, operation: CreateSlice | DeleteSlice) -> str:
        """Returns the exact request or command of an operation, for users to read."""
        ...


def from_json(resource: Mapping[str, Any]) -> FoundSlice:
    """Parses the API's JSON of a queued resource (REST reference, v2)."""
    parts = resource["name"].split("/")
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    spec = specs[0] if specs else {}
    node = spec.get("node", {})
    state = resource.get("state", {})
    try:
        known = SliceState(state.get("state", SliceState.UNKNOWN))
    except ValueError:
        known = SliceState.UNKNOWN
    return FoundSlice(
        name=parts[-1],
        zone=parts[parts.index("locations") + 1],
        state=known,
        labels=node.get("labels", {}),
        created=_seconds(resource.get("createTime", "")),
        accelerator_type=node.get("acceleratorType", ""),
        slices=int(spec.get("multisliceParams", {}).get("nodeCount", 1)),
        reason=state.get("failedData", {}).get("error", {}).get("message", ""),
    )


def has_labels(found: FoundSlice, labels: Mapping[str, str | None]) -> bool:
    """Returns whether a slice has all of these labels (None: any value)."""
    return all(
        key in found.labels and value in (None, found.labels[key])
        for key, value in labels.items()
    )


def require_own(found: FoundSlice | None, operation: CreateSlice) -> None:
    """Checks that an existing queued resource is the one of an operation.

    Raises:
      BadInputError: the name belongs to another queued resource.
      BusyError: it no longer exists.
    """
    if found is None:
        raise BusyError(f"{operation.name}: there, and then not")
    if found.labels != operation.labels:
        raise BadInputError(
            f"expected no queued resource {operation.name} in {operation.zone} but our "
            f"own, got one with labels {dict(found.labels)}; choose another "
            "hardware.LaunchConfig.name"
        )


def is_quota(message: str) -> bool:
    """Returns whether an error is about the quota of TPUs, not of requests per minute.

    Both are called quota, and both have the code 429 or 403.
    """
    words = message.lower()
    # "Quota limit 'TPUV4sPerProjectPerZone' has been exceeded."
    rate = re.search(r"per minute|per second|rate.?limit|queries|requests", words)
    return "quota" in words and not rate


def _seconds(timestamp: str) -> float:
    # The timestamp may have nanoseconds, which Python does not parse.
    match = re.fullmatch(r"([^.Z]+)(\.\d+)?Z", timestamp)
    if not match:
        return 0.0
    return datetime.datetime.fromisoformat(f"{match[1]}+00:00").timestamp()
