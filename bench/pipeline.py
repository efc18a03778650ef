"""Measures how much of a training run is not the compiled update, from a JAX profile.

    python -m bench.pipeline runs/quickstart --page docs/benchmarks.md

Trains anew with the settings that a finished run recorded, from its warm start and its
first index, in a folder that is dropped. A profile of the steady updates says when the
program of an update was executing: from the first to the last of its operations, which
carry the program's name and the number of the execution. What the training thread did
is told by the stopwatch's parts and by annotations that are put around a few functions
here. The same shares by the stopwatch, from `metrics.jsonl`, stand beside them.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.profile_trace import (
    BATCH,
    CANDIDATES,
    DONE_BY,
    MARK,
    METRICS,
    PLACING,
    Share,
    read_trace,
    shares,
)
from bench.tables import table
from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.training import finetune, loop, partitioning, pretrain
from realm_jax.training.candidate_search import DeviceSearch
from realm_jax.training.stage import Report, Stage
from realm_jax.training.step_timing import Part

_ANNOTATED: Sequence[tuple[Any, str, str]] = (
    (Stage, "batch", BATCH),
    (DeviceSearch, "__call__", CANDIDATES),
    (finetune, "question_candidates", CANDIDATES),
    (finetune.AnswerLabels, "blocks", CANDIDATES),
    (finetune.AnswerLabels, "spans", CANDIDATES),
    (partitioning, "place_batch", PLACING),
    (loop.Loop, "log", METRICS),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A profiled run.

    Attributes:
      seconds: their wall time by the profile.
      executing: share in which an update executes.
      shares: by the names of `DONE_BY`; they sum to 1, and what is idle to the rest.
      stopwatch: shares of the stopwatch's parts, from `metrics.jsonl`.
    """

    updates: int
    seconds: float
    executing: float
    shares: Mapping[str, Share]
    stopwatch: Mapping[Part, float]

    def by_part(self) -> dict[Part, float]:
        """Returns the shares of the trace as the stopwatch divides the time."""
        found = {
            part: self.shares[part.value].thread
            for part in Part
            if part is not Part.HOST
        }
        return found | {Part.HOST: 1.0 - sum(found.values())}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A stage that can be measured.

    Attributes:
      starts_from: folder of the stage before.
      settings: settings that leave out what is no update.
      needs_builder: whether it waits for its first index, instead of making it.
    """

    config_class: type
    run: Callable[[Any, Report, threading.Event], bool]
    starts_from: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs_builder: bool = False


STAGES = {
    "pretrain": Trained(
        pretrain.PretrainConfig,
        pretrain.run,
        "warm_start",
        {"held_out_examples": 0, "questions": ""},
        needs_builder=True,
    ),
    "finetune": Trained(finetune.FinetuneConfig, finetune.run, "pretrain"),
}


class _Profile:
    """Profiles the updates between two lines of metrics, then has training stop.

    A line is written when all updates before it are finished, so a window that begins
    and ends with one holds whole updates, and the lines in it say of the same time what
    the stopwatch measured.
    """

    def __init__(self, folder: pathlib.Path, period: int, updates: int):
        # The first line holds the compiling, the second the start of the profiler.
        self.first, self.last = 2 * period, 2 * period + updates
        self.stop = threading.Event()
        self._folder, self._start = folder, period

    def report(
        self, step: int, total: int, values: Mapping[str, float], what: str = ""
    ) -> None:
        """See `Report`."""
        if what or not values:
            return
        if step == self._start:
            options = jax.profiler.ProfileOptions()
            # It would follow every call of every function, which takes its time.
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
        if step in (self.first, self.last):
            with jax.profiler.TraceAnnotation(MARK):
                pass
        if step == self.last:
            jax.profiler.stop_trace()
            self.stop.set()


def measure(run: pathlib.Path, name: str, updates: int) -> Measured:
    """Trains a stage of a finished run anew, and profiles some of its updates."""
    stage = STAGES[name]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = pathlib.Path(folder) / name
        config = _config(run, name, model_dir)
        period = config.log_period
        if updates % period:
            raise BadInputError(
                f"expected a number of updates that {name}'s LOG_PERIOD ({period}) "
                f"divides, got {updates}; change --updates"
            )
        profile = _Profile(pathlib.Path(folder) / "profile", period, updates)
        total = profile.last + period
        changes = {**stage.settings, **with_one_index(config, total)}
        if stage.needs_builder:
            copy_first_index(run / name, model_dir)
        with _annotations():
            stage.run(
                dataclasses.replace(config, **changes), profile.report, profile.stop
            )
        [path] = profile._folder.rglob("*.xplane.pb")
        trace = read_trace(path)
        lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    executing, found = shares(trace)
    return Measured(
        updates,
        (trace.window.end - trace.window.start) / 1e9,
        executing,
        found,
        stopwatch_shares(
            [r for r in records if profile.first < r["step"] <= profile.last]
        ),
    )


def with_one_index(config: Any, updates: int) -> dict[str, Any]:
    """Returns the changes that have a stage run so long with its first index alone."""
    changes: dict[str, Any] = {"train_steps": updates}
    if hasattr(config, "refresh_period"):
        changes["refresh_period"] = updates
    if hasattr(config, "max_staleness_steps"):
        changes["max_staleness_steps"] = None
    return changes


def stopwatch_shares(records: Sequence[Mapping[str, float]]) -> dict[Part, float]:
    """Returns the shares of the stopwatch's parts, in lines of as many steps each."""
    seconds = {
        part: sum(record[f"{part.value}_seconds"] for record in records)
        for part in Part
    }
    total = sum(seconds.values())
    return {part: spent / total for part, spent in seconds.items()}


