"""Provides time and waiting, which tests replace."""

import threading
import time
from collections.abc import Hashable
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


class Unchanged:
    """Measures for how long observed values have stayed the same, by one clock.

    Between two looks at most `longest_gap` passes: while the observer did not get an
    answer, or slept, nobody knows what went on.
    """

    def __init__(self, longest_gap: float):
        """Begins to observe; `longest_gap` is in seconds."""
        self._longest_gap = longest_gap
        self._seen: dict[Hashable, tuple[object, float, float]] = {}

    def seconds(self, key: Hashable, value: object, now: float) -> float:
        """Notes a value; returns the seconds for which it has not changed.

        Args:
          key: what is observed.
          value: its present value.
          now: time of the observer's clock, in seconds.
        """
        before, looked, seconds = self._seen.get(key, (object(), now, 0.0))
        seconds += min(max(0.0, now - looked), self._longest_gap)
        if value != before:
            seconds = 0.0
        self._seen[key] = value, now, seconds
        return seconds

    def forget(self, key: Hashable) -> None:
        """Has the next value of a key count as a new one."""
        self._seen.pop(key, None)


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
