"""Starts the processes of a job once, and says what their exit codes mean."""

import contextlib
import dataclasses
import enum
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from realm_jax.errors import BAD_INPUT, NOT_READY, BadInputError

STOP_CODES = (129, 130, 143)
"""Exit codes of a command that a signal has asked to stop: 128 and its number."""


class Ended(enum.IntEnum):
    """What the exit code of a `realm` command means; of several, the first tells most.

    One process's exit makes the others fail.
    """

    BAD_INPUT = enum.auto()
    NOT_READY = enum.auto()
    STOPPED = enum.auto()
    CRASHED = enum.auto()
    DONE = enum.auto()

    @staticmethod
    def by(code: int) -> "Ended":
        """Returns the meaning of an exit code."""
        known = {0: Ended.DONE, BAD_INPUT: Ended.BAD_INPUT, NOT_READY: Ended.NOT_READY}
        return known.get(code, Ended.STOPPED if code in STOP_CODES else Ended.CRASHED)


@dataclasses.dataclass(frozen=True)
class Command:
    """A program to run in an environment, and its log; without one, on the terminal."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Pace:
    """Waiting times, in seconds.

    Attributes:
      backoff: before the first restart after a crash; doubled before each further one
        at the same place.
      longest_backoff: upper bound of the backoff.
      waiting: before a restart that is no failure.
      saving: for processes that were asked to save and end.
      settling: for the others once a process has ended; JAX ends them.
      poll: between two looks.
    """

    backoff: float = 20.0
    longest_backoff: float = 300.0
    waiting: float = 60.0
    saving: float = 60.0
    settling: float = 10.0
    poll: float = 0.5


class Group:
    """Processes that work together; those with a log are leaders of process groups."""

    def __init__(self, commands: Sequence[Command]):
        """Starts them."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first: int | None = None
        try:
            for command in commands:
                self._processes.append(_start(command))
        except OSError as error:
            self.kill()
            raise BadInputError(
                f"expected a program that can be run, got {command.arguments[0]} "
                f"({error.strerror}); see whether the installation is whole"
            ) from error

    def __str__(self) -> str:
        return ", ".join(str(process.pid) for process in self._processes)

    def code(self) -> int | None:
        """Returns the exit code that tells most, None while all run or end with 0.

        Of crashes that is the one that was seen first.
        """
        codes = [process.poll() for process in self._processes]
        ended = [shell_code(code) for code in codes if code]
        if ended:
            self._first = self._first or ended[0]
            return min([self._first, *ended], key=Ended.by)
        return None if None in codes else 0

    def wait(self, seconds: float) -> bool:
        """Waits until all have ended; returns whether they have."""
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def ask(self) -> None:
        """Asks those that run to save and end."""
        for process in self._processes:
            process.terminate()

    def kill(self) -> int:
        """Kills what is left, children too, which may hold devices; returns `code`."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        return self.code() or 0


def run_once(
    commands: Sequence[Command],
    must_end: Callable[[], bool],
    stop: threading.Event,
    say: Callable[[str], None],
    pace: Pace,
) -> tuple[int, bool]:
    """Returns the exit code of one start, and whether processes were asked to end."""
    group = Group(commands)
    say(f"started process {group}")
    try:
        while (code := group.code()) is None and not must_end():
            stop.wait(pace.poll)
        was_asked = code is None
        if was_asked:
            group.ask()
        # Who stopped was asked alone; JAX has the others save at the same step.
        saves = code is None or Ended.by(code) is Ended.STOPPED
        group.wait(pace.saving if saves else pace.settling)
    finally:
        code = group.kill()
    return code, was_asked


def _start(command: Command) -> subprocess.Popen[bytes]:
    if command.log is None:
        return subprocess.Popen(command.arguments, env=command.environment)
    with command.log.open("ab") as output:
        return subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def shell_code(code: int) -> int:
    """Returns an exit code as a shell reports it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code
