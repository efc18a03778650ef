"""Runs the work of a role to its end: the one restart loop, and when the end is.

A TPU VM runs its one process by it, `local` all processes of a stage. On GKE the same
rules stand in the manifest (`gke.py`). What becomes of a role is said in the model
directory (`records.py`), where the workers of both roles look for it.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from realm_jax.cli.main import STOPPED
from realm_jax.errors import BAD_INPUT, BUG, BadInputError
from realm_jax.storage import Store
from tpu_launch import processes, records
from tpu_launch.processes import Command, Ended, Pace
from tpu_launch.run import BUILDER, TRAINER

_ENDED_EARLY = 1


class Worker:
    """Runs processes of a role, says how its work ended, and hears how others' did.

    Attributes:
      over: why the work must end, "" while it goes on.
      is_done: whether the work of the role is done.
      has_failed: whether it has failed here, and not for what became of others.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        commands: Sequence[Command],
        stop: threading.Event,
        say: Callable[[str], None],
        *,
        max_restarts: int,
        pace: Pace,
        look_seconds: float,
        deadline: float = math.inf,
        number: int = 0,
        name: str = "",
    ):
        """Prepares a worker, without reading or writing anything yet.

        Each of `commands`, which work together, has a log. They are started again at
        most `max_restarts` times at the same place, and asked to end at the `deadline`,
        in Unix seconds. `look_seconds` pass between two looks at the model directory.
        `number` is the worker's among all hosts of its role's slices, and `name` that
        of the slices, under which its log is uploaded; "" for no upload.
        """
        self.over, self.is_done, self.has_failed = "", False, False
        self._store, self._role, self._commands = store, role, commands
        self._stop, self._say, self._max_restarts = stop, say, max_restarts
        self._pace, self._look_seconds, self._deadline = pace, look_seconds, deadline
        self._number, self._name = number, name
        self._logs = [command.log for command in commands if command.log]
        self._trouble = ""

    def run(self) -> int:
        """Runs the processes to the end of the work; returns their exit code.

        That is 1 where they were asked to end because of the deadline, or of what
        became of the other role.
        """
        ended = threading.Event()

        def keep_reporting() -> None:
            while not ended.wait(self._look_seconds):
                self.try_to_report()

        self.try_to_report()
        # A store that does not answer blocks its caller for minutes, but a command must
        # be told of a preemption at once.
        threading.Thread(target=keep_reporting, daemon=True).start()
        try:
            code = self.keep_running()
        finally:
            ended.set()
        if self.is_done:
            return 0
        if self._stop.is_set():
            return code
        if not self.must_end():
            try:
                self.end(code)
            except (OSError, BadInputError) as error:
                self._say_trouble(error)
        return code if Ended.by(code) is not Ended.STOPPED else _ENDED_EARLY

    def keep_running(self) -> int:
        """Runs the processes until their work has ended, and leaves none behind.

        Returns the exit code: 0 if done, 143 if the work must end. After a crash they
        are started again, while it is not `max_restarts` times at the same place; and
        without counting after a code that says that nothing has failed.
        """
        pace, in_vain, place = self._pace, 0, object()
        while not self.must_end():
            code, was_asked = processes.run_once(
                self._commands, self.must_end, self._stop, self._say, pace
            )
            ended = Ended.by(code)
            if was_asked or self.must_end() or ended is Ended.BAD_INPUT:
                return code
            if ended is Ended.DONE and self.await_end():
                return 0
            seconds = pace.waiting
            if ended is Ended.CRASHED:
                # While the model directory does not answer, nothing is counted.
                with contextlib.suppress(OSError, BadInputError):
                    before, place = place, records.reached(self._store, self._role)
                    in_vain = in_vain + 1 if place == before else 1
                if in_vain > self._max_restarts:
                    return code
                backoff = pace.backoff * 2 ** max(0, in_vain - 1)
                seconds = min(backoff, pace.longest_backoff)
            self._say(f"ended with code {code}; starting again in {seconds:.0f} s")
            self.wait(seconds)
        return STOPPED

    def must_end(self) -> bool:
        """Returns whether processes are to save and end, although none says so."""
        return self._stop.is_set() or bool(self.over) or time.time() >= self._deadline

    def await_end(self) -> bool:
        """Returns whether exit code 0 means that the work is done.

        It waits for others that say the same: they end a moment later, or crash.
        """
        until = time.monotonic() + self._pace.saving
        try:
            while not (self.end(0) or self.must_end() or time.monotonic() >= until):
                self.wait(min(self._look_seconds, self._pace.saving))
        except (OSError, BadInputError) as error:
            self._say_trouble(error)
        return self.is_done

    def wait(self, seconds: float) -> None:
        """Waits, but not beyond the end of the work."""
        until = time.monotonic() + seconds
        while not self.must_end() and (left := until - time.monotonic()) > 0:
            self._stop.wait(min(self._pace.poll, left))

    def end(self, code: int) -> bool:
        """Says how the work has ended; returns whether it is done.

        An index builder ends with 0 when its trainer says that it has finished, but is
        done only once that has ended with 0, too. Of several workers the first one says
        that the work is done, and any that it has failed. Where that is damaged, any
        says it again.
        """
        if code:
            self.has_failed = True
            records.write_outcome(self._store, self._role, code, self.last_line())
            return False
        ended, damaged = records.readable_outcomes(self._store)
        done = {role for role, outcome in ended.items() if outcome.done}
        if self._role == BUILDER and TRAINER not in done | damaged:
            return False
        if self._number and self._role not in damaged:
            self.report()
            return self.is_done
        records.write_outcome(self._store, self._role, 0)
        self.is_done, self.over = True, "the work is done"
        return True

    def report(self) -> None:
        """Uploads the log, and looks whether the work has ended."""
        if self._name:
            records.write_log(self._store, self._name, self._number, self._logs[0])
        ended, damaged = records.readable_outcomes(self._store)
        failed = [role for role, outcome in ended.items() if not outcome.done]
        if self._role in ended and self._role not in failed:
            self.is_done, self.over = True, "the work is done"
        elif failed:
            self.over = f"the {failed[0]} has failed: {ended[failed[0]].message}"
        elif (
            self._role == BUILDER
            and self._number == 0
            and TRAINER in {*ended, *damaged}
            and records.has_built_all(self._store)
        ):
            self.end(0)

    def last_line(self) -> str:
        """Returns the last line of its processes, "" where none has written any."""
        return next(filter(None, map(records.last_line, self._logs)), "")

    def try_to_report(self) -> None:
        """Reports, whatever error of a store comes."""
        try:
            self.report()
            self._trouble = ""
        except Exception as error:
            self._say_trouble(error)

    def _say_trouble(self, error: Exception) -> None:
        """Says why nothing could be reported, once until that changes."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            self._say(f"not reported: {error}")


@contextlib.contextmanager
def errors_said(store: Store, role: str) -> Iterator[None]:
    """Says in the model directory, too, that the work of a role ends with an error."""
    try:
        yield
    except Exception as error:
        code = BAD_INPUT if isinstance(error, BadInputError) else BUG
        message = str(error) or type(error).__name__
        with contextlib.suppress(OSError, BadInputError):
            records.write_outcome(store, role, code, message)
        raise
