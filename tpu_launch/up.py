"""`python -m tpu_launch up`: a run on TPU slices, until it is done.

Give it the gin files of a training run, its hardware file among them. It shows the
costs of the run and asks for confirmation. It then requests a trainer from Cloud TPU
and, if the run has one, an index builder, replaces each of them when it is lost, and
deletes both at the end: when the run is done, when it fails twice at one step, at the
deadline, and on Ctrl-C. The same command resumes from the last checkpoint.

Exit code 1: the run was given up; the last line says why.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import re
import select
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console

from realm_jax.cli import configuration, rematerialization
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.extras import require_extra
from realm_jax.hardware import HardwareConfig, LaunchConfig
from realm_jax.stages import BUILD_INDEX, STAGES
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import messages, operations, plan, worker_state
from tpu_launch.attempts import TakenOverError
from tpu_launch.backends.backend import Backend, BusyError
from tpu_launch.bundle import CODE, GinFiles, make_bundle, require_shipped
from tpu_launch.clock import SystemClock
from tpu_launch.deleting import GaveUpError, found_in
from tpu_launch.job import Job, hourly_price, make_job
from tpu_launch.messages import say
from tpu_launch.planner.figures import Line, Plan, Unit, show
from tpu_launch.reconcile import Reconciler
from tpu_launch.stage_configs import configured_stage, parse_run, stage_config

GAVE_UP = 1
BACKENDS = ("api", "gcloud")

# Exceptions that end a run before it is done.
_RUN_ENDS = (GaveUpError, BadInputError, StoppedError)
_POLL_SECONDS = 0.2
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/|$)")


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0 once the run is done, and 1 if it was given up.

    Raises:
      BadInputError: a setting is missing, the workers refuse their input, or there is
        no terminal to confirm on.
      StoppedError: asked to stop; all slices are deleted.
    """
    parser = configuration.make_parser("python -m tpu_launch up", __doc__)
    add_backend(parser)
    parser.add_argument(
        "--yes", action="store_true", help="do not ask before money is spent"
    )
    parser.add_argument(
        "--force", action="store_true", help="launch what the planner says does not fit"
    )
    flags, _ = parse_run(parser, argv)
    hardware = configuration.configured_if_bound(HardwareConfig)
    gin_files = GinFiles(CODE)
    job = configured_job(flags.gin_file, argv, flags.import_module, gin_files)
    bundle = make_bundle(CODE, gin_files.shipped)
    backend = make_backend(flags.backend, job.config.project)
    planned = _show_costs(job, hardware)
    if planned.problems and not flags.force:
        raise BadInputError(
            f"expected a run that fits, got {'; '.join(planned.problems)}; change that "
            "(`plan` says more), or add --force"
        )
    if flags.dry_run:
        ship = bundle.operation(job.model_dir)
        for operation in operations.launch(job, ship, time.time()):
            print(messages.described(operation, backend), end="\n\n")
        return 0
    if not flags.yes:
        _ask(stop)
    prices = {role.name: hourly_price(role, hardware) for role in job.roles}
    try:
        store = open_store(job.model_dir)
        if _is_done(job, store):
            messages.summarize(job, store, hardware.currency)
            return 0
        # Before this launcher takes the run: no access is an error as long as nothing
        # depends on it. The loop waits for a busy service.
        with contextlib.suppress(BusyError):
            found_in(backend, job.zones, {operations.RUN: job.run})
        bundle.ship(store)
        ship, clock = bundle.operation(job.model_dir), SystemClock(stop)
        currency = hardware.currency
        Reconciler(job, ship, backend, store, clock, say, prices, currency).run()
        messages.summarize(job, store, currency)
    except (GaveUpError, TakenOverError, UnavailableStoreError) as error:
        # Deletion failed, after another error had ended the run.
        before = error.__context__ if isinstance(error, GaveUpError) else None
        reason = f"{before}; " if isinstance(before, _RUN_ENDS) else ""
        say(f"{reason}{error}")
        return GAVE_UP
    except KeyboardInterrupt:
        say("stopped at once; run `python -m tpu_launch down` for slices that are left")
        raise
    return 0


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds the flags shared by all commands with a backend."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="api",
        help="who talks to Cloud TPU: its client library, or the program gcloud",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print what would be done; do nothing",
    )


def make_backend(name: str, project: str) -> Backend:
    """Returns a backend by its name; importing one takes a second."""
    if name == "gcloud":
        from tpu_launch.backends.gcloud import GcloudBackend

        return GcloudBackend(project)
    require_extra("launch", "the backend 'api'")
    from tpu_launch.backends.api import ApiBackend

    return ApiBackend(project)


