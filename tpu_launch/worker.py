"""Runs the command of a role on one TPU VM; started at boot by the startup script.

    python -m tpu_launch.worker --model_dir=gs://... --role=trainer \\
      --name=my-0a1b2c-trainer-1 --slices=1 --hosts=8 --deadline=1790000000 \\
      --max_restarts=10 --grace=60 --log_dir=/opt/realm -- COMMAND ...

A command that crashes is started again, and resumes from its checkpoint. The end of the
work, good or bad, is said in the model directory (`records.py`), where the workers of
both roles look for it every minute. The exit code is the command's.
"""

import argparse
import contextlib
import http.client
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from realm_jax.cli.main import guard
from realm_jax.errors import BadInputError
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import processes, records
from tpu_launch.identity import (
    WorkerIdentity,
    command_environment,
    find_identity,
    open_metadata,
)
from tpu_launch.processes import Command, Ended, Pace
from tpu_launch.records import Outcome
from tpu_launch.run import BUILDER, TRAINER

# Left by a libtpu that was killed; the next one refuses to start while it exists.
_LOCKFILE = pathlib.Path("/tmp/libtpu_lockfile")
_ENDED_EARLY = 1
_REPORT_SECONDS = 60.0
_LAST_REPORT_SECONDS = 30.0
_PREEMPTED = "preempted?wait_for_change=true&timeout_sec=60"
_NOTICE_TIMEOUT_SECONDS, _NOTICE_RETRY_SECONDS = 90.0, 5.0


class Reporter:
    """Uploads a worker's log, and learns how the work has ended, in a thread.

    A store that does not answer blocks its caller for minutes, but a command must be
    told of a preemption at once.

    Attributes:
      over: why the work must end, "" while it goes on.
      is_done: whether the work of the role is done.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        name: str,
        identity: WorkerIdentity,
        log: pathlib.Path,
        say: Callable[[str], None],
    ):
        """Prepares to report, without reading or writing anything yet.

        Args:
          store: the model directory.
          role: "trainer" or "builder".
          name: name of the worker's slices.
          identity: position of the worker.
          log: log of its command.
          say: prints a message.
        """
        self.over, self.is_done = "", False
        self._store, self._role, self._name = store, role, name
        self._identity, self._log, self._say = identity, log, say

    def start(self) -> None:
        """Reports now, and every minute as long as this process lives."""
        self._try()
        threading.Thread(target=self._repeat, daemon=True).start()

    def report(self) -> None:
        """Uploads the log, and looks whether the work has ended.

        Raises:
          BadInputError: the model directory cannot be read.
          UnavailableStoreError: the model directory does not answer.
        """
        number = self._identity.number
        records.write_log(self._store, self._name, number, self._log)
        ended = records.outcomes(self._store)
        failed = [role for role, outcome in ended.items() if not outcome.done]
        trainer_is_done = TRAINER in ended and ended[TRAINER].done
        if self._role in ended and ended[self._role].done:
            self.is_done, self.over = True, "the work is done"
        elif failed:
            self.over = f"the {failed[0]} has failed: {ended[failed[0]].message}"
        elif (
            self._role == BUILDER
            and trainer_is_done
            and records.has_built_all(self._store)
        ):
            self.end(0)

    def end(self, code: int) -> bool:
        """Says how the work has ended; returns whether it is done.

        An index builder also ends with 0 when it has not heard of its trainer for
        long. It is done once its trainer is. Of several workers the first one says
        that the work is done, and any that it has failed.
        """
        if code == 0:
            if self._role == BUILDER and not self._trainer_is_done():
                return False
            if self._identity.number:
                self.report()
                return self.is_done
            self.is_done, self.over = True, "the work is done"
        message = "" if code == 0 else processes.last_line(self._log)
        outcome = Outcome(code == 0, code, message, time.time())
        records.write_outcome(self._store, self._role, outcome)
        return code == 0

    def _trainer_is_done(self) -> bool:
        trainer = records.read_outcome(self._store, TRAINER)
        return trainer is not None and trainer.done

    def _repeat(self) -> None:
        while True:
            time.sleep(_REPORT_SECONDS)
            self._try()

    def _try(self) -> None:
        try:
            self.report()
        # No error of a store may end the thread.
        except Exception as error:
            self._say(f"not reported: {error}")


def work(
    command: Command,
    reporter: Reporter,
    store: Store,
    role: str,
    *,
    deadline: float,
    max_restarts: int,
    stop: threading.Event,
    say: Callable[[str], None],
    pace: Pace,
) -> int:
    """Runs the command of a worker to the end of its work, and says how that was.

    Args:
      command: the command.
      reporter: of this worker.
      store: the model directory.
      role: "trainer" or "builder".
      deadline: time at which the command must end, in Unix seconds.
      max_restarts: restarts at the same place.
      stop: set when the machine is taken away.
      say: prints a message.
      pace: waiting times.

    Returns:
      The exit code of the command; 1 where it was asked to end because of the deadline
      or of what became of the other role.

    Raises:
      BadInputError: the command cannot be run.
    """

    def is_over() -> bool:
        return bool(reporter.over) or time.time() >= deadline

    def is_done() -> bool:
        # Only a store that does not answer may keep a worker whose work is done.
        with contextlib.suppress(UnavailableStoreError, BadInputError):
            return reporter.end(0)
        return False

    code = processes.keep_running(
        [command],
        is_over=is_over,
        is_done=is_done,
        reached=lambda: records.reached(store, role),
        stop=stop,
        say=say,
        max_restarts=max_restarts,
        pace=pace,
    )
    if reporter.is_done:
        return 0
    if stop.is_set():
        return code
    if not is_over():
        reporter.end(code)
    return code if Ended.by(code) is not Ended.STOPPED else _ENDED_EARLY


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command of a role on this worker; returns its exit code.

    Raises:
      BadInputError: flags, metadata or the model directory cannot be used.
    """
    flags = _parse(argv)
    store = open_store(flags.model_dir)
    try:
        return _work(flags, store, stop)
    except Exception as error:
        # Otherwise the next `up` would create the slices again, for the same end.
        code = processes.BAD_INPUT if isinstance(error, BadInputError) else 1
        message = str(error) or type(error).__name__
        with contextlib.suppress(OSError, BadInputError):
            outcome = Outcome(False, code, message, time.time())
            records.write_outcome(store, flags.role, outcome)
        raise


