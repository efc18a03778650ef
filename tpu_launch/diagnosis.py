"""What to think of an attempt: of its slices' state, and of what its workers say.

Pure functions of what was seen. Cloud TPU need not say PREEMPTED of what is preempted,
so anything but ACTIVE, or on the way there, is lost.
"""

import dataclasses
from collections.abc import Mapping

from realm_jax.hardware import LaunchConfig
from tpu_launch import worker_state
from tpu_launch.backends.backend import PENDING, FoundSlice, SliceState
from tpu_launch.job import Role
from tpu_launch.operations import EXPIRES
from tpu_launch.worker_state import State, WorkerState

# What was asked to stop may be a host that reboots, and comes back.
_REBOOT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Lost:
    """The slices went, or never came: the next attempt resumes.

    Attributes:
      reason: in one line.
      quota: whether the quota is why.
    """

    reason: str
    quota: bool = False


@dataclasses.dataclass(frozen=True)
class Failure:
    """The work failed on slices that were there.

    Attributes:
      reason: in one line.
      place: how far it had got; a failure at the same place repeats.
    """

    reason: str
    place: str


@dataclasses.dataclass(frozen=True)
class BadInput:
    """The workers refuse their input: another attempt would, too.

    Attributes:
      reason: in one line.
    """

    reason: str


Diagnosis = Lost | Failure | BadInput


def of_slices(
    found: FoundSlice, role: Role, since: float, now: float, config: LaunchConfig
) -> Lost | None:
    """Judges slices by their state.

    Args:
      found: what the service says.
      role: whose slices they should be.
      since: when they came into this state.
      now: Unix seconds.
      config: how long what may last.
    """
    wanted = (role.machines.accelerator_type, role.slices)
    if (found.accelerator_type, found.slices) != wanted:
        return Lost("asked for when the run had other machines")
    if found.state == SliceState.ACTIVE:
        expires = found.labels.get(EXPIRES, "")
        if expires.isdecimal() and int(expires) <= now:
            return Lost("past the deadline that it was made for")
        return None
    if found.state in PENDING:
        minutes = config.provisioning_minutes
        if found.state == SliceState.PROVISIONING and now - since > 60 * minutes:
            return Lost(f"{found.state} for more than {minutes:.0f} minutes")
        return None
    said = f"{found.state}: {found.reason}" if found.reason else f"{found.state}"
    return Lost(said, quota="quota" in found.reason.lower())


def of_workers(
    workers: Mapping[int, WorkerState],
    num_workers: int,
    since: float,
    now: float,
    config: LaunchConfig,
) -> Diagnosis | None:
    """Judges active slices by what their workers say.

    Args:
      workers: by number, what each said last.
      num_workers: how many there should be.
      since: when the slices became active.
      now: Unix seconds.
      config: how long what may last.
    """
    for number, worker in sorted(workers.items()):
        said = f"worker {number}: {worker.message or f'code {worker.exit_code}'}"
        if worker.state == State.FAILED:
            if worker.exit_code == worker_state.BAD_INPUT:
                return BadInput(said)
            if worker.exit_code in worker_state.STOPPED:
                return Lost(said)
            return Failure(said, worker.reached or f"step {last_step(workers)}")
        if worker.state == State.STOPPED and now - worker.time > _REBOOT_SECONDS:
            return Lost(f"{said}, and did not come back")
    return _silence(workers, num_workers, since, now, config)


def last_step(workers: Mapping[int, WorkerState]) -> int:
    """Returns the furthest step that a worker knows of, or -1."""
    return max((worker.step for worker in workers.values()), default=-1)


def _silence(
    workers: Mapping[int, WorkerState],
    num_workers: int,
    since: float,
    now: float,
    config: LaunchConfig,
) -> Diagnosis | None:
    """Judges workers that say nothing any more, or never did."""
    silent = [
        number
        for number, worker in workers.items()
        # One that is done waits for the others.
        if worker.state != State.DONE
        and now - max(worker.time, since) > 60 * config.silence_minutes
    ]
    if silent:
        return Lost(
            f"{len(silent)} of {num_workers} workers have said nothing for "
            f"{config.silence_minutes:g} minutes"
        )
    missing = set(range(num_workers)) - set(workers)
    if missing and now - since > 60 * config.startup_minutes:
        return Failure(
            f"{len(missing)} of {num_workers} workers said nothing for "
            f"{config.startup_minutes:g} minutes, from the start; see their serial "
            "output, and whether the service account may read and write the model "
            "directory",
            "the start",
        )
    return None
