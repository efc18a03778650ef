"""Runs a chain of stages on this machine, with the index builder beside them.

Each stage is a `realm` command as on a command line. A stage of a single process keeps
the terminal. A stage of several, or with a builder beside it, is launched as `up`
launches a run: bundle, startup script, supervisor, with local processes in place of TPU
slices. A stage that was already done says so and ends; an interrupted one resumes, so
the chain is resumed by running it again.
"""

import contextlib
import hashlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil
from rich.console import Console

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.hardware import LaunchConfig
from realm_jax.storage import UnavailableStoreError, open_store
from tpu_launch import messages, operations, slices, worker_state
from tpu_launch.attempts import TakenOverError
from tpu_launch.backends.local import (
    TOKEN,
    LocalBackend,
    compiled_programs,
    environment,
    processes_of,
    site,
)
from tpu_launch.bundle import CODE, Bundle, find_gin_file, make_bundle, path_in
from tpu_launch.chain import Chain, ChainCommands, Stage
from tpu_launch.clock import SystemClock
from tpu_launch.deleting import GaveUpError
from tpu_launch.job import BUILDER, TRAINER, Job, Role, run_id
from tpu_launch.reconcile import Reconciler
from tpu_launch.stage_configs import stage_config
from tpu_launch.watching.status import LiveView
from tpu_launch.worker.command import shell_code

_GAVE_UP = 1
# Folder of launched stages below the root of a chain.
_FOLDER = "launched"
_HERE = "this machine"
_POLL_SECONDS = 0.2
_STOPPING_SECONDS = 60.0
# Nothing is paid by the hour here, and polling is cheap.
_LAUNCH = LaunchConfig(
    zone=_HERE,
    deadline_hours=24.0 * 365,
    backoff_seconds=1.0,
    max_backoff_seconds=30.0,
    startup_minutes=2.0,
    settling_seconds=0.0,
    poll_seconds=0.5,
    stalled_minutes=60.0 * 24 * 365,
)


