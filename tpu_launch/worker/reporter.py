"""Reports the state of a worker to the model directory, in a background thread.

An unavailable store blocks its caller for minutes, but the command must be told of a
preemption at once. Reports are therefore written by a thread; one that cannot be
written is superseded by the next.
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable

from realm_jax.errors import BadInputError
from realm_jax.storage import Store, UnavailableStoreError
from tpu_launch import progress, worker_state
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.worker_state import Done, WorkerState

# Sizes of a log in the bucket, and at most on the worker's disk.
_TAIL_BYTES = 256 << 10
_LONGEST_BYTES = 64 << 20


class Reporter:
    """Writes the last state and the end of the log of a worker.

    Attributes:
      role_is_done: whether the role was done at the last report.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        role: str,
        attempt: int,
        worker: int,
        log: pathlib.Path,
        say: Callable[[str], None],
    ):
        """Starts the thread, without writing anything yet.

        Args:
          store: the model directory.
          run: id of the run.
          role: role of the worker.
          attempt: number of the attempt.
          worker: number of the worker.
          log: log file of the command.
          say: prints error messages.
        """
        self.role_is_done = False
        self._store, self._run, self._role = store, run, role
        self._attempt, self._worker = attempt, worker
        self._log, self._say = log, say
        self._condition = threading.Condition()
        self._next: WorkerState | None = None
        self._posted = self._written = 0
        threading.Thread(target=self._work, daemon=True).start()

    def post(self, state: WorkerState) -> int:
        """Queues a state, in place of one not yet written; returns its number."""
        with self._condition:
            self._next = state
            self._posted += 1
            self._condition.notify()
            return self._posted

    def has_written(self, number: int) -> bool:
        """Returns whether the state of this number, or a later one, is written."""
        return self._written >= number

    def _work(self) -> None:
        while True:
            with self._condition:
                while self._next is None:
                    self._condition.wait()
                state, number = self._next, self._posted
                self._next = None
            try:
                self._report(state)
                self._written = number
            # No exception from a store may end the thread.
            except Exception as error:
                self._say(f"not reported: {error}")

    def _report(self, state: WorkerState) -> None:
        with contextlib.suppress(BadInputError, UnavailableStoreError):
            # Only the first worker reads the progress; others report it on failure.
            if self._worker == 0 and not state.reached:
                far = progress.of_role(self._store, self._role)
                state = dataclasses.replace(state, step=far.step, reached=far.reached)
        run, role = self._run, self._role
        worker_state.write_worker(
            self._store, run, role, self._attempt, self._worker, state
        )
        folder = worker_state.attempt_folder(run, role, self._attempt)
        self._store.write(f"{folder}/{self._worker}.log", bounded_tail(self._log))
        self.role_is_done = self._is_done(state)

    def _is_done(self, state: WorkerState) -> bool:
        """Returns whether the role is done; marks a builder that has built all."""
        store, run, role = self._store, self._run, self._role
        if worker_state.read_done(store, run, role) is not None:
            return True
        return (
            role == BUILDER
            and self._worker == 0
            and worker_state.read_done(store, run, TRAINER) is not None
            and progress.has_built_all(store)
            and worker_state.mark_done(
                store, run, role, Done(state.time, self._attempt, state.step)
            )
        )


def bounded_tail(log: pathlib.Path, longest: int = _LONGEST_BYTES) -> bytes:
    """Returns the end of a log, from the beginning of a line; truncates a long log.

    Args:
      log: the file, which may be open for appending, or missing.
      longest: size in bytes above which the file is truncated to what is returned.
    """
    try:
        with log.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
            if size > _TAIL_BYTES:
                data = data[data.find(b"\n") + 1 :]
            if size > longest:
                file.truncate(0)
                file.seek(0)
                file.write(data)
            return data
    except FileNotFoundError:
        return b""


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a command's output, "" if there is none."""
    lines = bounded_tail(log).decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
