"""What a backend is, and what any of them may say."""

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


# On its way to ACTIVE. What is in none of these two is lost.
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
      name: of it.
      zone: where.
      state: of all its slices together.
      labels: of its slices.
      created: in Unix seconds.
      accelerator_type: of each slice.
      slices: how many.
      reason: why it failed, where it did.
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
    """The service did not do it now; or it did, and the answer was lost.

    The same operation may be asked for again, later.
    """


class QuotaError(BusyError):
    """The quota of the project is used up: to ask again soon is of no use."""


class Backend(Protocol):
    """Creates, finds and deletes queued resources of one project.

    All methods raise `BusyError` for what may work later, `QuotaError` among it, and
    `BadInputError` for what will not: no access, a zone without such slices.
    """

    def create(self, operation: CreateSlice) -> None:
        """Asks for slices; they being there already, by the same request, is success.

        Raises:
          BadInputError: what has this name was not asked for by this operation.
        """
        ...

    def state(self, name: str, zone: str) -> FoundSlice | None:
        """Returns a queued resource, or None if there is none of this name."""
        ...

    def find(self, zone: str, labels: Mapping[str, str | None]) -> list[FoundSlice]:
        """Returns those in a zone with these labels (None: of any value)."""
        ...

    def delete(self, operation: DeleteSlice) -> None:
        """Begins to delete slices in any state; none being there is success."""
        ...

    def described(self, operation: CreateSlice | DeleteSlice) -> str:
        """Returns what would be asked for, word by word, for people to read."""
        ...


def from_json(resource: Mapping[str, Any]) -> FoundSlice:
    """Returns what the API's JSON of a queued resource says (REST reference, v2)."""
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
    """Returns whether a slice has all of these (None: of any value)."""
    return all(
        key in found.labels and value in (None, found.labels[key])
        for key, value in labels.items()
    )


def require_own(found: FoundSlice | None, operation: CreateSlice) -> None:
    """Checks that what is there is what was asked for.

    Raises:
      BadInputError: somebody else has the name.
      BusyError: it is gone again.
    """
    if found is None:
        raise BusyError(f"{operation.name}: there, and then not")
    if found.labels != operation.labels:
        raise BadInputError(
            f"expected no queued resource {operation.name} in {operation.zone} but our "
            f"own, got one with labels {dict(found.labels)}; choose another "
            "job.LaunchConfig.name"
        )


def is_quota(message: str) -> bool:
    """Returns whether an error is about TPUs that one may have, not requests a minute.

    Both are called quota, and both have the code 429 or 403.
    """
    words = message.lower()
    # "Quota limit 'TPUV4sPerProjectPerZone' has been exceeded."
    rate = re.search(r"per minute|per second|rate.?limit|queries|requests", words)
    return "quota" in words and not rate


def _seconds(timestamp: str) -> float:
    # Nanoseconds, which Python does not read.
    match = re.fullmatch(r"([^.Z]+)(\.\d+)?Z", timestamp)
    if not match:
        return 0.0
    return datetime.datetime.fromisoformat(f"{match[1]}+00:00").timestamp()
