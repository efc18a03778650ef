"""Reads the status of a run from its model directory alone.

The status is derived from the launcher's records (`attempts.py`), the workers' last
states (`worker_state.py`), heartbeats and metrics. Missing or damaged files leave gaps;
only an unavailable directory is an error.
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
    """State of a role.

    Attributes:
      QUEUED: slices are requested, but not yet provisioned.
      STARTING: slices are being provisioned or active; the command does not run yet.
      RUNNING: the command runs.
      RESTARTING: the command crashed on a worker, and its supervisor restarts it.
      FAILED: a supervisor has given up.
      LOST: the slices are being taken away.
      WAITING: the slices are gone; the launcher requests new ones.
      STOPPED: the role was asked to stop, or its launcher has ended.
      DONE: the work of the role is done.
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
    """Last reported status of a worker of a role's last attempt.

    Attributes:
      number: number of the worker.
      state: its state, a value of `worker_state.State`.
      silent_seconds: seconds since its last report.
      message: the reason of the state in one line; "" if all is well.
      exit_code: exit code of its command, if that has ended.
    """

    number: int
    state: str
    silent_seconds: float
    message: str
    exit_code: int | None


@dataclasses.dataclass(frozen=True)
class RoleStatus:
    """Status of a role; None, 0 or "" where a value is not known.

    Attributes:
      name: "trainer" or "builder".
      state: state of its last attempt.
      attempt: number of the last attempt.
      num_attempts: number of attempts.
      slices: state of its slices in the words of the Cloud TPU API.
      slices_since: time of the change to this state, in Unix seconds.
      active_since: time when they were first seen active, in Unix seconds.
      ended_reason: reason of the last attempt's end that is recorded.
      step: last known training step; for a builder, that of the retriever that it
        embeds or embedded last.
      activity: for a builder, "embedding" or "waiting".
      blocks_done: number of embedded blocks of the index in progress.
      num_blocks: number of all its blocks.
      share: share of its blocks that are embedded, from 0 to 1.
      cost: cost of all its attempts so far, at on-demand prices.
      workers: workers of the last attempt that have reported.
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
    """Status of a run; None where a value is not known.

    Attributes:
      run: id of the run.
      model_dir: its model directory.
      time: time of this status, in Unix seconds.
      launcher: its last launcher.
      roles: trainer and builder, if they were ever requested.
      cost: cost of all roles so far; None also if that of one is not known.
      currency: currency of all costs.
      step: last known training step.
      total_steps: number of training steps of the whole run.
      loss: loss in the last line of its metrics.
      retrieval_utility: retrieval utility in that line, in nats.
      examples_per_second: training examples per second in that line.
      steps_per_second: updates per second in that line.
      index_step: step of the retriever that embedded the index in use.
      index_age_steps: age of that index in updates.
      index_age_seconds: age of that index in seconds.
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
        """True if every role is done, or the launcher has ended."""
        if self.launcher is not None and self.launcher.ended is not None:
            return True
        return bool(self.roles) and all(
            role.state == RoleState.DONE for role in self.roles
        )


def find_run(store: Store) -> str:
    """Returns the run that was launched last in a model directory.

    There may be several: a copied directory contains the records of the original run.

    Raises:
      BadInputError: no run was launched there.
      UnavailableStoreError: the directory does not answer.
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
    """Returns the status of a run.

    Args:
      store: the model directory.
      run: id of the run.
      now: current time in Unix seconds.

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: the directory does not answer.
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
    # The heartbeat of a builder that is gone is outdated.
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
    """Returns the state of a role with an attempt that has not ended."""
    if slices == SliceState.PROVISIONING:
        return RoleState.STARTING
    if slices in PENDING:
        return RoleState.QUEUED
    if slices not in ("", SliceState.UNKNOWN, SliceState.ACTIVE):
        return RoleState.LOST
    states = {word.state for word in words.values()}
    # A worker that fails or waits blocks the others.
    for state in (State.FAILED, State.STOPPED, State.RESTARTING, State.STARTING):
        if state in states:
            return RoleState(state.value)
    if states:
        return RoleState.RUNNING
    is_active = slices == SliceState.ACTIVE or (last and last.active is not None)
    return RoleState.STARTING if is_active else RoleState.QUEUED


def _ended_state(words: Mapping[int, WorkerState], is_over: bool) -> RoleState:
    """Returns the state of a role that is not done, and has no slices."""
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
    """Returns the last step of a role, by its marker, heartbeat, or other reports."""
    if done_step is not None and done_step >= 0:
        return done_step
    # More recent than the last line of the metrics; not all stages have a heartbeat.
    if beat is not None:
        return beat.step
    step = max([-1 if logged is None else logged, *(w.step for w in words.values())])
    return step if step >= 0 else None


def _building(beat: JobStatus) -> dict[str, Any]:
    """Returns the activity and progress of a builder by its heartbeat."""
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
    """Returns training metrics from the heartbeat and the last line of the metrics."""
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
    """Returns the total cost of attempts, None if that of any is not known."""
    known = [one for one in tried if one is not None]
    if not known or len(known) < len(tried):
        return None
    if any(one.price is None for one in known):
        return None
    one_currency = len({one.currency for one in known}) == 1
    return attempts.cost(known, now) if one_currency else None
