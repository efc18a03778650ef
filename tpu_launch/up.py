"""`python -m tpu_launch up` and `down`: a run on machines of Google Cloud.

Give `up` the gin files of a training run, its hardware file among them. It shows the
costs of the run, asks for confirmation, creates what is missing, and ends. From then on
the engine runs it, whatever becomes of the machine that `up` ran on:

    --backend=gke     one JobSet on Google Kubernetes Engine (the current context of
                      kubectl): it is started again when it fails or is preempted, and
                      deleted at the deadline
    --backend=tpu_vm  queued resources of Cloud TPU; call `up` again, from cron, say, to
                      have preempted ones replaced. They give themselves back

Both go on from the last checkpoint. `down` deletes everything, whatever is under way.

Exit codes: 0 all is there, or done; 1 the run has failed, or its deadline has passed;
2 bad input; 75 not now: the same command may succeed later.
"""

import argparse
import dataclasses
import math
import pathlib
import re
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from realm_jax.cli import configuration, rematerialization
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.hardware import HardwareConfig, LaunchConfig
from realm_jax.stages import BUILD_INDEX, STAGES
from realm_jax.storage import Store, open_store
from realm_jax.training.stage_config import StageConfig
from tpu_launch import engines, plan, records, slices
from tpu_launch.bundle import CODE, GinFiles, make_bundle, require_shipped
from tpu_launch.planner.figures import Line, Plan, Unit, show
from tpu_launch.records import GKE, TPU_VM, LaunchRecord
from tpu_launch.run import (
    BUILDER,
    TRAINER,
    Code,
    Role,
    Run,
    RunFailedError,
    run_id,
    unread_examples,
)
from tpu_launch.slices import Slice
from tpu_launch.stage_configs import configured_stage, parse_run, stage_config

_FAILED = 1
_POLL_SECONDS = 0.2
_READ_BY_WORKERS = (
    *("CORPUS", "QUESTIONS"),
    *("WARM_START", "RETRIEVER_WARM_START", "READER_WARM_START"),
)
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/|$)")


