"""Runs the command of a worker as a process group."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError

# Left by a libtpu that was killed; the next one refuses to start while it exists.
_LOCKFILE = pathlib.Path("/tmp/libtpu_lockfile")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a worker.

    Attributes:
      run: id of the run.
      role: "trainer" or "builder".
      attempt: number of the attempt.
      deadline: time at which the work must end, in Unix seconds.
      command: program and arguments.
      environment: environment of the command.
      log: file to which the command's output is appended.
      lockfile: path of libtpu's lock file.
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
    """A command running in its own process group."""

    def __init__(self, work: Work):
        """Removes a stale lock file of libtpu and starts the command.

        Raises:
          BadInputError: the program cannot be run.
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
        """Process id of the command, which is also the id of its group."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether the command has ended; its children may still run."""
        return self._process.poll() is not None

    def ask(self) -> None:
        """Asks the command to save and end, with SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Kills the whole process group, because children may hold the devices.

        Returns:
          The exit code as a shell reports it, also if the command had already ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return shell_code(self._process.wait())


def shell_code(code: int) -> int:
    """Returns a process's exit code as a shell reports it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code
