"""Reads from a JAX profile when updates executed, and what training did meanwhile."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from realm_jax.errors import BadInputError
from realm_jax.training.step_timing import Part

# The programs of `training.step.make_step`, as XLA names them; on a CPU the last two.
_UPDATE = ("jit_step", "jit_differentiate", "jit_update")
MARK = "bench.pipeline"
BATCH, CANDIDATES, PLACING, METRICS = "batch", "candidates", "placing", "metrics"
OTHER = "other"
DONE_BY = {
    Part.DEVICE.value: "hands updates over, and waits for them",
    Part.SEARCH.value: "searches outside of the update",
    CANDIDATES: "lays out candidates",
    BATCH: "reads the batch",
    PLACING: "places inputs on the devices",
    METRICS: "writes metrics",
    Part.CHECKPOINT.value: "saves a checkpoint",
    Part.SWAP.value: "takes or measures an index",
    OTHER: "all else",
}
"""What the training thread does, by the name of an annotation."""


class Interval(NamedTuple):
    """A time in which something went on; nanoseconds."""

    start: float
    end: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a profile says of the time between two marks.

    Attributes:
      executions: executions of the update, as far as they lie in it.
      activities: what the training thread did; nested ones lie within others.
    """

    window: Interval
    executions: Sequence[Interval]
    activities: Sequence[Interval]


class Share(NamedTuple):
    """Shares of the wall time: of an activity, and of it while no update executes."""

    thread: float
    idle: float


def read_trace(path: pathlib.Path, update: Sequence[str] = _UPDATE) -> Trace:
    """Reads a profile with two marks, an .xplane.pb file.

    `update` are the names of the programs of an update.
    """
    profile = jax.profiler.ProfileData.from_file(str(path))
    runs: dict[tuple[Any, Any], Interval] = {}
    marks, activities = [], []
    for line in (line for plane in profile.planes for line in plane.lines):
        of_line = []
        for event in line.events:
            here = Interval(event.start_ns, event.start_ns + event.duration_ns)
            if event.name == MARK or event.name in DONE_BY:
                of_line.append(here._replace(name=event.name))
                continue
            stats = dict(event.stats)
            if (program := stats.get("hlo_module")) in update:
                execution = program, stats["run_id"]
                run = runs.setdefault(execution, here)
                runs[execution] = Interval(
                    min(run.start, here.start), max(run.end, here.end)
                )
        # Other threads have parts too, such as that of a search ahead.
        found = [interval.end for interval in of_line if interval.name == MARK]
        if found:
            marks, activities = found, of_line
    if len(marks) != 2:
        raise BadInputError(
            f"expected two marks in {path}, got {len(marks)}; trace again"
        )
    window = Interval(*sorted(marks))
    executions = _within(window, runs.values())
    if not executions:
        raise BadInputError(
            f"expected executions of {', '.join(update)} in {path}, got none; name the "
            "programs of an update"
        )
    inner = [each for each in activities if each.name != MARK]
    return Trace(window, executions, _within(window, inner))


def _within(window: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    cut = [
        each._replace(
            start=max(each.start, window.start), end=min(each.end, window.end)
        )
        for each in intervals
    ]
    return sorted(each for each in cut if each.start < each.end)


def shares(trace: Trace) -> tuple[float, dict[str, Share]]:
    """Returns the share in which an update executes, and those of each activity."""
    length = trace.window.end - trace.window.start
    busy = _union(trace.executions)
    edges = np.array([edge for each in busy for edge in each[:2]])
    # Every other gap between edges is one in which something executes.
    executes = (np.arange(len(edges) - 1) + 1) % 2
    done = np.concatenate([[0.0], np.cumsum(np.diff(edges) * executes)])

    def executing(start: float, end: float) -> float:
        before, after = np.interp([start, end], edges, done)
        return float(after - before)

    thread = dict.fromkeys(DONE_BY, 0.0)
    idle = dict.fromkeys(DONE_BY, 0.0)
    for start, end, name in innermost(trace):
        thread[name] += end - start
        idle[name] += end - start - executing(start, end)
    found = {name: Share(thread[name] / length, idle[name] / length) for name in thread}
    return executing(trace.window.start, trace.window.end) / length, found


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    union: list[Interval] = []
    for each in sorted(intervals):
        if union and each.start <= union[-1].end:
            union[-1] = Interval(union[-1].start, max(union[-1].end, each.end))
        else:
            union.append(each)
    return union


def innermost(trace: Trace) -> Iterator[Interval]:
    """Yields the innermost activity of every moment of the window, in order."""
    open_ones = [trace.window._replace(name=OTHER)]
    now = trace.window.start
    # Of two that begin together the longer one holds the other.
    for each in sorted(trace.activities, key=lambda each: (each.start, -each.end)):
        while open_ones[-1].end <= each.start:
            last = open_ones.pop()
            yield Interval(now, last.end, last.name)
            now = last.end
        yield Interval(now, each.start, open_ones[-1].name)
        now = each.start
        open_ones.append(each)
    for last in reversed(open_ones):
        yield Interval(now, last.end, last.name)
        now = last.end
