"""Provides the figures of a plan, and formats them."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class Unit(enum.Enum):
    """Unit of a figure."""

    BYTES = "bytes"
    FLOP = "FLOP"
    SECONDS = "seconds"
    STEPS = "steps"
    PER_HOUR = "per hour"
    COUNT = ""
    MONEY = "money"


@dataclasses.dataclass(frozen=True)
class Line:
    """A figure of a plan.

    Attributes:
      name: name of the figure.
      value: value in its unit.
      unit: unit of the value.
      note: source of the value, or a remark on it.
    """

    name: str
    value: float
    unit: Unit
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one command.

    Attributes:
      title: the command and its machines.
      sections: heading -> figures.
      problems: what does not fit, and which setting would help; empty if all fits.
      hints: remarks although everything fits.
      bindings: gin bindings that the planner chose, such as for `auto`.
    """

    title: str
    sections: Mapping[str, Sequence[Line]]
    problems: Sequence[str] = ()
    hints: Sequence[str] = ()
    bindings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def figure(self, section: str, name: str) -> float:
        """Returns the value of a line."""
        return next(line.value for line in self.sections[section] if line.name == name)


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def written(line: Line, currency: str) -> str:
    """Formats a figure for display."""
    value = line.value
    match line.unit:
        case Unit.BYTES:
            return _scaled(value, 1024, _BINARY, "", most=1024)
        case Unit.FLOP:
            # In the usual unit: an update has thousands of TFLOP.
            return _scaled(value, 1000, _DECIMAL, "FLOP", most=10_000)
        case Unit.SECONDS:
            return _time(value)
        case Unit.STEPS:
            return f"{value:,.0f} steps"
        case Unit.PER_HOUR:
            return f"{value:,.0f} an hour"
        case Unit.MONEY:
            return f"{value:,.0f} {currency}"
        case Unit.COUNT:
            return f"{value:,.0f}"


def _scaled(
    value: float, base: int, prefixes: Sequence[str], unit: str, most: int
) -> str:
    power = 0
    while value >= most and power + 1 < len(prefixes):
        value /= base
        power += 1
    return f"{value:,.{0 if power == 0 else 1}f} {prefixes[power]}{unit}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"
