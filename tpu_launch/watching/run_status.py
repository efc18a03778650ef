"""How a run is, read from its model directory alone.

From what launcher, workers and jobs wrote there: their notes (`attempts.py`), their
last words (`worker_state.py`), heartbeats and metrics. What is missing or damaged
leaves a gap; only a directory that is away is an error.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import JobStatus
from realm_jax.storage import Store
from tpu_launch import attempts
from tpu_launch.attempts import Attempt, Launcher
from tpu_launch.backends.backend import PENDING, SliceState
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.watching import lenient_reads
from tpu_launch.worker_state import State, WorkerState, role_folder


class RoleState(enum.StrEnum):
    """How a role is.

    Attributes:
      QUEUED: slices were asked for, and are not there yet.
      STARTING: they are made or there; the command does not run yet.
      RUNNING: the command runs.
      RESTARTING: it crashed on a worker, whose supervisor starts it again.
      FAILED: a supervisor has given it up.
      LOST: its slices are going away.
      WAITING: they are gone; the launcher asks for others.
      STOPPED: it was asked to stop, or its launcher has ended.
      DONE: it has done its work.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    LOST = "lost"
    WAITING = "waiting"
    STOPPED = "stopped"
    DONE = "done"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """What a worker of the last attempt of a role said last.

    Attributes:
      number: of the worker.
      state: what it does, as in `worker_state.State`.
      silent_seconds: since it said so.
      message: why, in one line; "" if all is well.
      exit_code: of its command, where that has ended.
    """

    number: int
    state: str
    silent_seconds: float
    message: str
    exit_code: int | None


