"""Reads and writes the reports of a run's workers, files in the model directory.

    launch/<run>/<role>/done.json                    the role has done its work
    launch/<run>/<role>/<attempt>/<worker>.json      the last report of a worker

The supervisor on a worker writes them, the second at every change and every minute; the
launcher and `status` read them. Workers are numbered through all hosts of all slices of
their role, slice by slice.
"""

import dataclasses
import enum
import json
import os
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from realm_jax.storage import MissingObjectError, Store
from tpu_launch.job import BUILDER, TRAINER, attempt_id

# Exit codes of the stages, and so of the supervisor. All others are bugs and crashes.
DONE = 0
BAD_INPUT = 2
# Another job is late; the command is started again, however often.
NOT_READY = os.EX_TEMPFAIL
STOPPED = (129, 130, 143)


class State(enum.StrEnum):
    """State of a worker.

    Attributes:
      STARTING: it installs, fetches, or waits for the others.
      RUNNING: the command runs.
      RESTARTING: the command crashed, and its supervisor restarts it.
      FAILED: the supervisor has given up; see exit code and step.
      STOPPED: asked to stop: its machine is being taken away, or its time is over.
      DONE: the command has ended successfully.
    """

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    DONE = "done"


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """The last report of a worker.

    Attributes:
      state: state of the worker.
      time: time of the report, in Unix seconds.
      step: the last training step that it knows of, or -1.
      reached: text that changes with progress (`progress.py`); "" if the step is
        sufficient.
      exit_code: exit code of the command, if it has ended.
      message: explanation in one line.
    """

    state: State
    time: float
    step: int = -1
    reached: str = ""
    exit_code: int | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Done:
    """Marks that a role has done its work.

    Attributes:
      time: time at which it was done, in Unix seconds.
      attempt: number of the attempt that completed it.
      step: the last training step, or -1.
    """

    time: float
    attempt: int
    step: int = -1


def role_folder(run: str, role: str) -> str:
    """Returns the folder of a role's files."""
    return f"launch/{run}/{role}"


def attempt_folder(run: str, role: str, attempt: int) -> str:
    """Returns the folder of an attempt's files."""
    return f"{role_folder(run, role)}/{attempt_id(attempt)}"


def write_worker(
    store: Store, run: str, role: str, attempt: int, worker: int, state: WorkerState
) -> None:
    """Writes the report of a worker, in place of the last one."""
    name = f"{attempt_folder(run, role, attempt)}/{worker}.json"
    store.write(name, _encoded(state))


def read_workers(
    store: Store, run: str, role: str, attempt: int
) -> dict[int, WorkerState]:
    """Returns the last report of each worker of an attempt, by its number.

    Raises:
      BadInputError: a file is malformed.
    """
    numbers = worker_numbers(store, run, role, attempt)
    said = {n: read_worker(store, run, role, attempt, n) for n in numbers}
    return {number: state for number, state in said.items() if state is not None}


def worker_numbers(
    store: Store, run: str, role: str, attempt: int, suffix: str = ".json"
) -> list[int]:
    """Returns the numbers of an attempt's workers with files of a kind, in order."""
    folder = f"{attempt_folder(run, role, attempt)}/"
    names = [name.removeprefix(folder) for name in store.list(folder[:-1])]
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_worker(
    store: Store, run: str, role: str, attempt: int, worker: int
) -> WorkerState | None:
    """Returns the last report of a worker, or None if there is none.

    Raises:
      BadInputError: the file is malformed.
    """
    name = f"{attempt_folder(run, role, attempt)}/{worker}.json"
    values = read_json(store, name)
    if values is None:
        return None
    said = _decoded(store, name, WorkerState, values)
    return dataclasses.replace(said, state=State(said.state))


def mark_done(store: Store, run: str, role: str, done: Done) -> bool:
    """Marks a role as done; its slices are then deleted.

    An index builder ends by itself, with code 0, if it hears nothing from a trainer,
    such as one that was preempted and is being replaced. It is done only once the
    trainer is. Until then its command must be restarted.

    Returns:
      Whether the role is marked.
    """
    if role == BUILDER and read_done(store, run, TRAINER) is None:
        return False
    store.write(f"{role_folder(run, role)}/done.json", _encoded(done))
    return True


def unmark(store: Store, run: str, role: str) -> None:
    """Deletes the marker of a role, so that its command runs once more."""
    store.delete(f"{role_folder(run, role)}/done.json")


def read_done(store: Store, run: str, role: str) -> Done | None:
    """Returns the marker of a role, or None if it is not done.

    Raises:
      BadInputError: the file is malformed.
    """
    name = f"{role_folder(run, role)}/done.json"
    values = read_json(store, name)
    return None if values is None else _decoded(store, name, Done, values)


def read_json(store: Store, name: str) -> Any:
    """Returns the value of a JSON object in a store, or None if it does not exist.

    Raises:
      BadInputError: it is not JSON.
    """
    try:
        data = store.read(name)
    except MissingObjectError:
        return None
    try:
        return parse_json(data)
    except ValueError as error:
        raise damaged(store, name) from error


def _encoded(value: Any) -> bytes:
    return json.dumps(dataclasses.asdict(value)).encode()


def _decoded(store: Store, name: str, kind: type, values: Any) -> Any:
    try:
        if "state" in values:
            State(values["state"])
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise damaged(store, name) from error


def damaged(store: Store, name: str) -> BadInputError:
    """Returns the error for an object with unexpected contents."""
    return BadInputError(
        f"expected what a launcher or worker of this version says in "
        f"{store.url(name)}, got something else; delete the file"
    )
