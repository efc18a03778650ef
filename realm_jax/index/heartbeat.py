"""Reads and writes heartbeats, the last status of each job in `jobs/<role>.json`.

The trainer and the index builder read each other's heartbeat for liveness, progress,
and the snapshots in use, which garbage collection keeps. So it has its own crc32c: one
whose bits have changed counts as unreadable.
"""

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from realm_jax.errors import BadInputError
from realm_jax.manifests import require_fields, seal, unseal
from realm_jax.storage import MissingObjectError, Store

State = Literal["running", "finished", "failed"]

_FIELDS = {
    "role": str,
    "step": int,
    "state": str,
    "time": int | float,
    "pid": int,
    "host": str,
    "extra": dict,
}


class DamagedHeartbeatError(BadInputError):
    """Raised when the file of a heartbeat holds something else."""


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """The last heartbeat of a job.

    Attributes:
      role: `trainer` or `index_builder`.
      step: the current training step (for the builder, that of the encoder it embeds).
      state: finished and failed are final; running may also be a job that was killed.
      time: time of the heartbeat, in Unix seconds.
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
    """Writes the heartbeat of one job into its model directory.

    One that differs from the last in the step alone does not replace it within
    `every_seconds`: a bucket accepts about one write per second to an object.
    """

    def __init__(self, store: Store, role: str, every_seconds: float = 0.0):
        self._store = store
        self._role = role
        self._every_seconds = every_seconds
        self._last_said: tuple[State, dict[str, Any]] | None = None
        self._last_step = 0
        self._last_time = 0.0
        self._lock = threading.Lock()

    def beat(self, step: int, state: State = "running", **extra: Any) -> None:
        """Writes the status of the job, with further JSON values; see `JobStatus`."""
        said = (state, extra)
        with self._lock:
            if said == self._last_said and self._age() < self._every_seconds:
                return
            self._write(int(step), state, extra)

    @contextlib.contextmanager
    def repeated(self, every_seconds: float) -> Iterator[None]:
        """Repeats the last status from a thread, during calls that take long.

        It then says that the process lives, not that it gets any further.
        """
        ended = threading.Event()
        thread = threading.Thread(
            target=self._repeat,
            args=(every_seconds, ended),
            name=f"{self._role}-heartbeat",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _repeat(self, every_seconds: float, ended: threading.Event) -> None:
        while not ended.wait(every_seconds / 2):
            with self._lock:
                if self._last_said is None or self._age() < every_seconds / 2:
                    continue
                # What keeps it from being written ends the job at its own next beat.
                with contextlib.suppress(OSError, BadInputError):
                    self._write(self._last_step, *self._last_said)

    def _age(self) -> float:
        return time.monotonic() - self._last_time

    def _write(self, step: int, state: State, extra: dict[str, Any]) -> None:
        status = JobStatus(
            role=self._role,
            step=step,
            state=state,
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            extra=extra,
        )
        now = time.monotonic()
        self._store.write(_name(self._role), seal(dataclasses.asdict(status)))
        self._last_step, self._last_said, self._last_time = step, (state, extra), now


def read_heartbeat(store: Store, role: str) -> JobStatus | None:
    """Returns a job's last heartbeat, or None; DamagedHeartbeatError if unreadable."""
    name = _name(role)
    try:
        data = store.read(name)
    except MissingObjectError:
        return None
    try:
        # Earlier releases wrote no checksum.
        values = unseal(data, required=False)
        require_fields(values, _FIELDS)
        # A job of another release may say more.
        status = JobStatus(**{name: values[name] for name in _FIELDS})
    except (ValueError, TypeError) as error:
        raise DamagedHeartbeatError(
            f"expected a heartbeat in {store.url(name)}, got something else "
            f"({error}); delete that file."
        ) from error
    if status.state not in get_args(State):
        raise DamagedHeartbeatError(
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
        self._store = store
        self._role = role
        self._first = self._read()
        self._last = self._first
        self._last_change = time.monotonic()

    def listen(self) -> tuple[JobStatus | None, float]:
        """Returns the last heartbeat, and the seconds since it was seen to change.

        The heartbeat is None if it has not changed since this listener began, or cannot
        be read: the job will write another.
        """
        status = self._read()
        if status != self._last:
            self._last, self._last_change = status, time.monotonic()
        silent = time.monotonic() - self._last_change
        return (None if status == self._first else status), silent

    def _read(self) -> JobStatus | None:
        with contextlib.suppress(DamagedHeartbeatError):
            return read_heartbeat(self._store, self._role)
        return None


def _name(role: str) -> str:
    return f"jobs/{role}.json"
