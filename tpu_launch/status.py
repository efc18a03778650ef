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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError, NotReadyError, StoppedError
from realm_jax.index.heartbeat import JobStatus
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import records
from tpu_launch.planner.figures import duration
from tpu_launch.records import TPU_VM, LaunchRecord, Outcome
from tpu_launch.run import BUILDER, TRAINER, EngineState

# Polling a bucket and an engine takes several requests.
_SECONDS, _LOCAL_SECONDS, _LINE_SECONDS = 15.0, 1.0, 30.0
_POLL_SECONDS = 0.2
# Age of a heartbeat from which on a job is silent; they are repeated every minute.
_LATE_SECONDS = 180.0
# States of an engine from which on nothing happens.
_ENDED = ("Completed", "Failed")
_STOPPED = "stopped looking; the run goes on"
_STYLES = {"running": "green", "done": "bold green", "failed": "bold red"}
_METRICS = {
    "loss": "loss {:.3f}",
    "retrieval_utility": "utility {:+.3f} nats",
    "examples_per_second": "{:,.0f} examples/s",
    "steps_per_second": "{:,.3g} steps/s",
}


Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class RoleStatus:
    """Status of a role, as docs/pods.md has it; None or "" where it is not known."""

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
    """Status of a run, as docs/pods.md has it; None where it is not known."""

    run: str
    backend: str
    model_dir: str
    time: float
    launched: float
    deadline: float | None
    is_over: bool
    roles: tuple[RoleStatus, ...]
    total_steps: int | None
    metrics: Mapping[str, float | None]
    index_step: int | None
    index_age_steps: int | None
    engine: tuple[EngineState, ...] = ()
    engine_error: str = ""


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0."""
    parser = configuration.make_parser("python -m tpu_launch status", __doc__)
    parser.add_argument("--once", action="store_true", help="print it and end")
    parser.add_argument(
        "--json", action="store_true", help="once, as one object in plain units"
    )
    flags, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    console, store = Console(), open_store(model_dir)

    def look() -> RunStatus:
        return _with_engine(read_status(store, time.time()), records.read_record(store))

    status = unless_stopped(look, stop, _STOPPED)
    if flags.json:
        print(json.dumps(dataclasses.asdict(status), indent=1, allow_nan=False))
    elif flags.once or not console.is_terminal:
        console.print(render(status))
    else:
        _watch(look, status, stop, console)
    return 0


def unless_stopped(
    call: Callable[[], Answer], stop: threading.Event, message: str
) -> Answer:
    """Returns the result of a call that cannot be interrupted, unless asked to stop.

    The call, of a compiler or of a store that does not respond, then goes on in its own
    thread, and the error has the message.
    """
    future = ThreadPoolExecutor(1).submit(call)
    while not wait([future], _POLL_SECONDS).done:
        if stop.is_set():
            raise StoppedError(message)
    return future.result()


def read_status(store: Store, now: float) -> RunStatus:
    """Returns the status of a run at a time by its model directory alone."""
    record = records.read_record(store)
    ended, line = records.outcomes(store), _last_line(store)
    beats = {name: records.heartbeat(store, name) for name in record.roles}
    roles = tuple(
        _role(name, record, ended.get(name), beats[name], now) for name in record.roles
    )
    trainer = beats.get(TRAINER)
    index = _whole(trainer.extra if trainer else line, "index_step")
    step = roles[0].step
    if step is None:
        step = _whole(line, "step")
        roles = (dataclasses.replace(roles[0], step=step), *roles[1:])
    return RunStatus(
        record.id,
        record.backend,
        store.url(),
        now,
        record.time,
        record.deadline,
        records.is_over(ended),
        roles,
        record.total_steps,
        {name: _real(line, name) for name in _METRICS},
        index,
        None if step is None or index is None else max(0, step - index),
    )


def _with_engine(status: RunStatus, record: LaunchRecord) -> RunStatus:
    """Returns a status with what the engine of the run says, if it can be asked."""
    try:
        engine = record.engine()
        if engine is None:
            return status
        found = engine.state(record.id)
    except (BadInputError, NotReadyError) as error:
        return dataclasses.replace(status, engine_error=str(error))
    has_ended = all(one.state.startswith(_ENDED) for one in found)
    if not found:
        # An engine forgets a run some hours after its end.
        has_ended = status.roles[0].state == "done"
    return dataclasses.replace(
        status, engine=tuple(found), is_over=status.is_over or has_ended
    )


def _role(
    name: str,
    record: LaunchRecord,
    ended: Outcome | None,
    beat: JobStatus | None,
    now: float,
) -> RoleStatus:
    known: dict[str, Any] = {"state": "starting"}
    # The heartbeat of an earlier launch says nothing of this one.
    if beat is not None and beat.time >= record.time:
        since = max(0.0, now - beat.time)
        state = "silent" if since > _LATE_SECONDS else "running"
        state = {"finished": "done", "failed": "failed"}.get(beat.state, state)
        known = {"state": state, "since": since, "step": beat.step}
        if name == BUILDER and not ended:
            known["activity"] = str(beat.extra.get("activity", ""))
            for count in ("blocks_done", "num_blocks"):
                known[count] = _whole(beat.extra, count)
    if ended is not None:
        known["state"] = "done" if ended.done else "failed"
        known["message"] = ended.message
    return RoleStatus(name, record.roles[name], **known)


def _last_line(store: Store) -> Mapping[str, Any]:
    """Returns the last line of the metrics, {} if there is none."""
    with contextlib.suppress(BadInputError):
        last = collections.deque(read_metrics(store.url()), maxlen=1)
        return last[0] if last else {}
    return {}


def _real(found: Mapping[str, Any], name: str) -> float | None:
    value: Any = found.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _whole(found: Mapping[str, Any], name: str) -> int | None:
    value = _real(found, name)
    return None if value is None else int(value)


def render(status: RunStatus) -> RenderableType:
    """Returns a terminal view of a run, in which no line is ever wrapped."""
    title = _line(f"{status.run}   {status.model_dir}", "bold")
    parts: list[RenderableType] = [title, *map(_line, _training(status)), ""]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "machines", "state", "last word", "step", ""):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for role in status.roles:
        table.add_row(
            Text(role.name, "bold"),
            role.machines,
            Text(role.state, _STYLES.get(role.state, "yellow")),
            "-" if role.since is None else f"{duration(role.since)} ago",
            "-" if role.step is None else f"{role.step:,}",
            _line(_doing(role), "dim"),
        )
    parts.append(table)
    parts += [
        _line(f"{role.name}: {role.message}", "bold red")
        for role in status.roles
        if role.message
    ]
    parts += [
        _line(f"{one.name}   {one.state}   {one.message}") for one in status.engine
    ]
    if status.engine_error:
        parts.append(_line(f"{status.backend}: {status.engine_error}", "yellow"))
    if status.deadline is not None and status.backend == TPU_VM:
        left = status.deadline - status.time
        said = f"in {duration(left)}" if left > 0 else "passed"
        parts.append(_line(f"deadline {said}", "dim"))
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def in_one_line(status: RunStatus) -> str:
    """Returns how far trainer and builder are, for a log."""
    roles = [f"{role.name} {_doing(role) or role.state}" for role in status.roles]
    return "   ".join([*_training(status), *roles])


def _training(status: RunStatus) -> Iterator[str]:
    """Yields the progress of the training, its metrics, and the age of its index."""
    step, total = status.roles[0].step, status.total_steps
    if step is None:
        yield "no step yet"
        return
    speed = status.metrics.get("steps_per_second")
    progress = f"step {step:,}"
    if total:
        progress += f" of {total:,}, {math.floor(100 * min(1.0, step / total))} %"
        if speed and step < total and status.roles[0].state == "running":
            progress += f", {duration((total - step) / speed)} left"
    yield progress
    known = {name: value for name, value in status.metrics.items() if value is not None}
    if known:
        yield "   ".join(_METRICS[name].format(value) for name, value in known.items())
    if status.index_step is not None:
        age = status.index_age_steps
        old = "" if age is None else f", {age:,} steps old"
        yield f"index of step {status.index_step:,}{old}"


def _doing(role: RoleStatus) -> str:
    done, total = role.blocks_done, role.num_blocks
    if role.activity == "embedding" and done is not None and total:
        share = math.floor(100 * min(1.0, done / total))
        return f"embeds {share} %: {done:,} of {total:,}"
    return "waits for a newer retriever" if role.activity == "waiting" else ""


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


def show_until(ended: Callable[[float], bool], store: Store, console: Console) -> None:
    """Shows a local run's status until it has ended, below what else is printed.

    A terminal has a table that is kept up to date, anything else a line every half a
    minute. `ended` waits for some seconds, and returns whether the run has ended.
    """
    seconds = _SECONDS if "://" in store.url() else _LOCAL_SECONDS
    # Transient, because the outcome is printed in words at the end.
    live = Live(console=console, auto_refresh=False, transient=True)
    with live if console.is_terminal else contextlib.nullcontext():
        while not ended(seconds if console.is_terminal else _LINE_SECONDS):
            # Whatever cannot be shown: the run goes on.
            with contextlib.suppress(Exception):
                status = read_status(store, time.time())
                if console.is_terminal:
                    live.update(render(status), refresh=True)
                else:
                    text = in_one_line(status)
                    console.print(text, highlight=False, markup=False, soft_wrap=True)