def _work(flags: argparse.Namespace, store: Store, stop: threading.Event) -> int:
    identity = find_identity(flags.slices, flags.hosts, os.environ, stop)
    folder = pathlib.Path(flags.log_dir)
    # The startup script gives the slices back from the first worker.
    (folder / "number").write_text(str(identity.number))
    log = folder / f"{flags.name}-{identity.number}.log"
    command = Command(flags.command, command_environment(identity, os.environ), log)

    def say(text: str) -> None:
        print(text, flush=True)

    _LOCKFILE.unlink(missing_ok=True)
    threading.Thread(
        target=await_preemption, args=(os.environ, stop), daemon=True
    ).start()
    reporter = Reporter(store, flags.role, flags.name, identity, log, say)
    reporter.start()
    code = work(
        *(command, reporter, store, flags.role),
        deadline=flags.deadline,
        max_restarts=flags.max_restarts,
        stop=stop,
        say=say,
        pace=Pace(saving=flags.grace),
    )
    say(f"code {code}: {reporter.over or processes.last_line(log)}")
    last = threading.Thread(target=reporter.report, daemon=True)
    last.start()
    last.join(_LAST_REPORT_SECONDS)
    return code


def await_preemption(environment: Mapping[str, str], stop: threading.Event) -> None:
    """Sets an event once the metadata server says that the machine is preempted.

    A spot VM has 30 s from then on. The guest's agent does not pass the notice on: its
    unit has KillMode=process, so that a startup script and its children get no signal.

    Args:
      environment: environment of this process.
      stop: the event that has the command save and end.
    """
    while not stop.is_set():
        try:
            with open_metadata(
                _PREEMPTED, environment, _NOTICE_TIMEOUT_SECONDS
            ) as answer:
                if answer.read().strip() == b"TRUE":
                    stop.set()
        except (OSError, http.client.HTTPException):
            stop.wait(_NOTICE_RETRY_SECONDS)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tpu_launch.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model_dir", required=True, help="model directory")
    parser.add_argument("--role", required=True, choices=(TRAINER, BUILDER))
    parser.add_argument("--name", required=True, help="name of the queued resource")
    parser.add_argument("--slices", required=True, type=int, help="number of slices")
    parser.add_argument("--hosts", required=True, type=int, help="hosts per slice")
    parser.add_argument("--deadline", required=True, type=float, help="Unix seconds")
    parser.add_argument("--max_restarts", required=True, type=int)
    parser.add_argument("--grace", required=True, type=float, help="seconds to save")
    parser.add_argument("--log_dir", required=True, help="folder of the log")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    code = guard(lambda stop: main(sys.argv[1:], stop))
    sys.stdout.flush()
    sys.stderr.flush()
    # An unavailable store may block the reporter's thread.
    os._exit(code)
