"""`realm COMMAND`: REALM from text to answers, one command a stage.

`realm --help` lists the commands, `realm COMMAND --help` shows the purpose, macros and
an example of each. Exit codes: 0 done, 2 bad input (one line says what), 130 stopped by
Ctrl-C and 143 by SIGTERM (both leave a directory that the same command resumes).
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from realm_jax.errors import BadInputError, StoppedError

# Command -> (module, purpose), in the order of the stages.
COMMANDS = {
    "prepare": ("prepare", "turn a corpus into blocks, tagged spans and examples"),
    "warm-start": ("warm_start", "start the retriever (ICT) and the reader (MLM)"),
    "pretrain": ("pretrain", "train retriever and reader together (REALM)"),
    "build-index": ("build_index", "follow the newest retriever, publish its index"),
    "finetune": ("finetune", "train on questions over the frozen document index"),
    "evaluate": ("evaluate", "measure recall and exact match, write report.html"),
}
_BAD_INPUT = 2


def console() -> None:
    """Entry point of the `realm` program."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else _BAD_INPUT
    if argv[0] not in COMMANDS:
        return _fail(
            f"unknown command {argv[0]!r}; expected one of {', '.join(COMMANDS)}"
        )
    module = importlib.import_module(f"realm_jax.cli.{COMMANDS[argv[0]][0]}")
    return guard(lambda stop: module.main(argv[1:], stop))


def guard(command: Callable[[threading.Event], None]) -> int:
    """Runs a command that may be interrupted; bad input becomes one line and code 2.

    Args:
      command: takes the event that is set when the process was asked to stop; it then
        saves what it has and returns.
    """
    with _stop_signals() as (stop, received):
        try:
            command(stop)
        except BadInputError as error:
            return _fail(str(error))
        except StoppedError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except OSError as error:
            if error.errno is None or error.filename is None:
                raise
            return _fail(f"{error.strerror}: {error.filename}")
        return 128 + received[0] if received else 0


@contextmanager
def _stop_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """The first SIGINT or SIGTERM asks to stop; a second SIGINT ends at once."""
    stop, received = threading.Event(), []

    def handle(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        stop.set()
        print("\nstopping at the next safe point ...", file=sys.stderr, flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return _BAD_INPUT


def _usage() -> str:
    rows = [f"  {name:<12} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join([str(__doc__).strip(), "", "Commands:", *rows])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    console()
