"""`realm COMMAND`: REALM from text to answers, one command per stage.

`realm --help` lists the commands, `realm COMMAND --help` shows the purpose, settings
and an example of each, `realm --version` prints the version. Exit codes: 0 done, 1 a
bug (with its traceback) or a stall of training (with the stacks), 2 bad input (with a
one-line message) or a second stall at one checkpoint, 75 another job is late with what
this one needs, or the bucket or network file system is away (likewise; the same
command may succeed later), 130 stopped by Ctrl-C, 129 by SIGHUP (a terminal that is
gone) and 143 by SIGTERM, or because another process of the job was (all leave a
directory from which the same command resumes; `ask`, `search` and `evaluate` with
FOLLOW exit with 0).
"""

import _thread
import importlib
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from realm_jax import __version__
from realm_jax.cli import model_dir
from realm_jax.errors import (
    BAD_INPUT,
    BUG,
    NOT_READY,
    BadInputError,
    NotReadyError,
    StoppedError,
    is_out_of_space,
    out_of_space_error,
)
from realm_jax.stages import STAGES
from realm_jax.storage import UnavailableStoreError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to save and end; it exits with 128 and their number."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a command if another process of its job was asked to stop."""

# Gin appends the place in its files to the message of an error.
_GIN_TRAIL = "\n  In call to configurable"


def console(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `realm` program; `argv` are the arguments after `realm`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.unraisablehook = _tell_unraisable
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except Exception:
        traceback.print_exc()
        code = BUG
    if code in (BUG, BAD_INPUT, NOT_READY):
        # The message is printed. During interpreter shutdown, a process of a job would
        # wait for the others, which wait for this one; and libraries that were writing
        # when the disk was full would report all unfinished writes again.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""

    def command(stop: threading.Event) -> int | None:
        if not argv or argv[0] in ("-h", "--help"):
            print(_usage())
            return 0 if argv else BAD_INPUT
        if argv[0] == "--version":
            print(f"realm_jax {__version__}")
            return 0
        if argv[0] not in STAGES:
            raise BadInputError(
                f"unknown command {argv[0]!r}; expected one of {', '.join(STAGES)}"
            )
        # Before the import, which takes seconds, as all that follows takes minutes.
        model_dir.require_writable(argv[1:])
        # Imported here, because it may be interrupted too.
        module = importlib.import_module(STAGES[argv[0]].module)
        return module.main(argv[1:], stop)

    return guard(command)


def guard(command: Callable[[threading.Event], int | None]) -> int:
    """Runs a command that may be interrupted; expected errors become one line.

    The command takes the event that is set when the process is asked to stop; it then
    saves its state and returns. One that ordinarily ends this way returns 0.
    """
    with _stop_signals() as (stop, received):
        try:
            _log_to_screen()
            code = command(stop)
            sys.stdout.flush()
            if code is not None:
                return code
        except BadInputError as error:
            return _fail(str(error))
        except NotReadyError as error:
            _fail(str(error))
            return NOT_READY
        except UnavailableStoreError as error:
            _fail(f"{error}; run the same command again later")
            return NOT_READY
        except StoppedError as error:
            # After SIGHUP there is no terminal to print on.
            with suppress(OSError):
                print(error, file=sys.stderr)
            return 128 + received[0] if received else STOPPED
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
                # What is left to write must not fail at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 128 + signal.SIGPIPE
            message = _system_message(error)
            if message is None:
                raise
            return _fail(message)
        return 128 + received[0] if received else 0


def _has_no_reader(stream: TextIO) -> bool:
    """Returns whether the reader of a pipe, such as `head`, has closed it."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _tell_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    # After a failed write Orbax closes its event loop and raises; every other pending
    # write of TensorStore then finds the loop closed, with a traceback each.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


class _Screen(logging.Handler):
    """Prints above a live bar, which replaces sys.stderr while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _log_to_screen() -> None:
    handler = _Screen()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    # Orbax logs the exceptions that it raises, with a traceback.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A stage may read a large corpus for minutes before it says anything else.
    logging.getLogger("realm_jax.data.store_files").setLevel(logging.INFO)
    # Said once, of the questions that are fine-tuned on.
    logging.getLogger("realm_jax.training.answer_coverage").setLevel(logging.INFO)


@contextmanager
def _stop_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """Sets an event on the first of `STOP_SIGNALS`; a second SIGINT ends at once.

    SIGHUP stays ignored where it is, as under nohup. Yields the event, and the numbers
    of the signals received.
    """
    stop, received = threading.Event(), []

    def handle(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Nothing is printed: this may have interrupted a print. StageProgress does so.
        received.append(number)
        # This may have interrupted a wait for the event while it holds the lock that
        # setting it needs. Another thread can wait for the lock; `threading` itself has
        # locks that may be held here.
        _thread.start_new_thread(stop.set, ())

    heard = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield stop, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _system_message(error: BaseException | None) -> str | None:
    """Describes a system error in one line; None if the error is of another kind."""
    if error is None:
        return None
    if is_out_of_space(error):
        return str(out_of_space_error(getattr(error, "filename", None) or "a file"))
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return _system_message(error.__cause__)


def _fail(message: str) -> int:
    text = message.partition(_GIN_TRAIL)[0]
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return BAD_INPUT


def _usage() -> str:
    rows = [f"  {spec.command:<13} {spec.purpose}" for spec in STAGES.values()]
    return "\n".join([str(__doc__).strip(), "", "Commands:", *rows])


if __name__ == "__main__":
    console()
