"""Reads and writes heartbeats, the last status of each job in `jobs/<role>.json`.

The trainer and the index builder read each other's heartbeat for liveness, progress,
and the snapshots in use, which garbage collection keeps.
"""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

from realm_jax.errors import BadInputError
from realm_jax.storage import MissingObjectError, Store

State = Literal["running", "finished", "failed"]


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """The last heartbeat of a job.

    Attributes:
      role: `trainer` or `index_builder`.
      step: the current training step (for the builder, that of the encoder it embeds).
      state: finished and failed are final; running may also be a job that was killed.
      time: time of the heartbeat, in Unix seconds.
      pid: process id on `host`.
      host: host name.
      extra: further values, such as the trainer's `index_step`.
    """

    role: str
    step: int
    state: State
    time: float
    pid: int
    host: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def age_seconds(self) -> float:
        """Returns the time since this heartbeat, in seconds."""
        return max(0.0, time.time() - self.time)

    def is_alive(self, timeout_seconds: float) -> bool:
        """Returns whether the job runs, with a heartbeat within the timeout."""
        return self.state == "running" and self.age_seconds() <= timeout_seconds


class Heartbeat:
    """Writes the heartbeat of one job."""

    def __init__(self, store: Store, role: str, every_seconds: float = 0.0):
        """Prepares the heartbeat, without writing anything yet.

        Args:
          store: the model directory.
          role: the job's name.
          every_seconds: age in seconds below which the last heartbeat is not replaced
            by one that differs in the step only. A bucket accepts about one write per
            second to an object.
        """
        self._store = store
        self._role = role
        self._every_seconds = every_seconds
        self._last_said: tuple[str, dict[str, Any]] | None = None
        self._last_time = 0.0

    def beat(self, step: int, state: State = "running", **extra: Any) -> None:
        """Writes the status of the job.

        Args:
          step: as in `JobStatus`.
          state: as in `JobStatus`.
          **extra: further JSON values.
        """
        now = time.monotonic()
        said = (state, extra)
        if said == self._last_said and now - self._last_time < self._every_seconds:
            return
        status = JobStatus(
            role=self._role,
            step=int(step),
            state=state,
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            extra=extra,
        )
        text = json.dumps(dataclasses.asdict(status), indent=2) + "\n"
        self._store.write(_name(self._role), text.encode())
        self._last_said, self._last_time = said, now


def read_heartbeat(store: Store, role: str) -> JobStatus | None:
    """Returns the last heartbeat of a job, None if there is none.

    Raises:
      BadInputError: the file is not a heartbeat.
    """
    name = _name(role)
    try:
        text = store.read(name)
    except MissingObjectError:
        return None
    try:
        status = JobStatus(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"expected a heartbeat in {store.url(name)}, got something else "
            f"({error}); delete that file."
        ) from error
    if status.state not in get_args(State):
        raise BadInputError(
            f"expected a state among {get_args(State)} in {store.url(name)}, got "
            f"{status.state!r}; delete that file."
        )
    return status


class Listener:
    """Monitors the heartbeat of a job by this machine's clock.

    Only changes count: the first heartbeat found may be that of a run that ended days
    ago, before the job that is now starting, and clocks of machines differ.
    """

    def __init__(self, store: Store, role: str):
        """Reads the job's last heartbeat."""
        self._store = store
        self._role = role
        self._first = read_heartbeat(store, role)
        self._last = self._first
        self._last_change = time.monotonic()

    def listen(self) -> tuple[JobStatus | None, float]:
        """Returns the last heartbeat, and the seconds since it was seen to change.

        The heartbeat is None if it has not changed since this listener began.
        """
        status = read_heartbeat(self._store, self._role)
        if status != self._last:
            self._last, self._last_change = status, time.monotonic()
        silent = time.monotonic() - self._last_change
        return (None if status == self._first else status), silent


def _name(role: str) -> str:
    return f"jobs/{role}.json"
