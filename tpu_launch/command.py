"""The command of a worker as a process, with all that it starts."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError
from tpu_launch.groups import shell_code


class Command:
    """A command that runs in a process group of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        lockfile: pathlib.Path,
    ):
        """Starts it.

        Args:
          arguments: program and arguments.
          environment: all of it.
          log: file that what it writes is appended to.
          lockfile: what a libtpu that was killed has left, and would refuse to start
            with; it is removed.

        Raises:
          BadInputError: there is no such program.
        """
        lockfile.unlink(missing_ok=True)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            raise BadInputError(
                f"expected a command that can be run, got {arguments[0]} "
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
