"""Ends the search for an answer pattern that backtracks without end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from realm_jax.errors import BadInputError, StoppedError

LONGEST_SECONDS = 10.0
"""Longest that one pattern is searched for in one text; most take microseconds."""

SECONDS_AFTER_CTRL_C = 0.5
"""Longest that a search goes on after Ctrl-C."""


@contextmanager
def bounded(pattern: str) -> Iterator[None]:
    """Bounds the time in which a regular expression is matched, and heeds Ctrl-C.

    Python's `re` holds the interpreter, so no other thread can end it. It does let
    signal handlers run, in the main thread; in other threads nothing is bounded.

    Raises:
      StoppedError: it went on after Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt, stopped = signal.getsignal(signal.SIGINT), False

    def on_interrupt(number, frame):
        nonlocal stopped
        stopped = True
        signal.setitimer(signal.ITIMER_REAL, SECONDS_AFTER_CTRL_C)
        if callable(interrupt):
            interrupt(number, frame)

    def on_alarm(number, frame):
        if stopped:
            raise StoppedError(
                f"stopped in the search for the pattern {pattern!r:.200}"
            )
        raise BadInputError(
            f"expected answer patterns that take at most {LONGEST_SECONDS:g} s a text, "
            f"got {pattern!r:.200}, which tries ever more ways to match; write "
            "it without a repetition of what repeats itself, such as (a+)+"
        )

    alarm = signal.signal(signal.SIGALRM, on_alarm)
    if callable(interrupt):
        signal.signal(signal.SIGINT, on_interrupt)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, alarm)
