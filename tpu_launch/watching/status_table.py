"""Renders the status of a run for a terminal and as JSON."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tpu_launch.watching.run_status import (
    RoleState,
    RoleStatus,
    RunStatus,
    WorkerStatus,
)

_STYLES = {
    RoleState.QUEUED: "yellow",
    RoleState.STARTING: "yellow",
    RoleState.RUNNING: "green",
    RoleState.RESTARTING: "bold yellow",
    RoleState.FAILED: "bold red",
    RoleState.LOST: "bold yellow",
    RoleState.WAITING: "yellow",
    RoleState.STOPPED: "dim",
    RoleState.DONE: "bold green",
}
# Age at which a worker's last report counts as late; workers report every minute.
_LATE_SECONDS = 180.0
_BAR_WIDTH = 24
# Workers with problems are listed individually, up to this many per role.
_MOST_WORKERS = 8
_NOTHING = Text("-", style="dim")


def render(status: RunStatus) -> RenderableType:
    """Returns a terminal view of a run, in which no line is ever wrapped."""
    parts: list[RenderableType] = [_title(status)]
    if not status.roles:
        parts.append(_line("nothing was asked for yet", style="yellow"))
    else:
        parts += [_training(status), "", _Roles(status)]
        parts += _troubles(status.roles)
    foot = [*_launcher(status), *_costs(status)]
    return Group(*parts, *(["", *foot] if foot else []))


def as_json(status: RunStatus) -> str:
    """Returns the status as a JSON object, with null for unknown values."""
    values = {**dataclasses.asdict(status), "is_over": status.is_over}
    return json.dumps(_plain(values), indent=1)


def duration(seconds: float) -> str:
    """Returns a duration in seconds as readable text, in one unit."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes:.0f} min"
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{days:.1f} days"


def _title(status: RunStatus) -> RenderableType:
    grid = _grid(2)
    grid.add_row(Text(status.run, style="bold"), _line(status.model_dir, style="dim"))
    return grid


def _training(status: RunStatus) -> RenderableType:
    """Renders the progress of the training, its metrics, and the age of its index."""
    lines: list[RenderableType] = []
    if status.step is not None:
        total, step = status.total_steps, Text(f"step {status.step:,}")
        if total:
            grid = Table.grid(padding=(0, 3, 0, 0))
            grid.add_column(no_wrap=True)
            # This column shrinks on a narrow terminal.
            grid.add_column(max_width=_BAR_WIDTH)
            grid.add_column(no_wrap=True, justify="right")
            grid.add_column(no_wrap=True)
            share = min(1.0, status.step / total)
            grid.add_row(
                step.append(f" of {total:,}", style="dim"),
                ProgressBar(total=total, completed=status.step, complete_style="green"),
                f"{math.floor(100 * share)} %",
                Text(_left(status), style="dim"),
            )
            lines.append(grid)
        else:
            lines.append(step)
    figures = _figures(status)
    if figures:
        lines.append(_line("   ".join(figures)))
    if status.index_step is not None:
        lines.append(_line(_index(status)))
    return Group(*lines) if lines else _line("no step yet", style="dim")


def _figures(status: RunStatus) -> list[str]:
    is_slow = (status.steps_per_second or 0) < 1
    values = {
        "loss {:.3f}": status.loss,
        "utility {:+.3f} nats": status.retrieval_utility,
        "{:.2f} steps/s" if is_slow else "{:,.1f} steps/s": status.steps_per_second,
        "{:,.0f} examples/s": status.examples_per_second,
    }
    return [text.format(v) for text, v in values.items() if v is not None]


def _left(status: RunStatus) -> str:
    """Returns the time for the remaining steps at the present speed."""
    trains = any(role.state == RoleState.RUNNING for role in status.roles[:1])
    speed, step, total = status.steps_per_second, status.step, status.total_steps
    if not trains or not speed or step is None or total is None or step >= total:
        return ""
    return f"{duration((total - step) / speed)} left"


def _index(status: RunStatus) -> str:
    age = []
    if status.index_age_steps is not None:
        age.append(f"{status.index_age_steps:,} steps")
    if status.index_age_seconds is not None:
        age.append(duration(status.index_age_seconds))
    said = f"index of step {status.index_step:,}"
    return f"{said}, {' and '.join(age)} old" if age else said


