"""What a person sees while a stage runs: a bar in a terminal, else a line at times."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_LINE_SECONDS = 10.0

# Metric name -> how it is shown; in this order, those that a stage has.
_SHOWN = {
    "steps_per_second": "{:.1f} steps/s",
    "loss": "loss {:.3f}",
    "in_batch_accuracy": "in-batch {:.2f}",
    "retrieval_utility": "utility {:+.3f}",
    "recall_at_5": "recall@5 {:.3f}",
    "index_step": "index @{:.0f}",
    "index_age_steps": "({:.0f} steps old)",
}


class StageProgress:
    """Shows how far a stage is; a context manager.

    Call it with (done, total, values) as often as you like; `values` are metrics by
    name, and the last of each stays on show.
    """

    def __init__(self, stage: str, console: Console | None = None):
        self._stage = stage
        self._console = console or Console()
        self._values: dict[str, float] = {}
        self._what = ""
        self._bar: Progress | None = None
        self._task = None
        self._last_line = time.monotonic()
        self._started = time.monotonic()
        self._first_done: int | None = None

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description:<11}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                _ValuesColumn(),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(
        self,
        done: int,
        total: int | None,
        values: Mapping[str, float] | None = None,
        what: str = "",
    ) -> None:
        """Shows that `done` of `total` (None: not known yet) is done.

        Args:
          done: steps, blocks or whatever is counted.
          total: all of them.
          values: metrics by name.
          what: what is being made, where a command makes several things.
        """
        self._values.update(values or {})
        self._what = what
        if self._first_done is None:
            self._first_done = done
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._stage, total=total, shown="")
            self._bar.update(
                self._task, completed=done, total=total, shown=self._shown()
            )
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or done == total:
            self._last_line = time.monotonic()
            self._console.print(self._line(done, total), highlight=False)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        console = self._bar.console if self._bar is not None else self._console
        console.print(f"{self._stage}: {text}", highlight=False, markup=False)

    def _shown(self) -> str:
        return " ".join(part for part in (self._what, shown(self._values)) if part)

    def _line(self, done: int, total: int | None) -> str:
        parts = [f"{self._stage} {done}/{total or '?'}", self._shown()]
        new = done - (self._first_done or 0)
        if total and new > 0 and done < total:
            left = (time.monotonic() - self._started) / new * (total - done)
            parts.append(f"{left // 60:.0f}:{left % 60:02.0f} left")
        return "  ".join(part for part in parts if part)


def shown(values: Mapping[str, float]) -> str:
    """Formats the metrics that people watch, in a fixed order."""
    return " ".join(
        text.format(values[name]) for name, text in _SHOWN.items() if name in values
    )


class _ValuesColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["shown"], style="cyan")