@dataclasses.dataclass(frozen=True)
class RoleStatus:
    """How a role is; None, 0 or "" where something is not known.

    Attributes:
      name: "trainer" or "builder".
      state: of its last attempt.
      attempt: number of the last one.
      num_attempts: how many there were.
      slices: state of its slices, as Cloud TPU calls it.
      slices_since: when they came into it, in Unix seconds.
      active_since: when they were first seen active, in Unix seconds.
      ended_reason: why the last attempt that has ended did.
      step: the last training step that it knows of; of a builder, of the retriever
        that it embeds or embedded last.
      activity: of a builder, "embedding" or "waiting".
      blocks_done: embedded blocks of that index, while it embeds.
      num_blocks: all of them.
      share: of the blocks, 0 to 1.
      cost: of all its attempts so far, at prices on demand.
      workers: of the last attempt, those that have said something.
    """

    name: str
    state: RoleState
    attempt: int = 0
    num_attempts: int = 0
    slices: str = ""
    slices_since: float | None = None
    active_since: float | None = None
    ended_reason: str = ""
    step: int | None = None
    activity: str = ""
    blocks_done: int | None = None
    num_blocks: int | None = None
    share: float | None = None
    cost: float | None = None
    workers: tuple[WorkerStatus, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run is; None where something is not known.

    Attributes:
      run: its id.
      model_dir: its model directory.
      time: when it was looked at, in Unix seconds.
      launcher: who launched it last.
      roles: trainer and builder, those that were ever asked for.
      cost: of all roles so far; None also where that of one is not known.
      currency: of all costs.
      step: of the training.
      total_steps: that it will have.
      loss: of the last line of its metrics, and so are those below.
      retrieval_utility: nats.
      examples_per_second: that it trains on.
      steps_per_second: updates.
      index_step: step of the retriever whose index is searched.
      index_age_steps: how many updates ago that was.
      index_age_seconds: how long ago.
    """

    run: str
    model_dir: str
    time: float
    launcher: Launcher | None = None
    roles: tuple[RoleStatus, ...] = ()
    cost: float | None = None
    currency: str = attempts.DEFAULT_CURRENCY
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    retrieval_utility: float | None = None
    examples_per_second: float | None = None
    steps_per_second: float | None = None
    index_step: int | None = None
    index_age_steps: int | None = None
    index_age_seconds: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether every role is done, or the launcher has ended."""
        if self.launcher is not None and self.launcher.ended is not None:
            return True
        return bool(self.roles) and all(
            role.state == RoleState.DONE for role in self.roles
        )


def find_run(store: Store) -> str:
    """Returns the run that was launched last in a model directory.

    A copied directory brings the notes of the run that it was copied from.

    Raises:
      BadInputError: none was.
      UnavailableStoreError: the directory is away.
    """
    parts = [name.split("/") for name in store.list("launch")]
    runs = {part[1] for part in parts if len(part) == 4 and part[2] == "launchers"}
    if not runs:
        raise BadInputError(
            f"expected a launched run in {store.url()}, found none; give the MODEL_DIR "
            "that `up` was given"
        )

    def launched(run: str) -> tuple[float, str]:
        launcher = attempts.read_launcher(store, run)
        return (launcher.time if launcher else -math.inf, run)

    return max(runs, key=launched)


def read_status(store: Store, run: str, now: float) -> RunStatus:
    """Returns how a run is.

    Args:
      store: its model directory.
      run: its id.
      now: Unix seconds.

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: it is away.
    """
    launcher = attempts.read_launcher(store, run)
    listed = store.list(f"launch/{run}")
    line = lenient_reads.last_line(store)
    notes, roles = {}, []
    for name in (TRAINER, BUILDER):
        if any(one.startswith(f"{role_folder(run, name)}/") for one in listed):
            notes[name] = lenient_reads.attempts(store, run, name)
            roles.append(_role(store, run, name, notes[name], launcher, line, now))
    known = [one for tried in notes.values() for one in tried.values() if one]
    return RunStatus(
        run=run,
        model_dir=store.url(),
        time=now,
        launcher=launcher,
        roles=tuple(roles),
        cost=_cost([one for tried in notes.values() for one in tried.values()], now),
        currency=known[-1].currency if known else attempts.DEFAULT_CURRENCY,
        total_steps=launcher.total_steps if launcher else None,
        **_training(roles, lenient_reads.heartbeat(store, TRAINER), line),
    )


def _role(
    store: Store,
    run: str,
    name: str,
    tried: Mapping[int, Attempt | None],
    launcher: Launcher | None,
    line: Mapping[str, Any],
    now: float,
) -> RoleStatus:
    number = max(tried, default=0)
    last = tried.get(number)
    done_step = lenient_reads.done_step(store, run, name)
    words = lenient_reads.words(store, run, name, number)
    beat = lenient_reads.heartbeat(store, name)
    is_over = launcher is not None and launcher.ended is not None
    is_gone = is_over or (last is not None and last.ended is not None)
    slices = None if is_gone else attempts.read_slices(store, run, name, number)
    if done_step is not None:
        state = RoleState.DONE
    elif is_gone:
        state = _ended_state(words, is_over)
    else:
        state = _live_state(words, last, slices.state if slices else "")
    # What was said by one that is gone is no longer so.
    is_building = name == BUILDER and state == RoleState.RUNNING
    logged = lenient_reads.whole(line.get("step")) if name == TRAINER else None
    reasons = [one.reason for one in tried.values() if one and one.ended is not None]
    return RoleStatus(
        name=name,
        state=state,
        attempt=number,
        num_attempts=len(tried),
        slices=slices.state if slices else "",
        slices_since=slices.time if slices else None,
        active_since=last.active if last and not is_gone else None,
        ended_reason=reasons[-1] if reasons else "",
        step=_step(done_step, beat, words, logged),
        **(_building(beat) if is_building and beat else {}),
        cost=_cost(list(tried.values()), now),
        workers=tuple(_worker(n, word, now) for n, word in sorted(words.items())),
    )


def _worker(number: int, word: WorkerState, now: float) -> WorkerStatus:
    silent = max(0.0, now - word.time)
    return WorkerStatus(number, word.state.value, silent, word.message, word.exit_code)


def _live_state(
    words: Mapping[int, WorkerState], last: Attempt | None, slices: str
) -> RoleState:
    """How a role is whose last attempt has not ended."""
    if slices == SliceState.PROVISIONING:
        return RoleState.STARTING
    if slices in PENDING:
        return RoleState.QUEUED
    if slices not in ("", SliceState.UNKNOWN, SliceState.ACTIVE):
        return RoleState.LOST
    states = {word.state for word in words.values()}
    # One that fails or waits holds the others up.
    for state in (State.FAILED, State.STOPPED, State.RESTARTING, State.STARTING):
        if state in states:
            return RoleState(state.value)
    if states:
        return RoleState.RUNNING
    is_active = slices == SliceState.ACTIVE or (last and last.active is not None)
    return RoleState.STARTING if is_active else RoleState.QUEUED


def _ended_state(words: Mapping[int, WorkerState], is_over: bool) -> RoleState:
    """How a role is whose slices are gone, and which is not done."""
    if not is_over:
        return RoleState.WAITING
    has_failed = any(word.state == State.FAILED for word in words.values())
    return RoleState.FAILED if has_failed else RoleState.STOPPED


def _step(
    done_step: int | None,
    beat: JobStatus | None,
    words: Mapping[int, WorkerState],
    logged: int | None,
) -> int | None:
    """The last step of a role: of its marker, heartbeat, or what else is known."""
    if done_step is not None and done_step >= 0:
        return done_step
    # It goes on between two lines of the metrics; not all stages have one.
    if beat is not None:
        return beat.step
    step = max([-1 if logged is None else logged, *(w.step for w in words.values())])
    return step if step >= 0 else None


def _building(beat: JobStatus) -> dict[str, Any]:
    """What a builder says that it does."""
    activity = str(beat.extra.get("activity", ""))
    if activity != "embedding":
        return {"activity": activity}
    done = lenient_reads.whole(beat.extra.get("blocks_done"))
    blocks = lenient_reads.whole(beat.extra.get("num_blocks"))
    return {
        "activity": activity,
        "blocks_done": done,
        "num_blocks": blocks,
        "share": min(1.0, done / blocks) if done is not None and blocks else None,
    }


def _training(
    roles: Sequence[RoleStatus], beat: JobStatus | None, line: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of the training, by its heartbeat and the last of its metrics."""
    logged = lenient_reads.whole(line.get("index_step"))
    index = lenient_reads.whole(beat.extra.get("index_step")) if beat else logged
    step = next((role.step for role in roles if role.name == TRAINER), None)
    age = None if step is None or index is None else max(0, step - index)
    seconds = (
        lenient_reads.real(line.get("index_age_seconds")) if index == logged else None
    )
    return {
        "step": step,
        "loss": lenient_reads.real(line.get("loss")),
        "retrieval_utility": lenient_reads.real(line.get("retrieval_utility")),
        "examples_per_second": lenient_reads.real(line.get("examples_per_second")),
        "steps_per_second": lenient_reads.real(line.get("steps_per_second")),
        "index_step": index,
        "index_age_steps": age,
        "index_age_seconds": seconds,
    }


def _cost(tried: Sequence[Attempt | None], now: float) -> float | None:
    """What attempts have cost; None if that cannot be said of all of them."""
    known = [one for one in tried if one is not None]
    if not known or len(known) < len(tried):
        return None
    if any(one.price is None for one in known):
        return None
    one_currency = len({one.currency for one in known}) == 1
    return attempts.cost(known, now) if one_currency else None
