"""`python -m tpu_launch logs`: prints the output of the workers of a run.

Give it the flags of `up`, or --gin.MODEL_DIR=gs://my-bucket/my/pretrain alone. It
prints the last output of the workers of each role's last attempt, up to 256 KiB each,
with role and worker before every line. --follow continues with new lines, of new
attempts too, until the run is over or Ctrl-C; workers upload their logs every minute.

Exit code 1: the model directory does not answer.
"""

import argparse
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.storage import (
    MissingObjectError,
    ObjectStat,
    UnavailableStoreError,
    open_store,
)
from tpu_launch.attempts import attempt_numbers, read_launcher
from tpu_launch.cancellation import unless_stopped
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.watching import lenient_reads
from tpu_launch.watching.cached_store import CachedStore
from tpu_launch.watching.run_status import find_run
from tpu_launch.watching.status import UNAVAILABLE, pause_seconds
from tpu_launch.worker_state import State, attempt_folder, role_folder, worker_numbers

MISSING = "[lines may be missing here]"
"""Stands for lines that were overwritten between two reads."""

_STOPPED = "stopped reading; the run goes on"
_LOG = ".log"
# Workers learn up to a minute later that their role is done, then upload their logs.
_LAST_WORDS_SECONDS = 90.0
_COLORS = ("cyan", "green", "magenta", "blue", "yellow")
_ENDED = (State.DONE, State.STOPPED, State.FAILED)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Selection of logs.

    Attributes:
      roles: names of the roles.
      worker: number of the worker; None selects all.
      attempt: number of the attempt; None selects the last and later ones.
    """

    roles: tuple[str, ...] = (TRAINER, BUILDER)
    worker: int | None = None
    attempt: int | None = None


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0, or 1 where the model directory does not answer.

    Raises:
      BadInputError: no MODEL_DIR is given, no run was launched there, or it has no such
        role, attempt or worker.
      StoppedError: `stop` was set.
    """
    flags, model_dir = configuration.parse_for_macro(_parser(), argv, "MODEL_DIR")
    roles = (flags.role,) if flags.role else (TRAINER, BUILDER)
    wanted = Wanted(roles, flags.worker, flags.attempt)
    store = open_store(model_dir)
    try:
        run = unless_stopped(lambda: find_run(store), stop, _STOPPED)
        logs = Logs(CachedStore(store, f"launch/{run}"), run, wanted)
        unless_stopped(logs.require_there, stop, _STOPPED)
        return _print(logs, stop, pause_seconds(store) if flags.follow else None)
    except UnavailableStoreError as error:
        print(f"error: the model directory does not answer: {error}", file=sys.stderr)
        return UNAVAILABLE
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; discard further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_parser("python -m tpu_launch logs", __doc__)
    parser.add_argument("--role", choices=(TRAINER, BUILDER), help="only of this role")
    parser.add_argument("--worker", type=int, help="only of this worker")
    parser.add_argument("--attempt", type=int, help="of this attempt, not the last")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new lines"
    )
    return parser


def _print(logs: "Logs", stop: threading.Event, pause: float | None) -> int:
    """Prints the new lines; with a pause, repeatedly until the run is over."""
    console = Console()
    is_away = False
    while True:
        try:
            lines = unless_stopped(lambda: logs.look(time.time()), stop, _STOPPED)
            is_away = False
        except UnavailableStoreError as error:
            if pause is None:
                raise
            if not is_away:
                said = f"the model directory does not answer, asking again: {error}"
                print(said, file=sys.stderr)
            lines, is_away = [], True
        for who, line in lines:
            print(f"{_prefix(who, console)}{line}")
        sys.stdout.flush()
        if pause is None or logs.is_over:
            for who, line in logs.rests():
                print(f"{_prefix(who, console)}{line}")
            return 0
        if stop.wait(pause):
            raise StoppedError(_STOPPED)


def _prefix(who: str, console: Console) -> str:
    """Returns the prefix of a worker's lines, coloured if the console is a terminal."""
    text = f"{who} | "
    if not console.is_terminal:
        return text
    role, _, worker = who.partition("/")
    color = _COLORS[(int(worker) + (role == BUILDER)) % len(_COLORS)]
    with console.capture() as written:
        console.print(Text(text, style=color), end="", soft_wrap=True)
    return written.get()


