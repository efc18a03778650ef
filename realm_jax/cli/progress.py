"""Shows the progress of a stage: two live lines in a terminal, else log lines.

A log has a line at least every half a minute, whatever takes so long.

pretrain    ━━━━━━━━━━━━━━━╸━━━━━━━━━━  120/300  0:02:13 left  3.1 steps/s
  loss 4.214 utility +0.031 recall@5 0.410 index @80 (40 steps old)
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_LINE_SECONDS = 10.0
# A clock prints a line after so long without one: a single step can take minutes.
_SILENT_SECONDS = 30.0
_LOOK_SECONDS = 0.5
# The rest of the first line takes about 50 of the 80 columns of a small terminal.
_BAR_WIDTH = 26
_STARTING = "starting"
_STOPPING = "stopping at the next safe point ..."

_SPEED = {"steps_per_second": "{:.1f} steps/s"}
# Metric name -> its format, in the order in which those of a stage are shown.
_METRICS = {
    "loss": "loss {:.3f}",
    "in_batch_accuracy": "in-batch {:.2f}",
    "retrieval_utility": "utility {:+.3f}",
    "recall_at_5": "recall@5 {:.3f}",
    "index_step": "index @{:.0f}",
    "index_age_steps": "({:.0f} steps old)",
    "model_flops_utilization": "MFU {:.0%}",
}


class StageProgress:
    """Shows the progress of a stage; a context manager.

    Call it with (done, total, values) as often as needed; `values` are metrics by name,
    and the last value of each remains visible.
    """

    def __init__(
        self,
        stage: str,
        stop: threading.Event | None = None,
        console: Console | None = None,
    ):
        """Prepares the lines; the context shows them.

        Once `stop` is set, they say that the stage is about to stop. They are printed
        to standard output unless there is another console.
        """
        self._stage = stage
        self._stop = stop
        self._console = console or Console()
        self._values: dict[str, float] = {}
        self._what = _STARTING
        self._builder_share: float | None = None
        self._bar: _TwoLines | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()
        self._entered = self._started = time.monotonic()
        self._first_done = self._done = 0
        self._total: int | None = None
        self._before_first: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tell_silence, daemon=True)

    @property
    def is_starting(self) -> bool:
        """True until the first unit is counted."""
        return self._what == _STARTING

    def before_first(self, action: Callable[[], None]) -> None:
        """Has `action` run when work begins, before the first call shows anything."""
        self._before_first = action

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            self._bar = _TwoLines(self._second_line, self._console)
            self._task = self._bar.add_task(self._stage, total=None, speed="")
            self._bar.start()
        else:
            self._clock.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._ended.set()
        if self._clock.is_alive():
            self._clock.join()
        if self._bar is not None:
            self._bar.stop()

    def __call__(
        self,
        done: int,
        total: int | None,
        values: Mapping[str, float] | None = None,
        what: str = "",
    ) -> None:
        """Shows how many steps, blocks or others are done, of all (None if not known).

        `what` is what is being made, if a command makes several things.
        """
        if action := self._before_first:
            self._before_first = None
            action()
        self._values.update(values or {})
        if what != self._what:
            self._begin(what, done, total)
        self._done, self._total = done, total
        if self._bar is not None and self._task is not None:
            speed = _format(_SPEED, self._values)
            self._bar.update(self._task, completed=done, total=total, speed=speed)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or done == total:
            self._last_line = time.monotonic()
            self._print(self._line(done, total))

    def show_builder(self, share: float | None) -> None:
        """Shows the share of the next index that is built; None hides it."""
        self._builder_share = share
        if self._bar is not None or self._what != _STARTING or share is None:
            return
        if time.monotonic() - self._last_line >= _LINE_SECONDS:
            self.note(self._second_line())

    def note(self, text: str) -> None:
        """Prints a line above the live ones."""
        self._last_line = time.monotonic()
        self._print(f"{self._stage}: {text}")

    def _tell_silence(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - self._last_line < _SILENT_SECONDS:
                continue
            self._last_line = now
            since = now - self._entered
            line = f"{self._stage} {self._second_line()}"
            if not self.is_starting:
                line = self._line(self._done, self._total)
            self._print(f"{line}  {_clock(since)} so far")

    def _begin(self, what: str, done: int, total: int | None) -> None:
        """Restarts the count, because the speed so far was that of other work."""
        self._what = what
        self._started, self._first_done = time.monotonic(), done
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=total, completed=done)

    def _print(self, text: str) -> None:
        # Log lines are not wrapped, so that they can be searched.
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _second_line(self) -> str:
        if self._stop is not None and self._stop.is_set():
            return _STOPPING
        built = "" if self._builder_share is None else f"{self._builder_share:.0%}"
        if self._what == _STARTING and built:
            return f"waiting for the first index, {built} built"
        built = built and f"next {built}"
        parts = (self._what, _format(_METRICS, self._values), built)
        return " ".join(part for part in parts if part)

    def _line(self, done: int, total: int | None) -> str:
        count = f"{self._stage} {done:,}" + (f"/{total:,}" if total else "")
        speed = _format(_SPEED, self._values)
        parts = [count, " ".join(p for p in (speed, self._second_line()) if p)]
        new = done - self._first_done
        if total and new > 0 and done < total:
            left = (time.monotonic() - self._started) / new * (total - done)
            parts.append(f"{_clock(left)} left")
        return "  ".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    """Returns a duration as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _format(formats: Mapping[str, str], values: Mapping[str, float]) -> str:
    """Formats the metrics that exist, in the order of `formats`."""
    return " ".join(
        text.format(values[name]) for name, text in formats.items() if name in values
    )


class _TwoLines(Progress):
    """A bar with a line of text below; neither is wrapped."""

    def __init__(self, second_line, console: Console):
        # Set first, because the parent renders once during construction.
        self._second = second_line
        super().__init__(
            TextColumn("[bold]{task.description:<11}", table_column=_column()),
            BarColumn(bar_width=_BAR_WIDTH),
            _CountColumn(table_column=_column()),
            _LeftColumn(elapsed_when_finished=True, table_column=_column()),
            TextColumn("{task.fields[speed]}", table_column=_column()),
            console=console,
            refresh_per_second=4,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(
            f"  {self._second()}", style="cyan", no_wrap=True, overflow="ellipsis"
        )


class _CountColumn(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.completed:,.0f}" if task.completed else "")
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}")


class _LeftColumn(TimeRemainingColumn):
    """The remaining time, and at the end the elapsed time."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        word = "" if task.finished else " left"
        return Text.assemble(super().render(task), word)


def _column() -> Column:
    return Column(no_wrap=True, overflow="ellipsis")
