"""Waiting for what threads and processes do, and seconds that pass on demand.

No test may depend on how fast the machine is: what a test waits for is a condition, and
its patience only ends a test that would never end.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds in which anything happens, on a busy machine too: what a test may take."""

_POLL_SECONDS = 0.005


def wait_until(condition: Callable[[], Any]) -> None:
    """Polls until the condition holds; fails if it does not in time."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {PATIENCE:g} s in vain")
        pause.wait(_POLL_SECONDS)


class Clock:
    """Takes the place of the module `time`: both its clocks, moved by hand.

    Attributes:
      seconds: what they show.
      tick: seconds that pass whenever somebody looks, so that a loop that looks ends.
    """

    def __init__(self, tick: float = 0.0):
        self.seconds = 1000.0
        self.tick = tick

    def time(self) -> float:
        self.seconds += self.tick
        return self.seconds

    monotonic = time
