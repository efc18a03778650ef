"""Provides the figures of a plan, and writes them as tables and as JSON."""

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


class Unit(enum.StrEnum):
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
    """A figure of a plan; the note is its source, or a remark on it."""

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
        return value_of(self.sections[section], name)


def value_of(lines: Sequence[Line], name: str) -> float:
    """Returns the value of the line of a name."""
    return next(line.value for line in lines if line.name == name)


def in_all(lines: Sequence[Line]) -> float:
    """Returns the sum of figures."""
    return sum(line.value for line in lines)


def with_limit(
    lines: Sequence[Line], limit: float, whose: str, note: str = ""
) -> list[Line]:
    """Returns figures in bytes, their sum with a note, and what there is."""
    return [
        *lines,
        Line("in all", in_all(lines), Unit.BYTES, note),
        Line("there is", limit, Unit.BYTES, whose),
    ]


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def written(line: Line, currency: str) -> str:
    """Formats a figure for display."""
    match line.unit:
        case Unit.BYTES:
            return _scaled(line.value, 1024, _BINARY, most=1024)
        case Unit.FLOP:
            # In the usual unit: an update has thousands of TFLOP.
            return f"{_scaled(line.value, 1000, _DECIMAL, most=10_000)}FLOP"
        case Unit.SECONDS:
            return duration(line.value)
    words = {
        Unit.STEPS: " steps",
        Unit.PER_HOUR: " an hour",
        Unit.MONEY: f" {currency}",
    }
    return f"{line.value:,.0f}{words.get(line.unit, '')}"


def _scaled(value: float, base: int, prefixes: Sequence[str], most: int) -> str:
    power = 0
    while value >= most and power + 1 < len(prefixes):
        value /= base
        power += 1
    return f"{value:,.{0 if power == 0 else 1}f} {prefixes[power]}"


def duration(seconds: float) -> str:
    """Returns a duration as readable text, in one unit."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def show(plans: Sequence[Plan], currency: str, console: Console) -> None:
    """Prints one table per plan."""
    for plan in plans:
        table = Table(title=plan.title, title_justify="left", show_header=False)
        table.add_column("figure")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("note", style="dim")
        for heading, lines in plan.sections.items():
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
            for line in lines:
                table.add_row(f"  {line.name}", written(line, currency), line.note)
        console.print(table)
        for name, value in plan.bindings.items():
            console.print(f"chosen: {name} = {value}", highlight=False)
        for hint in plan.hints:
            console.print(f"note: {hint}", highlight=False)
        for problem in plan.problems:
            console.print(f"[bold]does not fit:[/bold] {problem}", highlight=False)


def as_json(plans: Sequence[Plan], currency: str) -> str:
    """Returns all figures as JSON, in base units: bytes, FLOP, seconds."""
    described = [dataclasses.asdict(plan) for plan in plans]
    for plan in described:
        plan["sections"] = {
            heading: {line["name"]: line for line in lines}
            for heading, lines in plan["sections"].items()
        }
    return json.dumps({"currency": currency, "plans": described}, indent=1)
