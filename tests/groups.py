"""Programs that run as several processes of one job, on this machine."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from tpu_launch import local

ROOT = pathlib.Path(__file__).parents[1]


class Group:
    """The processes of a job, each with a log of its own."""

    def __init__(self, arguments: Sequence[str], num_processes: int, devices: int):
        """Starts `python -m …` so many times."""
        port = local.free_port()
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [
            pathlib.Path(self._folder.name, f"{i}.log") for i in range(num_processes)
        ]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=os.environ | local.environment_of(i, num_processes, port, devices),
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for i, log in enumerate(self._logs)
        ]

    def codes(self) -> list[int]:
        """Waits until all have ended; returns their exit codes.

        There is no limit but the test's own, by pytest: on a busy machine a job takes
        several times as long.
        """
        return [process.wait() for process in self.processes]

    def said(self) -> list[str]:
        """Returns what each has said so far."""
        return [log.read_text() for log in self._logs]

    def wait(self) -> list[str]:
        """Waits until all have ended well; returns what each has said."""
        codes, said = self.codes(), self.said()
        assert not any(codes), (codes, *said)
        return said

    def kill(self) -> None:
        """Ends all that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def started(
    arguments: Sequence[str], num_processes: int, devices: int = 1
) -> Iterator[Group]:
    """A job that is killed at the end, if it has not ended by then."""
    group = Group(arguments, num_processes, devices)
    try:
        yield group
    except BaseException:
        # pytest's, where the test has taken too long.
        print(*group.said(), sep="\n")
        raise
    finally:
        group.kill()
