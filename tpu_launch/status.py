"""`python -m tpu_launch status`: shows how a run is.

Give it the flags of `up`, or --gin.MODEL_DIR=gs://my-bucket/my/pretrain alone. It
shows trainer and builder, step, loss and age of the index by what they say in the model
directory, and what the engine has of the run, until the run is over or Ctrl-C, which
ends the view but not the run. Where the output is not a terminal it prints them once.

Exit code 75: the model directory does not answer (--once).
"""

import collections
import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError, NotReadyError, StoppedError
from realm_jax.index.heartbeat import JobStatus
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import engines, records
from tpu_launch.cancellation import unless_stopped
from tpu_launch.records import TPU_VM, LaunchRecord, Outcome
from tpu_launch.run import BUILDER, TRAINER, EngineState

# Polling a bucket and an engine takes several requests.
_SECONDS, _LOCAL_SECONDS, _LINE_SECONDS = 15.0, 1.0, 30.0
# Age of a heartbeat from which on a job is silent; they are repeated every minute.
_LATE_SECONDS = 180.0
_BAR_WIDTH = 24
# States of an engine from which on nothing happens.
_ENDED = ("Completed", "Failed")
_STOPPED = "stopped looking; the run goes on"
_STYLES = {"running": "green", "done": "bold green", "failed": "bold red"}
_METRICS = ("loss", "retrieval_utility", "examples_per_second", "steps_per_second")


