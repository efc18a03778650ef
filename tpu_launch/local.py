"""Runs a chain of stages as processes on this machine, the index builder beside them.

Each stage is the `realm` command a person would type. A stage that was done says so and
ends; one that was interrupted goes on, so the chain is resumed by running it again.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console

from realm_jax.errors import BadInputError
from tpu_launch import groups, progress

_BAD_INPUT = 2
_BUILDER = "build-index"
_POLL_SECONDS = 0.2
_RESTARTS = 3


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of a chain.

    Attributes:
      command: of `realm`, such as "pretrain".
      gin_files: given with --gin_file, before the chain's own files.
      bindings: given with --gin., such as 'MODEL_DIR="runs/x/pretrain"'.
      processes: how many run it together, as the hosts of a pod would.
      devices: simulated CPU devices of each process; with a single process and a single
        device it runs on the devices there are.
      restarts: how often in a row it starts again without having got further, if one
        of its processes dies; None: three times if there are several, else never.
      beside: "build-index", which then runs as a job of its own until this one has
        ended and its last index is built; or "".
      beside_gin_files: as `gin_files`, for that command.
      beside_bindings: as `bindings`, for that command.
      beside_processes: as `processes`, for that command.
      beside_devices: as `devices`, for that command.
    """

    command: str
    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()
    processes: int = 1
    devices: int = 1
    restarts: int | None = None
    beside: str = ""
    beside_gin_files: Sequence[str] = ()
    beside_bindings: Sequence[str] = ()
    beside_processes: int = 1
    beside_devices: int = 1

    def __post_init__(self):
        for name in ("processes", "devices", "beside_processes", "beside_devices"):
            if getattr(self, name) < 1:
                raise BadInputError(
                    f"expected {name} of {self.command} to be at least 1, got "
                    f"{getattr(self, name)}"
                )
        if self.beside not in ("", _BUILDER):
            raise BadInputError(
                f"expected {_BUILDER!r} or nothing beside {self.command}, got "
                f"{self.beside!r}"
            )


@dataclasses.dataclass(frozen=True)
class Chain:
    """Stages to run one after the other.

    Attributes:
      root: folder for logs; the stages' own folders are in their bindings.
      stages: in order.
    """

    root: str
    stages: Sequence[Stage]


def run(
    chain: Chain,
    gin_files: Sequence[str],
    stop: threading.Event,
    passed_on: Sequence[str] = (),
) -> int:
    """Runs a chain; returns 0, or the exit code of the first stage that failed.

    Args:
      chain: what to run.
      gin_files: given to every stage after its own.
      stop: set when the process was asked to stop; the stages then were asked too.
      passed_on: arguments given to every stage, after all others.
    """
    console = Console()
    started = time.monotonic()
    for number, stage in enumerate(chain.stages, start=1):
        console.rule(f"{number}/{len(chain.stages)} {stage.command}", align="left")
        code = _run_stage(stage, chain.root, gin_files, stop, passed_on, console)
        if stop.is_set():
            console.print("stopped; run the same command again to go on")
            return 0
        if code:
            return code
    console.rule(f"done in {_minutes(time.monotonic() - started)}", align="left")
    return 0


def _run_stage(
    stage: Stage,
    root: str,
    gin_files: Sequence[str],
    stop: threading.Event,
    passed_on: Sequence[str],
    console: Console,
) -> int:
    """Runs a stage and the command beside it to their end; returns its exit code.

    Raises:
      BadInputError: the command beside it cannot go on.
    """

    def say(what: str) -> None:
        console.print(what, highlight=False, markup=False, soft_wrap=True)

    job = _main_job(stage, pathlib.Path(root), gin_files, passed_on)
    with contextlib.ExitStack() as ending:
        main = groups.Group(job, say)
        ending.callback(main.end)
        lifeline = ending.enter_context(_Lifeline())
        beside = None
        if stage.beside:
            job = _beside_job(stage, job.root, gin_files, passed_on, lifeline.end)
            beside = groups.Group(job, say)
            ending.callback(beside.end)
        while (code := main.check()) is None:
            if beside and beside.check():
                raise BadInputError(beside.failure)
            if stop.wait(_POLL_SECONDS):
                return main.end()
        if beside and code == 0:
            lifeline.cut()
            # It builds the last index, and then ends by itself.
            while beside.check() is None and not stop.wait(_POLL_SECONDS):
                pass
        if main.failure:
            say(main.failure + ("" if code == _BAD_INPUT else "; run this again"))
        return code


class _Lifeline:
    """A pipe that is open as long as a stage goes on, however often it starts again.

    It breaks when the launcher dies, too, whatever kills it. A context manager.

    Attributes:
      end: what the command beside the stage reads from; it never gets anything but the
        end of the file.
    """

    def __init__(self):
        self.end, self._held = os.pipe()
        self._is_cut = False

    def cut(self) -> None:
        """Says that the stage is over."""
        if not self._is_cut:
            self._is_cut = True
            os.close(self._held)

    def __enter__(self) -> "_Lifeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        os.close(self.end)


def _main_job(
    stage: Stage,
    root: pathlib.Path,
    gin_files: Sequence[str],
    passed_on: Sequence[str],
) -> groups.Job:
    restarts = stage.restarts
    if restarts is None:
        restarts = _RESTARTS if stage.processes > 1 else 0
    files = [*stage.gin_files, *gin_files]
    return groups.Job(
        stage.command,
        [*_arguments(stage.command, files, stage.bindings), *passed_on],
        root,
        processes=stage.processes,
        devices=stage.devices,
        on_terminal=True,
        restarts=restarts,
        reached=lambda: progress.of_training([*stage.bindings, *passed_on]),
    )


def _beside_job(
    stage: Stage,
    root: pathlib.Path,
    gin_files: Sequence[str],
    passed_on: Sequence[str],
    lifeline: int,
) -> groups.Job:
    files = [*stage.beside_gin_files, *gin_files]
    arguments = _arguments(stage.beside, files, stage.beside_bindings)
    return groups.Job(
        stage.beside,
        [*arguments, *passed_on, "--until_eof"],
        root,
        processes=stage.beside_processes,
        devices=stage.beside_devices,
        restarts=_RESTARTS,
        reached=lambda: progress.of_building([*stage.beside_bindings, *passed_on]),
        stdin=lifeline,
    )


def _arguments(
    command: str, gin_files: Sequence[str], bindings: Sequence[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "realm_jax.cli.main", command),
        *(f"--gin_file={file}" for file in gin_files),
        *(f"--gin.{binding}" for binding in bindings),
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
