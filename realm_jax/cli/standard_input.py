"""Reads questions and queries from standard input, at a prompt or from a pipe."""

import os
import select
import threading
from collections.abc import Callable, Iterator

from rich.console import Console

from realm_jax.errors import BadInputError

_STDIN = 0
_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 16


class Notes:
    """Prints messages to standard error; only answers go to standard output."""

    def __init__(self, command: str):
        """`command`: name of the command, which each message begins with."""
        self._command = command

    def __call__(self, text: str) -> None:
        """Prints a message."""
        Console(stderr=True).print(
            f"{self._command}: {text}", highlight=False, markup=False, soft_wrap=True
        )


def is_terminal() -> bool:
    """Returns whether a person types the lines."""
    return os.isatty(_STDIN)


def each_line(
    answer: Callable[[str], None],
    stop: threading.Event,
    note: Callable[[str], None],
    *,
    prompts: bool,
) -> None:
    """Calls a function with each line that is not blank, until input ends.

    A `BadInputError` of it is noted, and the next line is read. With `prompts` a
    terminal shows a prompt.
    """
    if is_terminal():
        note("ready; Ctrl-D or Ctrl-C ends it")
    for line in _lines(stop, Console() if is_terminal() and prompts else None):
        if not line.strip():
            continue
        try:
            answer(line)
        except BadInputError as error:
            note(str(error))


def _lines(stop: threading.Event, prompt: Console | None) -> Iterator[str]:
    """Yields lines of standard input, until it ends or the process is to stop."""
    buffer = b""
    _prompt(prompt)
    while not stop.is_set():
        # Waits in short intervals, because a signal only sets the event.
        if not select.select([_STDIN], [], [], _LOOK_SECONDS)[0]:
            continue
        data = os.read(_STDIN, _READ_BYTES)
        *lines, buffer = (buffer + data).split(b"\n")
        if not data:
            lines = [buffer]
        for line in lines:
            if stop.is_set():
                return
            yield line.decode(errors="replace")
        if not data:
            return
        _prompt(prompt)


def _prompt(console: Console | None) -> None:
    if console is not None:
        console.print("\n[bold cyan]?[/] ", end="")
