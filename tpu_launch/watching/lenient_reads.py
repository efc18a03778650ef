"""Reads what a model directory holds about a run, tolerating damaged files.

For monitoring only: a file that is missing or damaged counts as absent. All functions
raise `UnavailableStoreError` if the directory is unavailable.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import Store
from tpu_launch import attempts as notes
from tpu_launch import progress, worker_state
from tpu_launch.attempts import Attempt
from tpu_launch.worker_state import WorkerState

# Exceptions raised on reading malformed files.
_DAMAGED = (BadInputError, AttributeError, KeyError, TypeError, ValueError)


def attempts(store: Store, run: str, role: str) -> dict[int, Attempt | None]:
    """Returns the attempts of a role by number; None where a record is damaged."""
    found: dict[int, Attempt | None] = {}
    for number in notes.attempt_numbers(store, run, role):
        found[number] = None
        with contextlib.suppress(BadInputError):
            found[number] = notes.read_attempt(store, run, role, number)
    return found


def words(store: Store, run: str, role: str, attempt: int) -> dict[int, WorkerState]:
    """Returns the last reported state of each worker, without damaged ones."""
    found = {}
    for number in worker_state.worker_numbers(store, run, role, attempt):
        with contextlib.suppress(*_DAMAGED):
            word = worker_state.read_worker(store, run, role, attempt, number)
            if word is not None:
                found[number] = dataclasses.replace(
                    word,
                    time=float(word.time),
                    step=int(word.step),
                    exit_code=None if word.exit_code is None else int(word.exit_code),
                    message=" ".join(str(word.message).split()),
                )
    return found


def done_step(store: Store, run: str, role: str) -> int | None:
    """Returns the step in a role's marker, -1 if it has none; None without a marker."""
    with contextlib.suppress(*_DAMAGED):
        done = worker_state.read_done(store, run, role)
        return None if done is None else int(done.step)
    return None


def heartbeat(store: Store, role: str) -> JobStatus | None:
    """Returns the last heartbeat of a role's job, None if there is none."""
    with contextlib.suppress(*_DAMAGED):
        beat = read_heartbeat(store, progress.HEARTBEATS[role])
        if beat is not None and isinstance(beat.extra, Mapping):
            return dataclasses.replace(beat, step=int(beat.step))
    return None


def last_line(store: Store) -> Mapping[str, Any]:
    """Returns the last line of the metrics, {} if there is none."""
    with contextlib.suppress(BadInputError):
        last = collections.deque(read_metrics(store.url()), maxlen=1)
        return last[0] if last else {}
    return {}


def real(value: Any) -> float | None:
    """Returns a number as a float, None for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def whole(value: Any) -> int | None:
    """Returns a finite number truncated to an integer, None for any other value."""
    number = real(value)
    return None if number is None or not math.isfinite(number) else int(number)