class Runner:
    """Runs the stages of a chain; see `run`."""

    def __init__(
        self,
        chain: Chain,
        gin_files: Sequence[str],
        stop: threading.Event,
        passed_on: Sequence[str] = (),
    ):
        """Prepares to run a chain.

        Args:
          chain: the chain.
          gin_files: passed to every stage after its own.
          stop: set when the process is asked to stop; a stage that keeps the terminal
            is then asked too.
          passed_on: arguments passed to every stage that they have an effect on, after
            all others.

        Raises:
          BadInputError: settings of a stage are missing, unknown or malformed, or one
            of the arguments has an effect on no stage.
        """
        self._chain, self._stop = chain, stop
        self._commands = ChainCommands(chain, gin_files, passed_on)
        self._stages = self._commands.stages
        self._backend = LocalBackend(pathlib.Path(chain.root, _FOLDER))
        self._console = Console()

    def run(self) -> int:
        """Runs the chain; returns 0, or the exit code of the first stage that failed.

        Raises:
          BadInputError: a stage cannot be run, or refuses its input.
          StoppedError: asked to stop.
        """
        console, stages = self._console, self._stages
        started = time.monotonic()
        # One bundle for all stages, made first so that its errors precede any work.
        is_shipped = any(stage.is_launched for stage in stages)
        bundle = make_bundle(CODE) if is_shipped else None
        for number, stage in enumerate(stages, start=1):
            console.rule(f"{number}/{len(stages)} {stage.command}", align="left")
            if bundle and stage.is_launched:
                code = self._launch(stage, bundle)
            else:
                code = self._run_here(stage)
            if self._stop.is_set():
                console.print("stopped; run the same command again to go on")
                return 0
            if code:
                return code
        console.rule(f"done in {_minutes(time.monotonic() - started)}", align="left")
        return 0

    def describe(self) -> None:
        """Prints the commands and operations of `run`, without executing them."""
        bundle = make_bundle(CODE)
        for number, stage in enumerate(self._stages, start=1):
            print(f"# stage {number}: {stage.command}")
            if not stage.is_launched:
                print(shlex.join(self._here(stage)), end="\n\n")
                continue
            job = self._job(stage, bundle)
            ship = bundle.operation(job.model_dir)
            for operation in operations.launch(job, ship, time.time()):
                print(messages.described(operation, self._backend), end="\n\n")

    def _run_here(self, stage: Stage) -> int:
        self._end_leftovers()
        told = {
            **environment(0, 1, 0, stage.devices),
            **compiled_programs(pathlib.Path(self._chain.root, _FOLDER)),
            TOKEN: token_of(self._chain),
        }
        process = subprocess.Popen(self._here(stage), env={**os.environ, **told})
        try:
            while (code := process.poll()) is None:
                if self._stop.wait(_POLL_SECONDS):
                    process.terminate()
                    code = process.wait(_STOPPING_SECONDS)
                    break
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            process.kill()
            process.wait()
        code = shell_code(code)
        if code and not self._stop.is_set():
            # Bad input was already reported on this terminal.
            again = "" if code == worker_state.BAD_INPUT else "; run this again"
            self._say(f"{stage.command} ended with code {code}{again}")
        return code

    def _end_leftovers(self) -> None:
        """Ends processes of a killed launcher, so that no two train at once."""
        until = time.monotonic() + _STOPPING_SECONDS
        asked: set[psutil.Process] = set()
        while left := set(processes_of(token_of(self._chain))):
            is_late = time.monotonic() > until
            for process in left if is_late else left - asked:
                self._say(f"ending process {process.pid}, whose launcher is gone")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= left
            time.sleep(_POLL_SECONDS)

    def _launch(self, stage: Stage, bundle: Bundle) -> int:
        job, clock = self._job(stage, bundle), SystemClock(self._stop)
        try:
            store = open_store(job.model_dir)
            bundle.ship(store)
            for role in job.roles:
                # Repeated work finds out quickly whether there is more to do.
                worker_state.unmark(store, job.run, role.name)
            ship = bundle.operation(job.model_dir)
            loop = Reconciler(job, ship, self._backend, store, clock, self._say, {})
            with LiveView(store, job.run, self._console):
                loop.run()
        except (GaveUpError, TakenOverError, UnavailableStoreError) as error:
            self._say(str(error))
            return _GAVE_UP
        messages.summarize(job, store, "", self._say)
        return 0

    def _job(self, stage: Stage, bundle: Bundle) -> Job:
        """Returns the job of a stage, which is a separate run."""
        main = self._commands.main(stage)
        machines = f"{slices.LOCAL}-{stage.processes}x{stage.devices}"
        roles = [_role(TRAINER, machines, on_local_worker(main, CODE, bundle))]
        if stage.beside:
            machines = f"{slices.LOCAL}-{stage.beside_processes}x{stage.beside_devices}"
            beside = on_local_worker(self._commands.beside(stage), CODE, bundle)
            roles.append(_role(BUILDER, machines, beside))
        parser = configuration.make_parser(f"realm {stage.command}", None)
        configuration.parse(parser, main[1:], stage.command)
        config = stage_config(stage.command)
        model_dir = getattr(config, "model_dir", "")
        if not model_dir:
            raise BadInputError(
                f"expected a stage with a model directory, where processes meet, got "
                f"{stage.command}; run it as one process, with nothing beside it"
            )
        if "://" not in model_dir:
            model_dir = os.path.abspath(model_dir)
        run = run_id(stage.command, model_dir)
        total_steps = getattr(config, "train_steps", None)
        return Job(run, model_dir, tuple(roles), _LAUNCH, site(), total_steps)

    def _here(self, stage: Stage) -> list[str]:
        return [sys.executable, "-m", "realm_jax.cli.main", *self._commands.main(stage)]

    def _say(self, text: str) -> None:
        # The terminal may be gone, and what was launched is to be ended all the same.
        with contextlib.suppress(OSError):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def token_of(chain: Chain) -> str:
    """Returns the `TOKEN` of the stages of a chain that keep the terminal."""
    return hashlib.sha256(os.path.abspath(chain.root).encode()).hexdigest()


def _role(name: str, machines: str, arguments: Sequence[str]) -> Role:
    return Role(name, slices.parse(machines), 1, _HERE, _HERE, tuple(arguments))


def on_local_worker(
    arguments: Sequence[str], code: pathlib.Path, bundle: Bundle
) -> list[str]:
    """Returns arguments with gin files as a worker of this machine finds them.

    Those in the bundle are named by their path in it, others by their absolute path. A
    clone has gin files that are not in its bundle: git ignores runs/.

    Args:
      arguments: of a command, given in the working directory.
      code: folder of the packages.
      bundle: made of it.
    """
    flag = "--gin_file="
    found = []
    for argument in arguments:
        if argument.startswith(flag):
            file = argument.removeprefix(flag)
            name = path_in(code, file)
            if name not in bundle.names:
                name = os.path.abspath(find_gin_file(file) or file)
            argument = f"{flag}{name}"
        found.append(argument)
    return found


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
