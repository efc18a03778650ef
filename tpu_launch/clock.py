"""Provides time and waiting, which tests replace."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Interface of a clock that can also wait."""

    def now(self) -> float:
        """Returns the time in Unix seconds."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits; returns True at once when asked to stop."""
        ...

    def wait_anyway(self, seconds: float) -> None:
        """Waits even when asked to stop, for work that must be completed."""
        ...


class SystemClock:
    """The system clock."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def now(self) -> float:
        """Returns the time in Unix seconds."""
        return time.time()

    def wait(self, seconds: float) -> bool:
        """Waits for the time or the event; returns whether the event is set."""
        return self._stop.wait(seconds)

    def wait_anyway(self, seconds: float) -> None:
        """Waits until the time has passed."""
        time.sleep(seconds)
