"""Time and waiting, so that tests need none."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Time, and waiting."""

    def now(self) -> float:
        """Returns Unix seconds."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits; returns at once, and True, when asked to stop."""
        ...

    def wait_anyway(self, seconds: float) -> None:
        """Waits even when asked to stop, for what must be brought to an end."""
        ...


class SystemClock:
    """The machine's time."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def now(self) -> float:
        """Returns Unix seconds."""
        return time.time()

    def wait(self, seconds: float) -> bool:
        """Waits until the time is over or the event is set."""
        return self._stop.wait(seconds)

    def wait_anyway(self, seconds: float) -> None:
        """Waits until the time is over."""
        time.sleep(seconds)