def up(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs `up`; returns 0, or 1 where the run has failed or its time is over.

    Raises:
      BadInputError: a setting is missing, or there is no terminal to confirm on.
      NotReadyError: the engine does not answer, or refuses access.
      StoppedError: asked to stop, before anything was created.
    """
    parser = configuration.make_parser("python -m tpu_launch up", __doc__)
    parser.add_argument(
        "--backend", choices=engines.BACKENDS, default=GKE, help="who runs it"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print what is created; create nothing"
    )
    parser.add_argument(
        "--yes", action="store_true", help="do not ask before money is spent"
    )
    parser.add_argument(
        "--force", action="store_true", help="launch what the planner says does not fit"
    )
    flags, _ = parse_run(parser, argv)
    hardware = configuration.configured_if_bound(HardwareConfig)
    gin_files = GinFiles(CODE)
    commands = _commands(flags, argv, gin_files)
    bundle = make_bundle(CODE, gin_files.shipped)
    run, total_steps = configured_run(hardware, commands, bundle.code(_model_dir()))
    planned = _show_costs(run, hardware)
    if planned.problems and not flags.force:
        raise BadInputError(
            f"expected a run that fits, got {'; '.join(planned.problems)}; change that "
            "(`plan` says more), or add --force"
        )
    now = time.time()
    deadline = now + 3600 * run.config.deadline_hours
    if flags.dry_run:
        print(engines.of_run(flags.backend, run, deadline).describe(run))
        return 0
    store = open_store(run.model_dir)
    before = _before(store, run, flags.backend)
    if before is not None and before.deadline is not None:
        deadline = before.deadline
        # On GKE a run has its own clock, which waiting in a queue does not move.
        if reason := _is_over(store, deadline if flags.backend == TPU_VM else math.inf):
            say(f"{reason}; `down`, and `up` again, to go on from the last checkpoint")
            return _FAILED
        if records.has_ended(store):
            say("this run is done; to have it do more, `down`, and `up` again")
            return 0
    engine = engines.of_run(flags.backend, run, deadline)
    if not flags.yes and (before is None or before.deadline is None):
        _ask(stop)
    bundle.ship(store)
    if before is None or before.deadline is None:
        # Of an earlier launch, perhaps on another machine: workers would go by them.
        records.forget_outcomes(store)
    # Said first: what is created is then found again, whatever happens.
    records.write_record(
        store,
        LaunchRecord(
            run.id,
            flags.backend,
            {role.name: _machines(role) for role in run.roles},
            before.time if before and before.deadline else now,
            deadline,
            total_steps,
            engines.where(flags.backend, run),
        ),
    )
    try:
        engine.up(run, say)
    except RunFailedError as error:
        say(str(error))
        return _FAILED
    return 0


def down(argv: Sequence[str], stop: threading.Event) -> int:
    """Deletes what a run has, and waits until it is gone; returns 0.

    Give it --gin.MODEL_DIR=gs://my-bucket/my/pretrain. Checkpoints and indexes stay,
    and `up` goes on from them.

    Raises:
      BadInputError: no run was launched there.
      NotReadyError: the engine does not answer, or refuses access.
      StoppedError: `stop` was set.
    """
    parser = configuration.make_parser("python -m tpu_launch down", down.__doc__)
    _, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    store = open_store(model_dir)
    record = records.read_record(store)
    engine = engines.of_record(record, store)
    if engine is None:
        raise BadInputError(
            f"expected a run of an engine in {model_dir}, got one of this machine; "
            "end it with Ctrl-C"
        )
    engine.down(record.id, say, stop)
    records.forget_outcomes(store)
    records.write_record(store, dataclasses.replace(record, deadline=None))
    say("nothing is left")
    return 0


def configured_run(
    hardware: HardwareConfig, commands: Mapping[str, Sequence[str]], code: Code
) -> tuple[Run, int]:
    """Returns the run that gin has read, and the number of its training steps.

    Args:
      hardware: accelerator types.
      commands: role -> arguments of `realm`.
      code: what the workers run.

    Raises:
      BadInputError: it cannot be launched.
    """
    config = stage_config(configured_stage().command)
    launch = configuration.configured_if_bound(LaunchConfig)
    rematerialization.require_decided()
    _require_on_workers(config, launch)
    roles = [
        Role(
            *(TRAINER, _tpu(hardware.trainer), hardware.trainer_slices),
            *(launch.provisioning, tuple(commands[TRAINER]), launch.zone),
            unread_examples(launch.fetch, config.corpus, config.tasks),
        )
    ]
    if BUILDER in commands:
        if not hardware.builder:
            raise BadInputError(
                "expected machines for the index builder, got none; set "
                "hardware.HardwareConfig.builder, or REFRESH_MODE to another than async"
            )
        roles.append(
            Role(
                *(BUILDER, _tpu(hardware.builder), 1),
                launch.builder_provisioning or launch.provisioning,
                *(tuple(commands[BUILDER]), launch.builder_zone or launch.zone),
                unread_examples(launch.fetch, config.corpus, ()),
            )
        )
    run = Run(
        run_id(launch.name, config.model_dir), config.model_dir, (*roles,), code, launch
    )
    return run, config.train_steps


def say(text: str) -> None:
    """Prints a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _model_dir() -> str:
    """Returns the model directory of the run that gin has read.

    Raises:
      BadInputError: it is no training run, or not in a bucket.
    """
    stage = configured_stage()
    if not stage.trains:
        known = [spec.command for spec in STAGES.values() if spec.trains]
        raise BadInputError(
            f"expected a run file of {', '.join(known)}, got one of "
            f"{stage.command!r}; launch one of these"
        )
    model_dir = stage_config(stage.command).model_dir
    if not _BUCKET.match(model_dir):
        raise BadInputError(
            "expected MODEL_DIR on gs://BUCKET, where slices meet, got "
            f"{model_dir!r}; give one, or run on this machine with `local`"
        )
    return model_dir


def _commands(
    flags: argparse.Namespace, argv: Sequence[str], gin_files: GinFiles
) -> dict[str, list[str]]:
    """Returns the arguments of `realm` for each role."""
    model_dir, command = _model_dir(), configured_stage().command
    config = stage_config(command)
    launch = configuration.configured_if_bound(LaunchConfig)
    require_shipped(CODE, flags.import_module)
    files = [gin_files.on_worker(file) for file in flags.gin_file]
    beside = [gin_files.on_worker(file) for file in launch.builder_gin_files]
    given = [argument for argument in argv if argument.startswith("--gin.")]
    given += [f"--import_module={module}" for module in flags.import_module]
    commands = {TRAINER: [command, *_gin(files), *given]}
    # Only then does another job embed the corpus.
    if getattr(config, "refresh_mode", "") == "async":
        commands[BUILDER] = [
            *(BUILD_INDEX.command, *_gin([*files, *beside]), *given),
            f'--gin.MODEL_DIR="{model_dir}"',
            f'--gin.CORPUS="{config.corpus}"',
            *(f"--gin.{binding}" for binding in launch.builder_bindings),
        ]
    return commands


def _require_on_workers(config: StageConfig, launch: LaunchConfig) -> None:
    """Requires that all a stage reads is in a bucket, or copied to each worker."""
    for url in launch.fetch:
        if not _BUCKET.match(url):
            raise BadInputError(
                f"expected a folder on gs://BUCKET to copy from, got {url!r}; correct "
                "hardware.LaunchConfig.fetch"
            )
    for macro in _READ_BY_WORKERS:
        folder = getattr(config, macro.lower(), "")
        path = pathlib.PurePath(folder)
        fetched = any(path.is_relative_to(target) for target in launch.fetch.values())
        if folder and not fetched and not _BUCKET.match(folder):
            raise BadInputError(
                f"expected {macro} in a bucket, or copied to each worker, got "
                f"{folder!r}; give gs://BUCKET/..., or name a folder that it is copied "
                "from in hardware.LaunchConfig.fetch"
            )


def _tpu(accelerator_type: str) -> Slice:
    machines = slices.parse(accelerator_type)
    if not machines.topology:
        raise BadInputError(
            f"expected a TPU slice to launch on, got {accelerator_type!r}; give a "
            "hardware file of one, such as gin/hardware/v4_64.gin, or use `local`"
        )
    return machines


def _before(store: Store, run: Run, backend: str) -> LaunchRecord | None:
    """Returns what was launched in the model directory before, if anything was.

    Raises:
      BadInputError: it is another run, or another engine has it.
    """
    if not records.is_launched(store):
        return None
    before = records.read_record(store)
    place = engines.where(backend, run)
    same = (before.id, before.backend, dict(before.where)) == (run.id, backend, place)
    if before.deadline is not None and not same:
        raise BadInputError(
            f"expected {run.id} by {backend} in {place} as before, got a directory of "
            f"{before.id} by {before.backend} in {dict(before.where)}; run `down` first"
        )
    return before


def _is_over(store: Store, deadline: float) -> str:
    """Returns why a run must not be created again, or ""."""
    for role, outcome in records.outcomes(store).items():
        if not outcome.done:
            return f"{role} has failed: {outcome.message} (code {outcome.code})"
    if time.time() >= deadline:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(deadline))
        return f"its deadline has passed, {at}"
    return ""