@dataclasses.dataclass(frozen=True)
class RoleStatus:
    """Status of a role; None or "" where a value is not known.

    Attributes:
      name: "trainer" or "builder".
      machines: its machines, in words.
      state: "starting" until its job says a word; then "running" or, after three
        minutes without one, "silent"; "done" or "failed" at the end.
      since: seconds since its last word.
      step: last known training step; of a builder, that of the retriever it embeds or
        embedded last.
      activity: of a builder, "embedding" or "waiting".
      blocks_done: number of embedded blocks of the index in progress.
      num_blocks: number of all its blocks.
      message: why it has failed.
    """

    name: str
    machines: str
    state: str
    since: float | None = None
    step: int | None = None
    activity: str = ""
    blocks_done: int | None = None
    num_blocks: int | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """Status of a run; None where a value is not known.

    Attributes:
      run: id of the run.
      backend: "gke", "tpu_vm" or "local".
      model_dir: its model directory.
      time: time of this status, in Unix seconds.
      launched: time of the launch, in Unix seconds.
      deadline: time at which everything is given back, in Unix seconds.
      is_over: whether its trainer is done, or a role has failed.
      roles: trainer and builder.
      engine: what the engine has of the run.
      engine_error: why that is not known, or "".
      total_steps: number of training steps of the whole run.
      metrics: loss, retrieval utility in nats, and examples and updates per second, by
        the last line of the metrics.
      index_step: step of the retriever that embedded the index in use.
      index_age_steps: age of that index in updates.
    """

    run: str
    backend: str
    model_dir: str
    time: float
    launched: float
    deadline: float | None
    is_over: bool
    roles: tuple[RoleStatus, ...]
    engine: tuple[EngineState, ...] = ()
    engine_error: str = ""
    total_steps: int | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    index_step: int | None = None
    index_age_steps: int | None = None


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0.

    Raises:
      BadInputError: no MODEL_DIR is given, or no run was launched there.
      UnavailableStoreError: the model directory does not answer.
      StoppedError: `stop` was set.
    """
    parser = configuration.make_parser("python -m tpu_launch status", __doc__)
    parser.add_argument("--once", action="store_true", help="print it and end")
    parser.add_argument(
        "--json", action="store_true", help="once, as one object in plain units"
    )
    flags, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    console, store = Console(), open_store(model_dir)

    def look() -> RunStatus:
        record = records.read_record(store)
        return with_engine(read_status(store, time.time()), record, store)

    status = unless_stopped(look, stop, _STOPPED)
    if flags.json:
        print(as_json(status))
    elif flags.once or not console.is_terminal:
        console.print(render(status))
    else:
        _watch(look, status, stop, console)
    return 0


def read_status(store: Store, now: float) -> RunStatus:
    """Returns the status of a run by its model directory alone.

    Args:
      store: the model directory.
      now: current time in Unix seconds.

    Raises:
      BadInputError: no run was launched there, or the directory cannot be read.
      UnavailableStoreError: the directory does not answer.
    """
    record = records.read_record(store)
    ended = records.outcomes(store)
    beats = {role: records.heartbeat(store, role) for role in record.roles}
    line = _last_line(store)
    roles = tuple(
        _role(name, machines, ended.get(name), beats[name], record, now)
        for name, machines in record.roles.items()
    )
    beat = beats.get(TRAINER)
    step = roles[0].step if roles else None
    index = _whole(beat.extra.get("index_step") if beat else line.get("index_step"))
    if step is None:
        step = _whole(line.get("step"))
        roles = (dataclasses.replace(roles[0], step=step), *roles[1:])
    return RunStatus(
        *(record.id, record.backend, store.url(), now, record.time, record.deadline),
        is_over=records.has_ended(store),
        roles=roles,
        total_steps=record.total_steps,
        metrics={name: _real(line.get(name)) for name in _METRICS},
        index_step=index,
        index_age_steps=None if step is None or index is None else max(0, step - index),
    )


def with_engine(status: RunStatus, record: LaunchRecord, store: Store) -> RunStatus:
    """Returns a status with what the engine of the run says, if it can be asked."""
    try:
        engine = engines.of_record(record, store)
        found = engine.state(record.id) if engine else []
    except (BadInputError, NotReadyError) as error:
        return dataclasses.replace(status, engine_error=str(error))
    has_ended = found and all(one.state.startswith(_ENDED) for one in found)
    return dataclasses.replace(
        status, engine=tuple(found), is_over=status.is_over or bool(has_ended)
    )


def _role(
    name: str,
    machines: str,
    ended: Outcome | None,
    beat: JobStatus | None,
    record: LaunchRecord,
    now: float,
) -> RoleStatus:
    # The heartbeat of an earlier launch says nothing of this one.
    if beat is not None and beat.time < record.time:
        beat = None
    since = None if beat is None else max(0.0, now - beat.time)
    status = RoleStatus(name, machines, "starting", since)
    if beat is not None:
        is_late = since is not None and since > _LATE_SECONDS
        state = {"finished": "done", "failed": "failed"}.get(
            beat.state, "silent" if is_late else "running"
        )
        status = dataclasses.replace(status, state=state, step=beat.step)
        if name == BUILDER and not ended:
            status = dataclasses.replace(
                status,
                activity=str(beat.extra.get("activity", "")),
                blocks_done=_whole(beat.extra.get("blocks_done")),
                num_blocks=_whole(beat.extra.get("num_blocks")),
            )
    if ended is not None:
        state = "done" if ended.done else "failed"
        status = dataclasses.replace(status, state=state, message=ended.message)
    return status


def _last_line(store: Store) -> Mapping[str, Any]:
    """Returns the last line of the metrics, {} if there is none."""
    with contextlib.suppress(BadInputError):
        last = collections.deque(read_metrics(store.url()), maxlen=1)
        return last[0] if last else {}
    return {}


def _real(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    number = _real(value)
    return None if number is None else int(number)


def as_json(status: RunStatus) -> str:
    """Returns the status as a JSON object, with null for unknown values."""
    return json.dumps(dataclasses.asdict(status), indent=1, allow_nan=False)


def render(status: RunStatus) -> RenderableType:
    """Returns a terminal view of a run, in which no line is ever wrapped."""
    title = Table.grid(padding=(0, 3, 0, 0))
    title.add_row(Text(status.run, "bold"), _line(status.model_dir, "dim"))
    parts: list[RenderableType] = [title, *_training(status), "", _roles(status)]
    parts += [
        _line(f"{role.name}: {role.message}", "bold red")
        for role in status.roles
        if role.message
    ]
    parts += ["", *_engine(status)] if status.engine or status.engine_error else []
    if status.deadline is not None and status.backend == TPU_VM:
        left = status.deadline - status.time
        said = f"in {duration(left)}" if left > 0 else "passed"
        parts += ["", _line(f"deadline {said}", "dim")]
    return Group(*parts)


def in_one_line(status: RunStatus) -> str:
    """Returns how far trainer and builder are, for a log."""
    parts = []
    trainer = status.roles[0]
    if trainer.step is not None:
        total = "" if status.total_steps is None else f"/{status.total_steps:,}"
        parts.append(f"step {trainer.step:,}{total}")
    if (loss := status.metrics.get("loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    if status.index_step is not None:
        parts.append(f"index @{status.index_step}")
    for role in status.roles:
        share = _share(role)
        done = "" if share is None else f" {share:.0%}"
        parts.append(f"{role.name} {role.activity or role.state}{done}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Returns a duration in seconds as readable text, in one unit."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{days:.1f} days"


def _training(status: RunStatus) -> list[RenderableType]:
    """Renders the progress of the training, its metrics, and the age of its index."""
    step, total = status.roles[0].step, status.total_steps
    if step is None:
        return [_line("no step yet", "dim")]
    lines: list[RenderableType] = []
    speed = status.metrics.get("steps_per_second")
    if total:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(no_wrap=True)
        # This column shrinks on a narrow terminal.
        grid.add_column(max_width=_BAR_WIDTH)
        goes_on = speed and step < total and status.roles[0].state == "running"
        left = f"{duration((total - step) / speed)} left" if goes_on and speed else ""
        grid.add_row(
            f"step {step:,} of {total:,}",
            ProgressBar(total=total, completed=step, complete_style="green"),
            f"{math.floor(100 * min(1.0, step / total))} %",
            Text(left, style="dim"),
        )
        lines.append(grid)
    else:
        lines.append(Text(f"step {step:,}"))
    is_slow = (speed or 0) < 1
    texts = {
        "loss": "loss {:.3f}",
        "retrieval_utility": "utility {:+.3f} nats",
        "steps_per_second": "{:.2f} steps/s" if is_slow else "{:,.1f} steps/s",
        "examples_per_second": "{:,.0f} examples/s",
    }
    figures = [
        text.format(value)
        for name, text in texts.items()
        if (value := status.metrics.get(name)) is not None
    ]
    lines += [_line("   ".join(figures))] if figures else []
    if status.index_step is not None:
        age = status.index_age_steps
        old = "" if age is None else f", {age:,} steps old"
        lines.append(_line(f"index of step {status.index_step:,}{old}"))
    return lines


def _roles(status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "machines", "state", "last word", "step", ""):
        right = "right" if name in ("last word", "step") else "left"
        table.add_column(name, justify=right, no_wrap=True, overflow="ellipsis")
    for role in status.roles:
        table.add_row(
            Text(role.name, "bold"),
            role.machines,
            Text(role.state, _STYLES.get(role.state, "yellow")),
            "-" if role.since is None else f"{duration(role.since)} ago",
            "-" if role.step is None else f"{role.step:,}",
            _line(_doing(role), "dim"),
        )
    return table


def _doing(role: RoleStatus) -> str:
    share = _share(role)
    if share is not None:
        done, blocks = _short(role.blocks_done), _short(role.num_blocks)
        return f"embeds {math.floor(100 * share)} %: {done} of {blocks}"
    return "waits for a newer retriever" if role.activity == "waiting" else ""


def _share(role: RoleStatus) -> float | None:
    """Returns the share of blocks that a builder has embedded, from 0 to 1."""
    if role.activity != "embedding" or role.blocks_done is None or not role.num_blocks:
        return None
    return min(1.0, role.blocks_done / role.num_blocks)


def _short(number: int | None) -> str:
    """Returns a count of blocks, abbreviated from 100,000 on; "-" for None."""
    if number is None or number < 100_000:
        return "-" if number is None else f"{number:,}"
    return f"{number / 1e6:.1f} M" if number >= 1_000_000 else f"{number / 1e3:.0f} k"


def _engine(status: RunStatus) -> list[RenderableType]:
    if status.engine_error:
        return [_line(f"{status.backend}: {status.engine_error}", "yellow")]
    grid = Table.grid(padding=(0, 3, 0, 0))
    for one in status.engine:
        grid.add_row(one.name, one.state, _line(one.message, "dim"))
    return [grid]


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _watch(
    look: Callable[[], RunStatus],
    status: RunStatus,
    stop: threading.Event,
    console: Console,
) -> None:
    """Shows the status of a run until it is over."""
    hint = _line(f"every {_SECONDS:.0f} s; Ctrl-C ends the view, not the run", "dim")
    with Live(console=console, auto_refresh=False) as live:
        shown = render(status)
        while not status.is_over:
            live.update(Group(shown, "", hint), refresh=True)
            if stop.wait(_SECONDS):
                raise StoppedError(_STOPPED)
            try:
                status = unless_stopped(look, stop, _STOPPED)
                shown = render(status)
            except UnavailableStoreError as error:
                problem = f"the model directory does not answer: {error}"
                shown = Group(render(status), _line(problem, "bold red"))
        live.update(render(status), refresh=True)


class LiveView(contextlib.ExitStack):
    """Context manager that shows a local run's status.

    A terminal has a table that is kept up to date, anything else a line every half a
    minute.
    """

    def __init__(self, store: Store, console: Console):
        """Prepares to show a run.

        Args:
          store: the model directory.
          console: the console that also prints other messages, above the view.
        """
        super().__init__()
        self._store, self._console = store, console
        self._ended = threading.Event()

    def __enter__(self) -> "LiveView":
        super().__enter__()
        seconds, show = _LINE_SECONDS, self._print
        if self._console.is_terminal:
            # Transient, because the outcome is printed in words at the end.
            live = Live(console=self._console, auto_refresh=False, transient=True)
            self.enter_context(live)
            is_bucket = "://" in self._store.url()
            seconds = _SECONDS if is_bucket else _LOCAL_SECONDS

            def show(status: RunStatus) -> None:
                live.update(render(status), refresh=True)

        arguments = (seconds, show)
        thread = threading.Thread(target=self._repeat, args=arguments, daemon=True)
        thread.start()
        self.callback(thread.join)
        self.callback(self._ended.set)
        return self

    def _repeat(self, seconds: float, show: Callable[[RunStatus], None]) -> None:
        while not self._ended.wait(seconds):
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                show(read_status(self._store, time.time()))

    def _print(self, status: RunStatus) -> None:
        text = in_one_line(status)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