class _Roles:
    """Renders one row per role, with as many columns as the terminal has room for."""

    def __init__(self, status: RunStatus):
        self._status = status

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        status = self._status
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        columns = [
            one for one in self._columns() if one.least_width <= options.max_width
        ]
        for column in columns:
            table.add_column(
                column.name, justify=column.justify, no_wrap=column.name != ""
            )
        for role in status.roles:
            table.add_row(*(column.cell(role) for column in columns))
        yield table

    def _columns(self) -> list["_Column"]:
        status = self._status
        columns = [
            _Column("role", lambda role: Text(role.name, style="bold"), "left"),
            _Column("state", lambda role: _stated(role.state), "left"),
            _Column("for", lambda role: _since(role, status.time), least_width=50),
            _Column(
                "attempt", lambda role: _count(role.attempt or None), least_width=60
            ),
            _Column("step", lambda role: _count(role.step)),
        ]
        if any(role.cost is not None for role in status.roles):
            columns.append(_Column(status.currency, _money, least_width=40))
        return [*columns, _Column("", _doing, "left", least_width=60)]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the roles, shown if the terminal has at least `least_width`."""

    name: str
    cell: Callable[[RoleStatus], RenderableType]
    justify: JustifyMethod = "right"
    least_width: int = 0


def _stated(state: str) -> Text:
    return Text(state, style=_STYLES[RoleState(state)])


def _count(number: int | None) -> Text:
    return _NOTHING if number is None else Text(f"{number:,}")


def _money(role: RoleStatus) -> Text:
    return _NOTHING if role.cost is None else Text(f"{role.cost:,.2f}")


def _since(role: RoleStatus, now: float) -> Text:
    """Renders the time since the slices changed state or became active."""
    is_there = role.active_since is not None and role.slices in ("", "ACTIVE")
    since = role.active_since if is_there else role.slices_since
    return _NOTHING if since is None else Text(duration(max(0.0, now - since)))


def _doing(role: RoleStatus) -> Text:
    """Renders the activity of a role, or the reason why it has none."""
    if role.share is not None and role.blocks_done is not None:
        blocks = f"{_short(role.blocks_done)} of {_short(role.num_blocks)}"
        return _line(f"embeds {math.floor(100 * role.share)} %: {blocks}")
    if role.activity == "waiting":
        return _line("waits for a newer retriever", style="dim")
    if role.state in (RoleState.QUEUED, RoleState.STARTING, RoleState.LOST):
        return _line(role.slices if role.slices != "ACTIVE" else "", style="dim")
    if role.state == RoleState.WAITING:
        return _line(role.ended_reason, style="dim")
    states = [worker.state for worker in role.workers]
    at_work = sum(state == role.state for state in states)
    noun = "worker" if len(states) == 1 else "workers"
    if not at_work or role.state in (RoleState.DONE, RoleState.STOPPED):
        return Text("")
    count = f"{at_work} of " if at_work < len(states) else ""
    return _line(f"{count}{len(states)} {noun}", style="dim")


def _short(number: int | None) -> str:
    """Returns a count of blocks, abbreviated from 100,000 on; "-" for None."""
    if number is None or number < 100_000:
        return "-" if number is None else f"{number:,}"
    return f"{number / 1e6:.1f} M" if number >= 1_000_000 else f"{number / 1e3:.0f} k"


def _troubles(roles: Sequence[RoleStatus]) -> list[RenderableType]:
    """Renders the workers with problems, and the reasons of earlier attempts' ends."""
    grid, found, reasons = _grid(4), False, []
    for role in roles:
        if role.state in (RoleState.DONE, RoleState.WAITING):
            continue
        workers = [one for one in role.workers if _is_in_trouble(one, role.state)]
        for worker in workers[:_MOST_WORKERS]:
            found = True
            grid.add_row(
                Text(f"{role.name}/{worker.number}"),
                _stated(worker.state),
                _silence(worker),
                _line(_said(worker)),
            )
        if len(workers) > _MOST_WORKERS:
            grid.add_row(Text(f"and {len(workers) - _MOST_WORKERS} more", style="dim"))
        if role.num_attempts > 1 and role.ended_reason and role.slices:
            last = _line(f"{role.name} before: {role.ended_reason}", style="dim")
            reasons.append(last)
    shown = [grid, *reasons] if found else reasons
    return ["", *shown] if shown else []


def _is_in_trouble(worker: WorkerStatus, role: RoleState) -> bool:
    if worker.state == RoleState.DONE:
        return False
    if worker.state in (RoleState.RUNNING, RoleState.STARTING):
        # Workers stop reporting when their slices are gone.
        is_over = role in (RoleState.STOPPED, RoleState.FAILED)
        return worker.silent_seconds > _LATE_SECONDS and not is_over
    return True


def _silence(worker: WorkerStatus) -> Text:
    late = worker.silent_seconds > _LATE_SECONDS
    said = f"{duration(worker.silent_seconds)} ago"
    return Text(said, style="bold red" if late else "dim")


def _said(worker: WorkerStatus) -> str:
    if worker.message:
        return worker.message
    if worker.exit_code is not None:
        return f"code {worker.exit_code}"
    return "says nothing" if worker.silent_seconds > _LATE_SECONDS else ""


def _launcher(status: RunStatus) -> list[RenderableType]:
    launcher = status.launcher
    if launcher is None:
        return []
    who = f"{launcher.host}, process {launcher.process}"
    if launcher.ended is None:
        age = duration(max(0.0, status.time - launcher.time))
        return [_line(f"launched from {who}, {age} ago", style="dim")]
    age = duration(max(0.0, status.time - launcher.ended))
    is_done = all(role.state == RoleState.DONE for role in status.roles)
    text = f"launcher ended {age} ago ({who}): {launcher.reason}"
    return [_line(text, style="dim" if is_done else "bold red")]


def _costs(status: RunStatus) -> list[RenderableType]:
    if status.cost is None:
        return []
    cost = _line("")
    cost.append(f"{status.cost:,.2f} {status.currency}", style="bold")
    return [cost.append(" so far, at prices on demand", style="dim")]


def _grid(columns: int) -> Table:
    grid = Table.grid(padding=(0, 3, 0, 0))
    for number in range(columns):
        # The last column shrinks on a narrow terminal: its cells do not wrap.
        grid.add_column(no_wrap=number < columns - 1)
    return grid


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _plain(value: Any) -> Any:
    """Replaces values that JSON cannot represent, such as NaN, by None."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
