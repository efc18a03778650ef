"""Runs the command of a role on one worker; started at boot by the startup script.

    python -m tpu_launch.worker.supervisor --model_dir=gs://... --run=... \\
      --role=trainer --attempt=1 --slices=1 --hosts=8 --deadline=1790000000 \\
      --log_dir=/opt/realm -- COMMAND ...

A command that crashes is restarted, and resumes from its checkpoint. After repeated
crashes without progress the supervisor gives up, and the launcher decides. A command
that was asked to stop, or refuses its input, is not restarted. Exit codes are those of
the command: 0 done, 2 bad input, 75 not ready, 129, 130 and 143 asked to stop, all
others bugs. After 75 the command is started again, however often.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from realm_jax.cli.main import STOPPED as STOPPED_CODE
from realm_jax.cli.main import guard
from realm_jax.errors import BadInputError
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import progress, worker_state
from tpu_launch.clock import Clock, SystemClock
from tpu_launch.job import BUILDER, TRAINER, attempt_id
from tpu_launch.progress import Progress
from tpu_launch.worker import preemption
from tpu_launch.worker.command import Command, Work
from tpu_launch.worker.reporter import Reporter, last_line
from tpu_launch.worker.timeouts import LOCAL_PACE, Timeouts
from tpu_launch.worker.worker_identity import (
    WorkerIdentity,
    command_environment,
    find_identity,
)
from tpu_launch.worker_state import Done, State, WorkerState

_BUG = 1

Answer = TypeVar("Answer")


class Supervisor:
    """Supervises the command of one worker until its end; see `run`."""

    def __init__(
        self,
        work: Work,
        identity: WorkerIdentity,
        store: Store,
        clock: Clock,
        stop: threading.Event,
        say: Callable[[str], None] = print,
        timeouts: Timeouts | None = None,
    ):
        """Prepares to run the command, and starts the reporter.

        Args:
          work: the work of this worker.
          identity: position of this worker.
          store: the model directory.
          clock: the clock; its `wait` ends when `stop` is set.
          stop: set when the machine is about to be taken away.
          say: prints messages to the serial output.
          timeouts: waiting times.
        """
        self._work, self._identity = work, identity
        self._store, self._clock, self._stop = store, clock, stop
        self._say, self._timeouts = say, timeouts or Timeouts()
        self._reporter = Reporter(
            store, work.run, work.role, work.attempt, identity.number, work.log, say
        )
        self._state = WorkerState(State.STARTING, clock.now())
        self._in_vain = 0
        self._reached: str | None = None

    def run(self) -> int:
        """Runs the command to its end, and returns the exit code.

        No process of the command is left running.

        Raises:
          BadInputError: the model directory or the command cannot be used.
        """
        try:
            return self._run()
        except Exception as error:
            code = worker_state.BAD_INPUT if isinstance(error, BadInputError) else _BUG
            said = f"{type(error).__name__}: {error}"
            # The model directory itself may be unusable, so do not wait for long.
            self._finish(State.FAILED, code, said, self._timeouts.hurried_report)
            raise

    def _run(self) -> int:
        self._tell(State.STARTING)
        while True:
            if self._is_done():
                return self._finish(State.DONE, 0, "the role is done")
            if reason := self._must_stop():
                return self._finish(State.STOPPED, STOPPED_CODE, reason)
            code, asked = self._run_command()
            if self._reporter.role_is_done or (code == 0 and self._marked()):
                return self._finish(State.DONE, 0, "the command has ended")
            said = last_line(self._work.log)
            if code == 0:
                message, seconds = (
                    "ended while the role is not done",
                    self._timeouts.ended,
                )
            elif asked or code in worker_state.STOPPED:
                asked = asked or "another worker of the role was asked to stop"
                return self._finish(State.STOPPED, code, asked)
            elif code == worker_state.BAD_INPUT:
                return self._finish(State.FAILED, code, said)
            elif code == worker_state.NOT_READY:
                # Nothing has failed. The launcher knows what this worker waits for.
                message, seconds = said or "waits", self._timeouts.ended
            else:
                far = self._note_crash()
                message, seconds = f"code {code}: {said or '-'}", self._backoff()
                if self._in_vain > self._timeouts.restarts:
                    return self._finish(State.FAILED, code, message, far=far)
            self._say(f"{message}; starting again in {seconds:.0f} s")
            self._tell(State.RESTARTING, code, message)
            self._pause(lambda: False, seconds)

    def _is_done(self) -> bool:
        """Returns whether the role is done, waiting for an unavailable store."""
        if self._reporter.role_is_done:
            return True
        run, role = self._work.run, self._work.role
        marker = self._ask(lambda: worker_state.read_done(self._store, run, role))
        return marker is not None

    def _marked(self) -> bool:
        """Marks the role as done, on the first worker; others wait for the marker.

        Returns:
          Whether the role is marked.
        """
        if self._identity.number:
            return False
        work = self._work
        far = self._ask(lambda: progress.of_role(self._store, work.role)) or Progress()
        done = Done(self._clock.now(), work.attempt, far.step)
        marked = self._ask(
            lambda: worker_state.mark_done(self._store, work.run, work.role, done)
        )
        return bool(marked)

    def _run_command(self) -> tuple[int, str]:
        """Returns the command's exit code, and why it was asked to end, or ""."""
        command = Command(self._work)
        try:
            self._say(f"started {self._work.command[0]} as process {command.pid}")
            self._tell(State.RUNNING)
            asked = ""
            if not self._pause(command.has_ended):
                asked = self._must_stop() or "the role is done"
                self._say(f"{asked}; asking the command to end")
                command.ask()
                self._insist(command.has_ended, self._timeouts.stopping)
        finally:
            code = command.end()
        return code, asked

    def _note_crash(self) -> Progress:
        """Counts a crash, unless the store is unavailable, which may be its cause."""
        with contextlib.suppress(UnavailableStoreError, BadInputError):
            far = progress.of_role(self._store, self._work.role)
            self._in_vain = self._in_vain + 1 if far.reached == self._reached else 1
            self._reached = far.reached
            return far
        return Progress()

    def _backoff(self) -> float:
        seconds = self._timeouts.backoff * 2 ** max(0, self._in_vain - 1)
        return min(seconds, self._timeouts.longest_backoff)

    def _must_stop(self) -> str:
        """Returns the reason why the work must end, or ""."""
        if self._stop.is_set():
            return "asked to stop"
        if self._clock.now() >= self._work.deadline:
            return "the deadline has come"
        return ""

    def _pause(
        self, is_over: Callable[[], bool], seconds: float = float("inf")
    ) -> bool:
        """Waits for a condition, up to `seconds`, or until the work must end.

        Returns:
          Whether the condition holds.
        """
        until = self._clock.now() + seconds
        while not (over := is_over()) and self._clock.now() < until:
            if self._must_stop() or self._reporter.role_is_done:
                break
            if self._clock.now() - self._state.time >= self._timeouts.report:
                self._tell(
                    self._state.state, self._state.exit_code, self._state.message
                )
            self._clock.wait(min(self._timeouts.poll, until - self._clock.now()))
        return over

    def _insist(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition, up to `seconds`, even when asked to stop."""
        until = self._clock.now() + seconds
        while not (over := is_over()) and self._clock.now() < until:
            self._clock.wait_anyway(self._timeouts.poll)
        return over

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """Returns the store's answer, or None if the work must end before.

        Raises:
          BadInputError: the store refuses repeatedly.
        """
        refusals = 0
        while True:
            try:
                return question()
            except UnavailableStoreError as error:
                self._say(f"waiting for the model directory: {error}")
            except BadInputError as error:
                # Credentials come from a separate server, which may be unavailable.
                refusals += 1
                if refusals > self._timeouts.restarts:
                    raise
                self._say(f"asking once more: {error}")
            if self._must_stop() or self._reporter.role_is_done:
                return None
            self._pause(lambda: False, self._timeouts.retry)

    def _tell(
        self,
        state: State,
        code: int | None = None,
        message: str = "",
        far: Progress | None = None,
    ) -> int:
        """Queues a report of this worker's state; returns the report's number."""
        far = far or Progress()
        self._state = WorkerState(
            state, self._clock.now(), far.step, far.reached, code, message
        )
        return self._reporter.post(self._state)

    def _finish(
        self,
        state: State,
        code: int,
        message: str,
        patience: float | None = None,
        far: Progress | None = None,
    ) -> int:
        """Reports the outcome, waits until it is written, and returns the exit code."""
        self._say(f"{state}, code {code}: {message}")
        timeouts = self._timeouts
        number = self._tell(state, code, message, far)
        seconds = timeouts.last_report if patience is None else patience
        until = self._clock.now() + seconds
        while not self._insist(
            functools.partial(self._reporter.has_written, number),
            timeouts.hurried_report,
        ):
            # The deadline bounds the costs, so it takes precedence over the report.
            if self._must_stop() or self._clock.now() >= until:
                break
            number = self._reporter.post(self._state)
        return code


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command of a role on this worker; returns its exit code.

    Raises:
      BadInputError: flags, metadata or the model directory cannot be used.
    """
    flags = _parse(argv)
    clock = SystemClock(stop)
    identity = find_identity(flags.slices, flags.hosts, os.environ, clock)
    name = f"{flags.run}-{flags.role}-{attempt_id(flags.attempt)}-{identity.number}"
    folder = pathlib.Path(flags.log_dir)
    work = Work(
        run=flags.run,
        role=flags.role,
        attempt=flags.attempt,
        deadline=flags.deadline,
        command=flags.command,
        environment=command_environment(identity, os.environ),
        log=folder / f"{name}.log",
        # On a shared machine, leave the lock files of other users alone.
        **({"lockfile": folder / "libtpu_lockfile"} if flags.local else {}),
    )
    store = open_store(flags.model_dir)

    def say(text: str) -> None:
        print(text, flush=True)

    if flags.local:
        threading.Thread(target=_until_eof, args=(stop,), daemon=True).start()
    elif "TPU_WORKER_ID" not in os.environ:
        # Elsewhere, as on GKE, a preemption arrives as SIGTERM.
        preemption.watch(os.environ, stop)
    timeouts = LOCAL_PACE if flags.local else Timeouts()
    return Supervisor(work, identity, store, clock, stop, say, timeouts).run()


def _until_eof(stop: threading.Event) -> None:
    """Sets `stop` when standard input, held open by the launcher, is closed."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    stop.set()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tpu_launch.worker.supervisor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model_dir", required=True, help="model directory")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--role", required=True, choices=(TRAINER, BUILDER))
    parser.add_argument("--attempt", required=True, type=int, help="attempt number")
    parser.add_argument("--slices", required=True, type=int, help="number of slices")
    parser.add_argument("--hosts", required=True, type=int, help="hosts per slice")
    parser.add_argument("--deadline", required=True, type=float, help="Unix seconds")
    parser.add_argument("--log_dir", required=True, help="folder of the log")
    parser.add_argument(
        "--local",
        action="store_true",
        help="on the launcher's machine: end with standard input, use shorter waits",
    )
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    code = guard(lambda stop: main(sys.argv[1:], stop))
    sys.stdout.flush()
    sys.stderr.flush()
    # An unavailable store may block the reporter's thread.
    os._exit(code)
