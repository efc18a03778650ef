"""Reads and writes what a model directory says of the launch of its run.

    launch/run.json                  what was launched, and where
    launch/<role>.json               how the work of a role has ended
    launch/logs/<name>/<worker>.log  the end of what a worker's command has written

`up` and `local` write the first, the workers of TPU VMs and `local` the others. GKE
keeps ends and logs itself. The first two carry their crc32c, but not where the startup
script of a TPU VM or an earlier release wrote them.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.manifests import seal, unseal
from realm_jax.storage import AlreadyExistsError, MissingObjectError, Store
from realm_jax.training.checkpoint_manifests import finished_steps
from tpu_launch.run import BUILDER, TRAINER, outcome_name

if TYPE_CHECKING:
    from tpu_launch.gke import Gke
    from tpu_launch.tpu_vm import TpuVm

GKE, TPU_VM, LOCAL = "gke", "tpu_vm", "local"
HEARTBEATS: Mapping[str, str] = {TRAINER: "trainer", BUILDER: "index_builder"}
"""The names by which the jobs of the roles write their heartbeats."""

LOGS = "launch/logs"
"""Folder of the logs of TPU VMs."""
_RUN = "launch/run.json"
_ROLES = (TRAINER, BUILDER)
# Size of a log in the model directory.
_TAIL_BYTES = 256 << 10


class DamagedRecordError(BadInputError):
    """Raised when the file of a record holds something else."""


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """What was launched, and where.

    Attributes:
      backend: "gke", "tpu_vm" or "local".
      roles: role -> its machines, in words.
      time: time of the launch, in Unix seconds.
      deadline: time at which everything is given back, in Unix seconds; None: never,
        or it was already.
      total_steps: number of training steps, None if not known.
      where: what the backend needs to find the run: the namespace, or project and
        zones, or the folder of logs.
    """

    id: str
    backend: str
    roles: Mapping[str, str]
    time: float
    deadline: float | None = None
    total_steps: int | None = None
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def engine(self) -> "Gke | TpuVm | None":
        """Returns the engine that runs it; None for this machine.

        An engine raises `BadInputError` for what it will refuse again, and
        `NotReadyError` for what may succeed later: access that is refused, too, for
        servers of tokens and of permissions fail at times.
        """
        if self.backend == GKE:
            return self.gke()
        if self.backend != TPU_VM:
            return None
        require_extra("launch", f"--backend={TPU_VM}")
        from tpu_launch.tpu_vm import TpuVm

        where = self.where["project"], self.where["zones"]
        return TpuVm(*where, self.deadline or 0.0)

    def gke(self) -> "Gke":
        """Returns the cluster that runs it."""
        require_extra("launch", f"--backend={GKE}")
        from tpu_launch.gke import Gke

        return Gke(self.where["namespace"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the work of a role has ended; by its message if it has failed."""

    done: bool
    code: int
    message: str
    time: float


def write_record(store: Store, record: LaunchRecord) -> None:
    """Writes what was launched, in place of what was launched before."""
    store.write(_RUN, seal(dataclasses.asdict(record), is_sorted=False))


def find_record(store: Store) -> LaunchRecord | None:
    """Returns what was launched in a model directory, if anything was."""
    return _read(store, _RUN, LaunchRecord, ", and launch the run again, which goes on")


def read_record(store: Store) -> LaunchRecord:
    """Returns what was launched in a model directory, which must be something."""
    record = find_record(store)
    if record is None:
        raise BadInputError(
            f"expected a launched run in {store.url()}, found none; give the MODEL_DIR "
            "that `up` was given"
        )
    return record


def write_outcome(store: Store, role: str, code: int, message: str = "") -> None:
    """Writes how the work of a role has ended, unless that can be read already."""
    data = seal(dataclasses.asdict(Outcome(code == 0, code, message, time.time())))
    try:
        store.create(outcome_name(role), data)
    except AlreadyExistsError:
        # The first of several workers knows the cause.
        _, damaged = readable_outcomes(store)
        if role in damaged:
            store.write(outcome_name(role), data)


def outcomes(store: Store) -> dict[str, Outcome]:
    """Returns how the roles have ended that have; none of them may be damaged."""
    found = {role: _read(store, outcome_name(role), Outcome) for role in _ROLES}
    return {role: outcome for role, outcome in found.items() if outcome}


def readable_outcomes(store: Store) -> tuple[dict[str, Outcome], set[str]]:
    """Returns how the roles have ended, and those whose end is damaged."""
    found: dict[str, Outcome] = {}
    damaged: set[str] = set()
    for role in _ROLES:
        try:
            if outcome := _read(store, outcome_name(role), Outcome):
                found[role] = outcome
        except DamagedRecordError:
            damaged.add(role)
    return found, damaged


def is_over(ended: Mapping[str, Outcome]) -> bool:
    """Returns whether a run is over: its trainer is done, or a role has failed."""
    return TRAINER in ended or any(not one.done for one in ended.values())


def forget_outcomes(store: Store) -> None:
    """Has the run begin again where it has ended."""
    for role in _ROLES:
        store.delete(outcome_name(role))


def heartbeat(store: Store, role: str) -> JobStatus | None:
    """Returns the last heartbeat of a role's job; None also if it is malformed."""
    with contextlib.suppress(BadInputError):
        return read_heartbeat(store, HEARTBEATS[role])
    return None


def reached(store: Store, role: str) -> object:
    """Returns a value that changes with the progress of a role."""
    if role == TRAINER:
        # The command would resume from its newest checkpoint.
        return max(finished_steps(store), default=0)
    beat = heartbeat(store, role)
    return (beat.step, beat.extra.get("blocks_done", 0)) if beat else None


def has_built_all(store: Store) -> bool:
    """Returns whether the newest retriever has an index, or was refused one."""
    newest = SnapshotSeries(store, RETRIEVER_SERIES).latest_step()
    if newest is None or newest in SnapshotSeries(store, INDEX_SERIES).steps():
        return True
    builder = heartbeat(store, BUILDER)
    return builder is not None and str(newest) in builder.extra.get("refused", ())


def write_log(store: Store, name: str, worker: int, log: pathlib.Path) -> None:
    """Writes the end of the log of a worker of the slices `name`, if there is one."""
    if log.exists():
        store.write(f"{LOGS}/{name}/{worker}.log", tail(log))


def tail(log: pathlib.Path) -> bytes:
    """Returns the last 256 KiB of a log, from the beginning of a line."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        data = file.read()
    return data[data.find(b"\n") + 1 :] if size > _TAIL_BYTES else data


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a log, without "error: "; "" if there is none."""
    text = tail(log).decode(errors="replace") if log.exists() else ""
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""


def _read(store: Store, name: str, kind: type, advice: str = "") -> Any:
    try:
        return kind(**unseal(store.read(name), required=False))
    except MissingObjectError:
        return None
    except (TypeError, ValueError) as error:
        raise DamagedRecordError(
            f"expected what a launcher or worker of this version says in "
            f"{store.url(name)}, got something else; delete the file{advice}"
        ) from error
