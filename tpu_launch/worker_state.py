"""What the workers of a run say, in files of the model directory.

    launch/<run>/<role>/done.json                    the role has done its work
    launch/<run>/<role>/<attempt>/<worker>.json      what a worker last said

The supervisor on a worker writes them, the second at every change and every minute; the
launcher and `status` read them. A worker is numbered through all hosts of all slices of
its role, slice by slice.
"""

import dataclasses
import enum
import json
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.storage import MissingObjectError, Store
from tpu_launch.job import BUILDER, TRAINER, attempt_id

# Exit codes of the stages, and so of the supervisor. All others are bugs and crashes.
DONE = 0
BAD_INPUT = 2
STOPPED = (130, 143)


class State(enum.StrEnum):
    """What a worker does.

    Attributes:
      STARTING: it installs, fetches, or waits for the others.
      RUNNING: the command runs.
      RESTARTING: the command crashed, and its supervisor starts it again.
      FAILED: the supervisor has given up; exit code and step say more.
      STOPPED: asked to stop: its machine goes away, or its time is over.
      DONE: the command has ended as it should.
    """

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    DONE = "done"


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """What a worker last said.

    Attributes:
      state: what it does.
      time: when it said so, in Unix seconds.
      step: the last training step that it knows of, or -1.
      reached: how far it has got, in words that change when it gets further
        (`progress.py`); "" where the step says all.
      exit_code: of the command, where it has ended.
      message: why, in one line.
    """

    state: State
    time: float
    step: int = -1
    reached: str = ""
    exit_code: int | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Done:
    """That a role has done its work.

    Attributes:
      time: when, in Unix seconds.
      attempt: which attempt ended it.
      step: the last training step, or -1.
    """

    time: float
    attempt: int
    step: int = -1


def role_folder(run: str, role: str) -> str:
    """Returns where the files of a role are."""
    return f"launch/{run}/{role}"


def attempt_folder(run: str, role: str, attempt: int) -> str:
    """Returns where the files of an attempt are."""
    return f"{role_folder(run, role)}/{attempt_id(attempt)}"


def write_worker(
    store: Store, run: str, role: str, attempt: int, worker: int, state: WorkerState
) -> None:
    """Says what a worker does, in place of what it said before."""
    name = f"{attempt_folder(run, role, attempt)}/{worker}.json"
    store.write(name, _encoded(state))


def read_workers(
    store: Store, run: str, role: str, attempt: int
) -> dict[int, WorkerState]:
    """Returns what each worker of an attempt last said, by its number.

    Raises:
      BadInputError: a file is not one of these.
    """
    numbers = worker_numbers(store, run, role, attempt)
    said = {n: read_worker(store, run, role, attempt, n) for n in numbers}
    return {number: state for number, state in said.items() if state is not None}


def worker_numbers(
    store: Store, run: str, role: str, attempt: int, suffix: str = ".json"
) -> list[int]:
    """Returns which workers of an attempt have written files of a kind, in order."""
    folder = f"{attempt_folder(run, role, attempt)}/"
    names = [name.removeprefix(folder) for name in store.list(folder[:-1])]
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_worker(
    store: Store, run: str, role: str, attempt: int, worker: int
) -> WorkerState | None:
    """Returns what a worker last said, or None if it said nothing.

    Raises:
      BadInputError: the file is not one of these.
    """
    name = f"{attempt_folder(run, role, attempt)}/{worker}.json"
    values = read_json(store, name)
    if values is None:
        return None
    said = _decoded(store, name, WorkerState, values)
    return dataclasses.replace(said, state=State(said.state))


def mark_done(store: Store, run: str, role: str, done: Done) -> bool:
    """Marks a role as done; its slices are deleted then.

    An index builder ends by itself, with code 0, where it hears nothing of a trainer,
    such as one that was preempted and is waited for. It is done only once the trainer
    is. Until then its command is to be started again.

    Returns:
      Whether the role is marked.
    """
    if role == BUILDER and read_done(store, run, TRAINER) is None:
        return False
    store.write(f"{role_folder(run, role)}/done.json", _encoded(done))
    return True


def unmark(store: Store, run: str, role: str) -> None:
    """Takes the marker of a role away, so that its command is run once more."""
    store.delete(f"{role_folder(run, role)}/done.json")


def read_done(store: Store, run: str, role: str) -> Done | None:
    """Returns the marker of a role, or None while it is at work.

    Raises:
      BadInputError: the file is not one.
    """
    name = f"{role_folder(run, role)}/done.json"
    values = read_json(store, name)
    return None if values is None else _decoded(store, name, Done, values)


def read_json(store: Store, name: str) -> Any:
    """Returns what a JSON object holds, or None if there is no such object.

    Raises:
      BadInputError: it is no JSON.
    """
    try:
        return json.loads(store.read(name))
    except MissingObjectError:
        return None
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
    """Returns the error of an object that holds something else than it should."""
    return BadInputError(
        f"expected what a launcher or worker of this version says in "
        f"{store.url(name)}, got something else; delete the file"
    )
