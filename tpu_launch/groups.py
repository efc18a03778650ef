"""A group of processes that run one command together on this machine, kept alive.

`jax.distributed` joins them; who is who stands in their environment (`hosts.py`). If
one dies the others are ended, for they would wait for it for ever, and all start again:
every command of `realm` goes on from what it left in its folder. Each attempt has a
port of its own, so that no process meets one of an earlier attempt.
"""

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

_DONE, _BAD_INPUT = 0, 2
# Ended because it was asked to, by Ctrl-C or SIGTERM, after it had saved.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Job:
    """What the processes of a group run.

    Attributes:
      name: for people, and of its logs.
      arguments: the command line, the same for all.
      root: folder of the logs; process i writes NAME-i.log, the first NAME.log.
      processes: how many.
      devices: simulated CPU devices of each; a single process with a single device runs
        on whatever devices there are.
      on_terminal: whether the first keeps the terminal instead of a log.
      restarts: how often in a row it starts again without having got further.
      reached: how far it has got; failures at the same place are one that repeats.
      stdin: a file descriptor that all read, None for none.
    """

    name: str
    arguments: Sequence[str]
    root: pathlib.Path
    processes: int = 1
    devices: int = 1
    on_terminal: bool = False
    restarts: int = 3
    reached: Callable[[], Hashable] = lambda: None
    stdin: int | None = None


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long a group waits for what, in seconds.

    Attributes:
      backoff: before the first restart; twice as long before each further one that
        follows without progress.
      longest_backoff: it grows no longer.
      mourning: for those that are asked to end because another has died; they can save
        nothing, and may hang.
      stopping: for those that save and end because they were asked to.
    """

    backoff: float = 1.0
    longest_backoff: float = 60.0
    mourning: float = 5.0
    stopping: float = 60.0


class Group:
    """The processes of a job, started again when one of them dies.

    Attributes:
      failure: why it was given up, in one line with what the process said last; "" if
        it was not, or if bad input was told on the terminal already.
    """

    def __init__(
        self, job: Job, say: Callable[[str], None] = print, pace: Pace | None = None
    ):
        """Starts the processes; their logs begin anew.

        Args:
          job: what they run.
          say: tells a person what happens to them.
          pace: how long to wait for what.
        """
        self.failure = ""
        self._job = job
        self._say = say
        self._pace = pace or Pace()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._code: int | None = None
        self._in_vain = 0
        self._reached: Hashable = None
        self._starts_again = 0.0
        job.root.mkdir(parents=True, exist_ok=True)
        for log in filter(None, map(self._log, range(job.processes))):
            log.write_text("")
        self._start()

    @property
    def pids(self) -> list[int]:
        """Of the processes, in their order; none between two attempts."""
        return [process.pid for process in self._processes]

    def check(self) -> int | None:
        """Looks once, starts again what is to be started; to be called time and again.

        Returns:
          None while it goes on; else the exit code of a process that failed, or 0 when
          all have ended well.
        """
        if self._code is not None:
            return self._code
        if not self._processes:
            if time.monotonic() >= self._starts_again:
                self._start()
            return None
        codes = [process.poll() for process in self._processes]
        died = {n: shell_code(code) for n, code in enumerate(codes) if code}
        if died:
            number = max(died, key=lambda number: _explains(died[number]))
            code = died[number]
            # Those that save because one was asked to are not to be disturbed.
            pace = self._pace
            self._end(pace.stopping if code in _STOPPED else pace.mourning)
            self._judge(number, code)
        elif None not in codes:
            self._code = _DONE
        return self._code

    def end(self) -> int:
        """Ends it at a safe point; kills what hangs. Returns as `check`, never None."""
        codes = self._end(self._pace.stopping)
        if self._code is None:
            self._code = next(filter(None, codes), _DONE)
        return self._code

    def _start(self) -> None:
        job = self._job
        port = free_port() if job.processes > 1 else 0
        for number in range(job.processes):
            who = environment(number, job.processes, port, job.devices)
            with contextlib.ExitStack() as opened:
                log = self._log(number)
                output = opened.enter_context(log.open("ab")) if log else None
                self._processes.append(
                    subprocess.Popen(
                        job.arguments,
                        env={**os.environ, **who},
                        stdin=job.stdin,
                        stdout=output,
                        stderr=subprocess.STDOUT if log else None,
                    )
                )

    def _judge(self, number: int, code: int) -> None:
        """Starts the group again after a while, or gives it up."""
        job, pace = self._job, self._pace
        if code not in _STOPPED:
            reached = job.reached()
            self._in_vain = self._in_vain + 1 if reached == self._reached else 1
            self._reached = reached
        if code == _BAD_INPUT or not job.restarts or self._in_vain > job.restarts:
            self._code = code
            if code != _BAD_INPUT or self._log(number):
                self.failure = self._describe(number, code)
            return
        seconds = pace.backoff * 2 ** max(0, self._in_vain - 1)
        seconds = min(seconds, pace.longest_backoff)
        self._starts_again = time.monotonic() + seconds
        self._say(f"{self._describe(number, code)}; starting again in {seconds:.0f} s")

    def _describe(self, number: int, code: int) -> str:
        job, log = self._job, self._log(number)
        who = f"process {number} of {job.name}" if job.processes > 1 else job.name
        how = f"{who} ended with code {code}"
        if self._in_vain > 1:
            how += f", {self._in_vain} times in a row"
            how += f" at {self._reached}" if self._reached else ""
        if log is None:
            return how
        lines = log.read_text(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("error: ") if lines else "it said nothing"
        return f"{how}: {said} (see {log})"

    def _end(self, seconds: float) -> list[int]:
        """Asks all that run to end; kills those that have not after so long."""
        processes, self._processes = self._processes, []
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while running and (left := deadline - time.monotonic()) > 0:
            _wait_for_any(running, left)
            running = [process for process in processes if process.poll() is None]
            if any(_has_died(process.returncode) for process in processes):
                # The others wait for it in vain.
                deadline = min(deadline, time.monotonic() + self._pace.mourning)
        for process in running:
            process.kill()
            process.wait()
        return [shell_code(process.returncode) for process in processes]

    def _log(self, number: int) -> pathlib.Path | None:
        job = self._job
        if number == 0 and job.on_terminal:
            return None
        return job.root / (f"{job.name}-{number}.log" if number else f"{job.name}.log")


def free_port() -> int:
    """Returns a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(
    number: int, processes: int, port: int, devices: int
) -> Mapping[str, str]:
    """Returns what tells a process of a group on this machine who it is.

    Args:
      number: of the process.
      processes: in the group; one alone needs to be told of its devices only.
      port: where the first of them listens.
      devices: of each, simulated on the CPU.
    """
    told = {}
    if processes > 1 or devices > 1:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if processes > 1:
        told |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
    return told


def _has_died(code: int | None) -> bool:
    return code is not None and shell_code(code) not in (_DONE, *_STOPPED)


def _explains(code: int) -> int:
    """Of several that died in one moment: how well the code of one says why."""
    if code == _BAD_INPUT:
        return 3
    if code in _STOPPED:
        return 0
    # So the coordination service ends a process because another has died.
    return 1 if code == 128 + signal.SIGABRT else 2


def shell_code(code: int) -> int:
    """What a shell would give for a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def _wait_for_any(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Returns when one of them has ended, at the latest after so long."""
    handles = [os.pidfd_open(process.pid) for process in processes]
    try:
        select.select(handles, [], [], seconds)
    finally:
        for handle in handles:
            os.close(handle)
