"""Runs a chain of stages on this machine, with the index builder beside them.

Each stage is a `realm` command as on a command line. A stage of a single process keeps
the terminal. A stage of several, or with a builder beside it, runs as processes with a
log each, which are started again when they fail (`roles.py`). A stage that was
already done says so and ends; an interrupted one resumes, so the chain is resumed by
running it again.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
from rich.console import Console

from realm_jax.cli import configuration
from realm_jax.errors import BAD_INPUT, BUG, BadInputError
from realm_jax.storage import Store, open_store
from tpu_launch import processes, records
from tpu_launch.chain import Chain, ChainCommands, Stage
from tpu_launch.planner.figures import duration
from tpu_launch.processes import Command, Pace
from tpu_launch.records import LOCAL, LaunchRecord
from tpu_launch.roles import Worker, errors_said
from tpu_launch.run import BUILDER, TRAINER, run_id
from tpu_launch.status import show_until

TOKEN = "REALM_LOCAL_TOKEN"
"""Environment variable that identifies a chain's processes, whatever their parent."""

# Folder of logs and compiled programs below the root of a chain.
_FOLDER = "launched"
_COMPILED = "compiled"
_LOCK = "lock"
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_POLL_SECONDS = 0.2
# The model directory may be a bucket.
_LOOK_SECONDS = 1.0
_PACE = Pace(backoff=1.0, longest_backoff=30.0, waiting=1.0, poll=0.1)
# At the same place; a process that dies by chance gets further.
_MAX_RESTARTS = 3


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs a chain of stages on this machine.

    The gin file binds `local.Chain` (see gin/runs/quickstart.gin) and is passed to
    every stage, as are --gin.BINDING=VALUE and --import_module. Ctrl-C stops all
    processes at a safe point; the same command resumes later.
    """
    parser = configuration.make_parser("python -m tpu_launch local", main.__doc__)
    parser.add_argument(
        "--dry_run", action="store_true", help="print what would be done; do nothing"
    )
    flags, _ = configuration.parse_chain(parser, argv)
    chain = configuration.configured(Chain)
    passed_on = [f"--gin.{binding}" for binding in flags.bindings]
    passed_on += [f"--import_module={module}" for module in flags.import_module]
    commands = ChainCommands(chain, flags.gin_file, passed_on)
    if not flags.dry_run:
        return Runner(chain, commands, stop).run()
    for number, stage in enumerate(commands.stages, start=1):
        print(f"# stage {number}: {stage.command}")
        for arguments in filter(
            None, (commands.main(stage), commands.companion(stage))
        ):
            print(shlex.join(_program(arguments)), end="\n\n")
    return 0


class Runner:
    """Runs the stages of a chain; see `run`."""

    def __init__(self, chain: Chain, commands: ChainCommands, stop: threading.Event):
        """Prepares to run a chain, until `stop` asks its processes to save and end."""
        self._commands, self._stop = commands, stop
        self._token = token_of(chain)
        self._folder = pathlib.Path(chain.root, _FOLDER).absolute()
        self._console = _Console()

    def run(self) -> int:
        """Runs the chain; returns 0, or the code of the first stage that failed."""
        with self._alone():
            return self._run_stages()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps a second launcher out, which would end the processes of this one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadInputError(
                    f"expected no other launcher of this chain, but one is at work in "
                    f"{self._folder.parent}; wait for its end, or stop it with Ctrl-C"
                ) from error
            yield

    def _run_stages(self) -> int:
        console, stages = self._console, self._commands.stages
        started = time.monotonic()
        for number, stage in enumerate(stages, start=1):
            console.rule(f"{number}/{len(stages)} {stage.command}", align="left")
            self._end_leftovers()
            code = self._launch(stage) if stage.is_launched else self._run_here(stage)
            if self._stop.is_set():
                console.print("stopped; run the same command again to go on")
                return 0
            if code:
                return code
        console.rule(f"done in {duration(time.monotonic() - started)}", align="left")
        return 0

    def _run_here(self, stage: Stage) -> int:
        command = Command(
            _program(self._commands.main(stage)),
            self._environment(environment_of(0, 1, 0, stage.devices)),
        )
        stop = self._stop
        code, was_asked = processes.run_once(
            [command], stop.is_set, stop, lambda text: None, _PACE
        )
        if code and not was_asked:
            # Bad input was already reported on this terminal.
            again = "" if code == BAD_INPUT else "; run this again"
            self._say(f"{stage.command} ended with code {code}{again}")
        return code

    def _launch(self, stage: Stage) -> int:
        """Runs a stage of several processes; returns its exit code."""
        config = self._commands.configure(stage)
        if not getattr(config, "model_dir", ""):
            raise BadInputError(
                f"expected a stage with a model directory, where processes meet, got "
                f"{stage.command}; run it as one process, with nothing beside it"
            )
        store = open_store(config.model_dir)
        before = records.find_record(store)
        if before is not None and before.backend != LOCAL and before.deadline:
            raise BadInputError(
                f"expected a MODEL_DIR of this machine, got that of {before.id}, which "
                f"was launched by {before.backend}; run `down` first"
            )
        run = run_id(stage.command, config.model_dir)
        logs = self._folder / run
        roles = self._roles(stage, logs)
        machines = {
            role: f"{len(commands)} process{'es' if len(commands) > 1 else ''}"
            for role, commands in roles.items()
        }
        records.forget_outcomes(store)
        record = LaunchRecord(
            run,
            LOCAL,
            machines,
            time.time(),
            total_steps=getattr(config, "train_steps", None),
            where={"logs": str(logs)},
        )
        records.write_record(store, record)
        code, role = run_roles(roles, store, self._stop, self._console, self._say)
        if self._stop.is_set() or not code:
            return 0
        if code == BAD_INPUT:
            said = records.outcomes(store).get(role)
            raise BadInputError(f"{role}: {said.message if said else 'refused'}")
        self._say(f"{role} ended with code {code}; its log is in {logs}")
        return code

    def _roles(self, stage: Stage, logs: pathlib.Path) -> dict[str, list[Command]]:
        """Returns the processes of each role of a stage, each with a log."""
        main, companion = self._commands.main(stage), self._commands.companion(stage)
        jobs = {TRAINER: (main, stage.processes, stage.devices)}
        if companion:
            beside = stage.companion_processes, stage.companion_devices
            jobs[BUILDER] = (companion, *beside)
        roles = {}
        for role, (arguments, number, devices) in jobs.items():
            folder, port = logs / f"{role}-1", free_port()
            folder.mkdir(parents=True, exist_ok=True)
            roles[role] = [
                Command(
                    _program(arguments),
                    self._environment(environment_of(i, number, port, devices)),
                    folder / f"{i}.log",
                )
                for i in range(number)
            ]
        return roles

    def _environment(self, told: Mapping[str, str]) -> dict[str, str]:
        # The stages of a chain, and restarted processes, share compiled programs.
        cache = os.environ.get(_CACHE) or str(self._folder / _COMPILED)
        return {**os.environ, **told, _CACHE: cache, TOKEN: self._token}

    def _end_leftovers(self) -> None:
        """Ends processes of a killed launcher, so that no two train at once."""
        until = time.monotonic() + _PACE.saving
        asked: set[psutil.Process] = set()
        while left := set(_processes_of(self._token)):
            is_late = time.monotonic() > until
            for process in left if is_late else left - asked:
                self._say(f"ending process {process.pid}, whose launcher is gone")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= left
            time.sleep(_POLL_SECONDS)

    def _say(self, text: str) -> None:
        # The terminal may be gone, and what was launched is to be ended all the same.
        with contextlib.suppress(OSError):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Console(Console):
    """A console whose reader may leave; what was launched goes on without one."""

    def on_broken_pipe(self) -> None:
        """Prints nothing more, and does not exit."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