def _config(run: pathlib.Path, name: str, model_dir: pathlib.Path) -> Any:
    recorded = run / name / "settings" / f"{name}-0001.json"
    if not recorded.exists():
        raise BadInputError(
            f"expected the settings of {name} in {recorded}, got none; finish the run "
            "first, as `make quickstart` does"
        )
    arguments = json.loads(recorded.read_text())["arguments"]
    places = {
        "MODEL_DIR": model_dir,
        "CORPUS": run / "corpus",
        "WARM_START": run / STAGES[name].starts_from,
    }
    kept = [word for word in arguments if word.split("=")[0][6:] not in places]
    # A launched process has a copy of the gin files in a folder of its own.
    files = [
        f"--gin_file=gin/{word.rpartition('/gin/')[2].removeprefix('--gin_file=gin/')}"
        if word.startswith("--gin_file=")
        else word
        for word in kept
    ]
    parser = configuration.make_parser(f"realm {name}", None)
    given = [f"--gin.{macro}={place}" for macro, place in places.items()]
    configuration.parse(parser, [*files, *given], name)
    return configuration.configured(STAGES[name].config_class)


def copy_first_index(stage: pathlib.Path, model_dir: pathlib.Path) -> None:
    """Copies the index that a stage started with: it has these very parameters."""
    commit = stage / "index" / "commits" / "0.json"
    if not commit.exists():
        raise BadInputError(
            f"expected the first index of the run at {commit}, got none; finish the "
            "run first, as `make quickstart` does"
        )
    for data in (stage / "index" / "data").glob("0-*"):
        shutil.copytree(data, model_dir / "index" / "data" / data.name)
    # Last, as a builder does it: an interrupted copy is no index.
    (model_dir / "index" / "commits").mkdir(parents=True)
    shutil.copy(commit, model_dir / "index" / "commits")


@contextlib.contextmanager
def _annotations() -> Iterator[None]:
    """Marks in a profile what the training thread does, finer than the stopwatch."""
    with contextlib.ExitStack() as stack:
        for owner, name, label in _ANNOTATED:
            marked = _annotated(getattr(owner, name), label)
            stack.enter_context(mock.patch.object(owner, name, marked))
        yield


def _annotated(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with jax.profiler.TraceAnnotation(label):
            return function(*arguments, **named)

    return call


def markdown(measured: Mapping[str, Measured], command: str) -> str:
    """Returns the tables with their command, machine and date."""
    stages = list(measured)
    heads = ["the training thread"]
    heads += [
        f"{stage}: {what}"
        for stage in stages
        for what in ("of the time", "and no update executes")
    ]
    lines = [
        [
            said,
            *(
                f"{share:.2%}"
                for stage in stages
                for share in measured[stage].shares[name]
            ),
        ]
        for name, said in DONE_BY.items()
    ]
    sums = [
        f"{value:.2%}" for m in measured.values() for value in (1.0, 1.0 - m.executing)
    ]
    lines.append(["together", *sums])
    parts = [
        [
            part.value,
            *(
                f"{share[part]:.2%}"
                for m in measured.values()
                for share in (m.by_part(), m.stopwatch)
            ),
        ]
        for part in Part
    ]
    speeds = "; ".join(
        f"{stage}: {m.updates} updates, {m.seconds / m.updates:.2f} s each, "
        f"{m.executing:.1%} of the time within the compiled update"
        for stage, m in measured.items()
    )
    by = [
        "part",
        *(f"{stage}, {who}" for stage in stages for who in ("profile", "stopwatch")),
    ]
    return (
        f"    {command}\n\n{machine()}, {today()}; {speeds}.\n\n"
        f"{table(heads, lines)}\n\n{table(by, parts)}\n"
    )


def main() -> None:
    """Measures, and prints the tables."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("run", type=pathlib.Path, help="a finished chain")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="pre-training, 5 updates")
    flags = parser.parse_args()
    if flags.quick:
        flags.stages, flags.updates = ["pretrain"], 5
    with reporting("pipeline", flags):
        measured = {}
        for name in flags.stages:
            measured[name] = measure(flags.run, name, flags.updates)
            print(f"{name}: {measured[name]}", flush=True)
        text = markdown(measured, command_line("pipeline", {"RUN": flags.run}))
        executing = {n: {"executing": m.executing} for n, m in measured.items()}
        publish("pipeline", text, executing, flags)


if __name__ == "__main__":
    main()