def _show_costs(run: Run, hardware: HardwareConfig) -> Plan:
    """Prints the planned time of the run, and its maximum cost; returns the plan."""
    console = Console(stderr=True)
    planned = plan.plan_command(configured_stage().command, False, lambda text: None)
    hints = ["prices are those of hardware.HardwareConfig, on demand; spot costs less"]
    hours = run.config.deadline_hours
    if planned.figure("the run", "takes") > 3600 * hours:
        hints.append(
            f"the run takes longer than the deadline of {hours:g} hours "
            "(DEADLINE_HOURS); `down` and another `up` go on from the last checkpoint"
        )
    shown = Plan(
        f"{planned.title}, {run.id}",
        {
            "the run, as planned": planned.sections["the run"],
            "slices": _prices(run, hardware),
        },
        hints=[
            *hints,
            *planned.hints,
            *(f"may not fit: {problem}" for problem in planned.problems),
        ],
    )
    show([shown], hardware.currency, console)
    return planned


def _prices(run: Run, hardware: HardwareConfig) -> list[Line]:
    lines, total = [], 0.0
    for role in run.roles:
        price = role.hourly_price(hardware)
        name = f"{_machines(role)} ({role.name})"
        if price is None:
            lines.append(Line(name, role.num_workers, Unit.COUNT, "workers; no price"))
            continue
        total += price
        note = f"an hour, {role.num_workers} workers, {role.provisioning}"
        lines.append(Line(name, price, Unit.MONEY, note))
    hours = run.config.deadline_hours
    note = f"after {hours:g} hours everything is deleted"
    if total:
        lines.append(Line("by the deadline", total * hours, Unit.MONEY, note))
    return lines


def _machines(role: Role) -> str:
    return f"{role.slices} x {role.machines.accelerator_type}"


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