def run_roles(
    roles: Mapping[str, Sequence[Command]],
    store: Store,
    stop: threading.Event,
    console: Console,
    say: Callable[[str], None],
) -> tuple[int, str]:
    """Runs trainer and builder until the trainer is done, or one of them has failed.

    Returns the exit code, and the role whose it is. `store` is their model directory.
    """
    workers = {
        role: Worker(
            store,
            role,
            commands,
            stop,
            lambda text, role=role: say(f"{role}: {text}"),
            max_restarts=_MAX_RESTARTS,
            pace=_PACE,
            look_seconds=_LOOK_SECONDS,
        )
        for role, commands in roles.items()
    }

    def work(role: str) -> int:
        code = BUG
        try:
            with errors_said(store, role):
                code = workers[role].run()
        finally:
            own = workers[role]
            if own.is_done:
                say(f"{role}: done")
            elif not stop.is_set():
                was_ended = own.over and not own.has_failed
                say(f"{role}: {own.over if was_ended else f'failed, code {code}'}")
                # Also where the store does not answer, by which the others hear of it.
                for one in workers.values():
                    one.over = one.over or f"the {role} has failed"
        return code

    # Not in a `with`, by which a second Ctrl-C would wait for all of them.
    pool = ThreadPoolExecutor(len(roles))
    futures = {role: pool.submit(work, role) for role in roles}
    pool.shutdown(wait=False)
    ended = futures.values()
    show_until(lambda seconds: not wait(ended, seconds).not_done, store, console)
    codes = {role: future.result() for role, future in futures.items()}
    # Who has failed here comes before who was ended for it or for another reason.
    order = sorted(codes, key=lambda role: not workers[role].has_failed)
    return next(((codes[role], role) for role in order if codes[role]), (0, TRAINER))


def _program(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "realm_jax.cli.main", *arguments]


def token_of(chain: Chain) -> str:
    """Returns the `TOKEN` of the processes of a chain."""
    return hashlib.sha256(os.path.abspath(chain.root).encode()).hexdigest()


def _processes_of(token: str) -> list[psutil.Process]:
    """Returns the processes with this `TOKEN` in their environment."""
    found = []
    for process in psutil.process_iter():
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def free_port() -> int:
    """Returns an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment_of(
    number: int, num_processes: int, port: int, devices: int
) -> dict[str, str]:
    """Returns the environment that identifies a process of a group on this machine.

    The first of them listens on the port; devices are simulated on the CPU. A single
    process only needs its devices.
    """
    told = {}
    if num_processes > 1 or devices > 1:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if num_processes > 1:
        told |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(num_processes),
            "JAX_PROCESS_ID": str(number),
        }
    return told
