"""Runs a chain of stages as processes on this machine, the index builder beside them.

Each stage is the `realm` command a person would type. A stage that was done says so and
ends; one that was interrupted goes on, so the chain is resumed by running it again.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console

from realm_jax.errors import BadInputError

_BAD_INPUT = 2
_BUILDER = "build-index"
# How long a process may take to save what it has after it was asked to stop.
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2
_BUILDER_RESTARTS = 3


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of a chain.

    Attributes:
      command: of `realm`, such as "pretrain".
      gin_files: given with --gin_file, before the chain's own files.
      bindings: given with --gin., such as 'MODEL_DIR="runs/x/pretrain"'.
      beside: "build-index", which then runs as a separate process until this one has
        ended and its last index is built; or "".
      beside_gin_files: as `gin_files`, for that command.
      beside_bindings: as `bindings`, for that command.
    """

    command: str
    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()
    beside: str = ""
    beside_gin_files: Sequence[str] = ()
    beside_bindings: Sequence[str] = ()

    def __post_init__(self):
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
        code = _run_stage(stage, chain.root, gin_files, stop, passed_on)
        if stop.is_set():
            console.print("stopped; run the same command again to go on")
            return 0
        if code not in (0, _BAD_INPUT):
            console.print(f"{stage.command} ended with code {code}; run this again")
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
) -> int:
    files = [*stage.gin_files, *gin_files]
    arguments = _arguments(stage.command, files, stage.bindings)
    main = subprocess.Popen([*arguments, *passed_on])
    beside = None
    try:
        if stage.beside:
            root_path = pathlib.Path(root)
            beside = _Builder(stage, gin_files, main.pid, root_path, passed_on)
        while main.poll() is None:
            failed = beside.check() if beside and not stop.is_set() else None
            if stop.is_set() or failed:
                _end(main)
            if failed:
                raise BadInputError(failed)
            stop.wait(_POLL_SECONDS)
        if beside and main.returncode == 0:
            beside.wait(stop)
        # Killed by a signal: the code that a shell would give.
        return main.returncode if main.returncode >= 0 else 128 - main.returncode
    finally:
        _end(main)
        if beside:
            beside.end()


class _Builder:
    """The index builder of a trainer; restarted if it crashes, for it resumes."""

    def __init__(
        self,
        stage: Stage,
        gin_files: Sequence[str],
        pid: int,
        root: pathlib.Path,
        passed_on: Sequence[str],
    ):
        files = [*stage.beside_gin_files, *gin_files]
        self._arguments = [
            *_arguments(stage.beside, files, stage.beside_bindings),
            *passed_on,
            f"--until_pid={pid}",
        ]
        self._log = root / f"{stage.beside}.log"
        self._restarts = 0
        root.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._start()

    def check(self) -> str | None:
        """Restarts the process if it crashed; says why it cannot go on, if so."""
        code = self._process.poll()
        if not code:
            return None
        if code == _BAD_INPUT or self._restarts == _BUILDER_RESTARTS:
            lines = self._log.read_text().strip().splitlines()
            said = lines[-1].removeprefix("error: ") if lines else ""
            return f"{_BUILDER} ended with code {code}: {said} (see {self._log})"
        self._restarts += 1
        self._start()
        return None

    def wait(self, stop: threading.Event) -> None:
        """Lets it build the last index, after which it ends by itself."""
        while self._process.poll() is None and not stop.is_set():
            stop.wait(_POLL_SECONDS)

    def end(self) -> None:
        """Ends it at a safe point."""
        _end(self._process)

    def _start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._arguments, stdout=log, stderr=subprocess.STDOUT
            )


def _arguments(
    command: str, gin_files: Sequence[str], bindings: Sequence[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "realm_jax.cli.main", command),
        *(f"--gin_file={file}" for file in gin_files),
        *(f"--gin.{binding}" for binding in bindings),
    ]


def _end(process: subprocess.Popen) -> None:
    """Asks a process to stop and waits until it has saved; kills it if it hangs."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