def configured_job(
    given_files: Sequence[str],
    argv: Sequence[str],
    modules: Sequence[str],
    gin_files: GinFiles,
) -> Job:
    """Returns the job configured in gin.

    Args:
      given_files: gin files, as they were given.
      argv: the command line, for its bindings.
      modules: modules to import on the workers too.
      gin_files: collects all gin files that workers need.

    Raises:
      BadInputError: no training run is configured, or it cannot be launched.
    """
    stage = configured_stage()
    if not stage.trains:
        known = [spec.command for spec in STAGES.values() if spec.trains]
        raise BadInputError(
            f"expected a run file of {', '.join(known)}, got one of "
            f"{stage.command!r}; launch one of these"
        )
    config = stage_config(stage.command)
    if not _BUCKET.match(config.model_dir):
        raise BadInputError(
            "expected MODEL_DIR on gs://BUCKET, where slices meet, got "
            f"{config.model_dir!r}; give one, or run on this machine with `local`"
        )
    rematerialization.require_decided()
    launch = configuration.configured_if_bound(LaunchConfig)
    _require_on_workers("CORPUS", config.corpus, launch)
    _require_on_workers("WARM_START", getattr(config, "warm_start", ""), launch)
    require_shipped(CODE, modules)
    files = [gin_files.on_worker(file) for file in given_files]
    beside = [gin_files.on_worker(file) for file in launch.builder_gin_files]
    given = [arg for arg in argv if arg.startswith("--gin.")]
    imports = [f"--import_module={module}" for module in modules]
    trainer = [stage.command, *_gin(files), *given, *imports]
    builder = None
    # Only then does another job embed the corpus.
    if getattr(config, "refresh_mode", "") == "async":
        builder = [
            *(BUILD_INDEX.command, *_gin([*files, *beside])),
            *(*given, *imports),
            f'--gin.MODEL_DIR="{config.model_dir}"',
            f'--gin.CORPUS="{config.corpus}"',
            *(f"--gin.{binding}" for binding in launch.builder_bindings),
        ]
    hardware = configuration.configured_if_bound(HardwareConfig)
    job = make_job(
        *(launch, hardware, config.model_dir, trainer, builder),
        corpus=config.corpus,
        tasks=config.tasks,
    )
    return dataclasses.replace(job, total_steps=config.train_steps)


def _require_on_workers(macro: str, folder: str, launch: LaunchConfig) -> None:
    """Requires that a folder is in a bucket, or one that workers fetch."""
    path = pathlib.PurePath(folder)
    fetched = any(path.is_relative_to(target) for target in launch.fetch.values())
    if folder and "://" not in folder and not fetched:
        raise BadInputError(
            f"expected {macro} in a bucket, or copied to each worker, got {folder!r}; "
            "name its gs:// folder in hardware.LaunchConfig.fetch"
        )


def _show_costs(job: Job, hardware: HardwareConfig) -> Plan:
    """Prints the planned time of the run, and its maximum cost; returns the plan."""
    console = Console(stderr=True)
    planned = plan.plan_command(configured_stage().command, False, lambda text: None)
    hints = ["prices are those of hardware.HardwareConfig, on demand; spot costs less"]
    hours = job.config.deadline_hours
    if planned.figure("the run", "takes") > 3600 * hours:
        hints.append(
            f"the run takes longer than the deadline of {hours:g} hours "
            "(DEADLINE_HOURS); another `up` goes on from the last checkpoint"
        )
    shown = Plan(
        f"{planned.title}, {job.run} in {job.config.project}",
        {
            "the run, as planned": planned.sections["the run"],
            "slices": _prices(job, hardware),
        },
        hints=[
            *hints,
            *planned.hints,
            *(f"may not fit: {problem}" for problem in planned.problems),
        ],
    )
    show([shown], hardware.currency, console)
    return planned


def _prices(job: Job, hardware: HardwareConfig) -> list[Line]:
    lines, total = [], 0.0
    for role in job.roles:
        price = hourly_price(role, hardware)
        name = f"{role.slices} x {role.machines.accelerator_type} ({role.name})"
        if price is None:
            lines.append(Line(name, role.num_workers, Unit.COUNT, "workers; no price"))
            continue
        total += price
        note = f"an hour, {role.num_workers} workers, {role.provisioning}"
        lines.append(Line(name, price, Unit.MONEY, note))
    hours = job.config.deadline_hours
    note = f"after {hours:g} hours everything is deleted"
    if total:
        lines.append(Line("by the deadline", total * hours, Unit.MONEY, note))
    return lines


def _is_done(job: Job, store: Store) -> bool:
    """Returns whether a run is already done, and prints how to extend it."""
    roles = [role.name for role in job.roles]
    if any(worker_state.read_done(store, job.run, role) is None for role in roles):
        return False
    where = store.url(worker_state.role_folder(job.run, "*"))
    say(f"this run is done; to have it do more, delete {where}/done.json")
    return True


def _ask(stop: threading.Event) -> None:
    """Asks for confirmation on the terminal.

    Raises:
      BadInputError: there is no terminal.
      StoppedError: the answer was no, or asked to stop.
    """
    if not sys.stdin.isatty():
        raise BadInputError(
            "expected somebody to confirm the costs, but there is no terminal; add "
            "--yes"
        )
    print("Create these slices? [y/N] ", end="", file=sys.stderr, flush=True)
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        if stop.is_set():
            raise StoppedError("stopped; nothing was created")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise StoppedError("nothing was created")


def _gin(files: Sequence[str]) -> list[str]:
    return [f"--gin_file={file}" for file in files]