class Logs:
    """Reads the logs of a run incrementally.

    Attributes:
      is_over: whether all lines had been written at the last call of `look`.
    """

    def __init__(self, store: CachedStore, run: str, wanted: Wanted):
        """Prepares to read logs.

        Args:
          store: the model directory, which caches the folder of the run.
          run: id of the run.
          wanted: the logs to read.
        """
        self.is_over = False
        self._store, self._run, self._wanted = store, run, wanted
        self._first: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._tails: dict[tuple[str, int, int], Tail] = {}
        self._seen: dict[str, ObjectStat] = {}
        self._untold: list[tuple[str, str]] = []
        self._done_since: float | None = None
        self._have_ended = False

    def require_there(self) -> None:
        """Checks that the run has the selected role, attempt and worker.

        Raises:
          BadInputError: it has no such role, attempt or worker.
        """
        self._store.look()
        wanted = self._wanted
        found = {role: self._numbers(role) for role in wanted.roles}
        if len(wanted.roles) == 1 and not self._store.list(
            role_folder(self._run, wanted.roles[0])
        ):
            raise BadInputError(
                f"expected a role that {self._run} has, got {wanted.roles[0]}; leave "
                "--role out"
            )
        attempts = sorted({number for numbers in found.values() for number in numbers})
        if wanted.attempt is not None and wanted.attempt not in attempts:
            raise BadInputError(
                f"expected an attempt of {_listed(attempts)}, got {wanted.attempt}; "
                "choose one of these"
            )
        workers = {
            worker
            for role, numbers in found.items()
            for number in self._chosen(numbers)[-1:]
            for suffix in (_LOG, ".json")
            for worker in worker_numbers(self._store, self._run, role, number, suffix)
        }
        # Before any worker has reported, every number is possible.
        if wanted.worker is not None and workers and wanted.worker not in workers:
            raise BadInputError(
                f"expected a worker of {_listed(sorted(workers))}, got "
                f"{wanted.worker}; choose one of these"
            )

    def look(self, now: float) -> list[tuple[str, str]]:
        """Returns the new lines, as pairs of a worker, such as "trainer/0", and a line.

        Args:
          now: current time in Unix seconds.

        Raises:
          BadInputError: the model directory cannot be read.
          UnavailableStoreError: the model directory does not answer.
        """
        self._store.look()
        for role in self._wanted.roles:
            # Lines read before the store became unavailable are kept for the next call.
            self._untold.extend(self._of_role(role))
        self.is_over = self._has_all(now)
        found, self._untold = self._untold, []
        return found

    def rests(self) -> list[tuple[str, str]]:
        """Returns the incomplete last lines, at the end of all logs."""
        return [
            (_who(role, worker), line)
            for (role, _, worker), tail in self._tails.items()
            for line in tail.rest()
        ]

    def _of_role(self, role: str) -> Iterator[tuple[str, str]]:
        numbers = self._chosen(self._numbers(role))
        if not numbers:
            return
        self._first.setdefault(role, numbers[-1])
        following = self._next.get(role, numbers[-1])
        for number in [number for number in numbers if number >= following]:
            workers = worker_numbers(self._store, self._run, role, number, _LOG)
            for worker in workers:
                if self._wanted.worker in (None, worker):
                    yield from self._of_worker(role, number, worker)
        # Earlier attempts have been read once more, and are complete.
        for key in [key for key in self._tails if key[0] == role]:
            if key[1] < numbers[-1]:
                rest = self._tails.pop(key).rest()
                yield from ((_who(role, key[2]), line) for line in rest)
        self._next[role] = numbers[-1]

    def _of_worker(
        self, role: str, attempt: int, worker: int
    ) -> Iterator[tuple[str, str]]:
        who, key = _who(role, worker), (role, attempt, worker)
        name = f"{attempt_folder(self._run, role, attempt)}/{worker}{_LOG}"
        stat = self._store.stats(attempt_folder(self._run, role, attempt))[name]
        if self._seen.get(name) == stat:
            return
        try:
            end = self._store.read(name)
        except MissingObjectError:
            return
        if attempt > self._first[role] and key not in self._tails:
            yield who, f"[attempt {attempt}]"
        self._seen[name] = stat
        for line in self._tails.setdefault(key, Tail()).see(end):
            yield who, line

    def _has_all(self, now: float) -> bool:
        """Returns whether the lines just read are the last ones."""
        launcher = read_launcher(self._store, self._run)
        if launcher is not None and launcher.ended is not None:
            return True
        last = {
            role: max(numbers)
            for role in self._wanted.roles
            if (numbers := self._numbers(role))
        }
        number = self._wanted.attempt
        if number is not None and all(one > number for one in last.values()):
            return True
        markers = [
            lenient_reads.done_step(self._store, self._run, role) for role in last
        ]
        if not markers or None in markers:
            self._done_since, self._have_ended = None, False
            return False
        if self._done_since is None:
            self._done_since = now
        # A worker uploads its log after its last state: it is there at the next call.
        had_ended = self._have_ended
        self._have_ended = all(
            word.state in _ENDED
            for role, attempt in last.items()
            for word in lenient_reads.words(
                self._store, self._run, role, attempt
            ).values()
        )
        return had_ended or now - self._done_since > _LAST_WORDS_SECONDS

    def _numbers(self, role: str) -> list[int]:
        return attempt_numbers(self._store, self._run, role)

    def _chosen(self, numbers: Sequence[int]) -> list[int]:
        """Returns the selected attempts among those of a role."""
        if self._wanted.attempt is not None:
            return [number for number in numbers if number == self._wanted.attempt]
        return list(numbers)


def _who(role: str, worker: int) -> str:
    return f"{role}/{worker}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none so far"


class Tail:
    """A log, reconstructed from its consecutive ends, of which only the last is stored.

    Every minute, a worker replaces `<worker>.log` by the last 256 KiB of its command's
    output, from the beginning of a line (`reporter.py`).
    """

    def __init__(self):
        self._last = b""
        self._rest = b""

    def see(self, end: bytes) -> list[str]:
        """Returns the complete lines that are new in the end of a log.

        An incomplete last line is kept until it is complete.

        Args:
          end: the end of the log, from the beginning of a line.
        """
        length = overlap(self._last, end)
        begins_anew = bool(self._last) and not length
        before = [*self.rest(), MISSING] if begins_anew and end else []
        self._last = end
        *whole, self._rest = (self._rest + end[length:]).split(b"\n")
        return [*before, *map(_text, whole)]

    def rest(self) -> list[str]:
        """Returns the incomplete last line, if any, at the end of the log."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def overlap(last: bytes, end: bytes) -> int:
    """Returns the length of the known part of a log's new end, in bytes.

    That is the longest suffix of the last end that is a prefix of the new one. It must
    begin at a line start in both, because the end of a line may equal another line.
    """
    if end.startswith(last):
        return len(last)
    seen, new = memoryview(last), memoryview(end)
    start = last.find(b"\n") + 1
    while 0 < start < len(last):
        length = len(last) - start
        if seen[start:] == new[:length]:
            return length
        start = last.find(b"\n", start) + 1
    return 0


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
