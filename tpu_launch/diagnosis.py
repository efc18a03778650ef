"""Diagnoses an attempt from the state of its slices and the reports of its workers.

These are pure functions of observations. Cloud TPU may not report PREEMPTED for a
preempted slice, so any state but ACTIVE, or one that leads to it, counts as lost.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from realm_jax.hardware import LaunchConfig
from tpu_launch import worker_state
from tpu_launch.backends.backend import PENDING, FoundSlice, SliceState
from tpu_launch.job import Role
from tpu_launch.operations import EXPIRES
from tpu_launch.worker_state import State, WorkerState

# A worker that was asked to stop may be on a host that reboots, and return.
_REBOOT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Lost:
    """The slices are gone, or were never created: the next attempt resumes.

    Attributes:
      reason: explanation in one line.
      quota: whether the quota is the cause.
    """

    reason: str
    quota: bool = False


@dataclasses.dataclass(frozen=True)
class Failure:
    """The work failed on slices that were active.

    Attributes:
      reason: explanation in one line.
      place: progress at the failure; a second failure at the same place is final.
    """

    reason: str
    place: str


@dataclasses.dataclass(frozen=True)
class BadInput:
    """The workers refuse their input, as those of another attempt would.

    Attributes:
      reason: explanation in one line.
    """

    reason: str


Diagnosis = Lost | Failure | BadInput


def of_slices(
    found: FoundSlice, role: Role, since: float, now: float, config: LaunchConfig
) -> Lost | None:
    """Diagnoses slices by their state.

    Args:
      found: state in the service.
      role: the role that the slices belong to.
      since: time at which they entered this state, in Unix seconds.
      now: time in Unix seconds.
      config: time limits.
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
    silent: Sequence[float],
    config: LaunchConfig,
) -> Diagnosis | None:
    """Diagnoses active slices by the reports of their workers.

    Times in reports are those of the workers' clocks, so none of them is read here.

    Args:
      workers: last report of each worker, by its number.
      silent: seconds since the last new report of each expected worker, or since its
        slice became active, by the launcher's clock.
      config: time limits.
    """
    for number, worker in sorted(workers.items()):
        said = f"worker {number}: {worker.message or f'code {worker.exit_code}'}"
        if worker.state == State.FAILED:
            if worker.exit_code == worker_state.BAD_INPUT:
                return BadInput(said)
            if worker.exit_code in worker_state.STOPPED:
                return Lost(said)
            return Failure(said, worker.reached or f"step {last_step(workers)}")
        if worker.state == State.STOPPED and silent[number] > _REBOOT_SECONDS:
            return Lost(f"{said}, and did not come back")
    return _silence(workers, silent, config)


def last_step(workers: Mapping[int, WorkerState]) -> int:
    """Returns the latest step that a worker has reported, or -1."""
    return max((worker.step for worker in workers.values()), default=-1)


def _silence(
    workers: Mapping[int, WorkerState],
    silent: Sequence[float],
    config: LaunchConfig,
) -> Diagnosis | None:
    """Diagnoses workers that have stopped reporting, or never reported."""
    lost = [
        number
        for number, worker in workers.items()
        # A worker that is done waits for the others.
        if worker.state != State.DONE and silent[number] > 60 * config.silence_minutes
    ]
    if lost:
        return Lost(
            f"{len(lost)} of {len(silent)} workers have said nothing for "
            f"{config.silence_minutes:g} minutes"
        )
    missing = set(range(len(silent))) - set(workers)
    if missing and max(silent[n] for n in missing) > 60 * config.startup_minutes:
        return Failure(
            f"{len(missing)} of {len(silent)} workers said nothing for "
            f"{config.startup_minutes:g} minutes, from the start; see their serial "
            "output, and whether the service account may read and write the model "
            "directory",
            "the start",
        )
    return None
