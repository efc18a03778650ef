"""The command of a worker as a process, with all that it starts."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError

# What a libtpu that was killed leaves, and the next refuses to start with.
_LOCKFILE = pathlib.Path("/tmp/libtpu_lockfile")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a worker is to do.

    Attributes:
      run: id of the run.
      role: "trainer" or "builder".
      attempt: its number.
      deadline: when it ends, in Unix seconds.
      command: program and arguments.
      environment: of the command.
      log: file that takes what the command writes.
      lockfile: what libtpu leaves behind.
    """

    run: str
    role: str
    attempt: int
    deadline: float
    command: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path
    lockfile: pathlib.Path = _LOCKFILE


class Command:
    """A command that runs in a process group of its own."""

    def __init__(self, work: Work):
        """Starts it, where nothing of one before it is in its way.

        Raises:
          BadInputError: there is no such program.
        """
        work.lockfile.unlink(missing_ok=True)
        try:
            with work.log.open("ab") as output:
                self._process = subprocess.Popen(
                    work.command,
                    env=work.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            raise BadInputError(
                f"expected a command that can be run, got {work.command[0]} "
                f"({error.strerror}); see whether the checkout is whole"
            ) from error

    @property
    def pid(self) -> int:
        """Of the command, and of its group."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether the command itself has; what it started may still run."""
        return self._process.poll() is not None

    def ask(self) -> None:
        """Asks it to save and end."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Kills it, and what it has started, which may hold the devices.

        Returns:
          The exit code, as a shell gives it; that of before, where it had ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return shell_code(self._process.wait())


def shell_code(code: int) -> int:
    """Returns what a shell would give for a process that a signal has ended."""
    return code if code >= 0 else 128 - code
