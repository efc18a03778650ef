"""`python -m tpu_launch up` and `down`: a run on machines of Google Cloud.

Give `up` the gin files of a training run, its hardware file among them. It shows the
costs of the run, asks for confirmation, creates what is missing, and ends. From then on
the engine runs it, whatever becomes of the machine that `up` ran on:

    --backend=gke     one JobSet on Google Kubernetes Engine (the current context of
                      kubectl): it is started again when it fails or is preempted, and
                      ended at the deadline, which with a queue of Kueue counts over all
                      starts, and else begins anew with each
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
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from realm_jax.cli import bert_settings, configuration
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.hardware import HardwareConfig, LaunchConfig
from realm_jax.stages import BUILD_INDEX, STAGES, StageSpec
from realm_jax.storage import Store, open_store
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.stage_config import StageConfig
from tpu_launch import plan, records, slices
from tpu_launch.bundle import CODE, Bundle, GinFiles, make_bundle, require_shipped
from tpu_launch.chain import parse_run, stage_config
from tpu_launch.planner.figures import Line, Plan, Unit, show
from tpu_launch.records import GKE, TPU_VM, LaunchRecord
from tpu_launch.run import (
    BUILDER,
    TRAINER,
    Role,
    Run,
    RunFailedError,
    run_id,
    unread_examples,
)

_FAILED = 1
_POLL_SECONDS, _DELETING_SECONDS = 0.2, 5.0
_READ_BY_WORKERS = (
    "CORPUS",
    "QUESTIONS",
    "WARM_START",
    "RETRIEVER_WARM_START",
    "READER_WARM_START",
)
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/|$)")


def up(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs `up`; returns 0, or 1 where the run has failed or its time is over."""
    flags, stage = parse_run(_parser(), argv)
    hardware = configuration.configured_if_bound(HardwareConfig)
    config = _launchable(stage)
    run, bundle = _configured_run(flags, argv, config, hardware)
    if len(run.roles) > 1:
        _require_readable(flags, argv, run)
    planned = _show_costs(stage, flags.backend, run, hardware)
    if planned.problems and not flags.force:
        raise BadInputError(
            f"expected a run that fits, got {'; '.join(planned.problems)}; change that "
            "(`plan` says more), or add --force"
        )
    record = _record(flags.backend, run, config.train_steps)
    # What the engine cannot have is refused here, before anything is created.
    engine = record.engine()
    described = engine.describe(run)
    if flags.dry_run:
        print(described)
        return 0
    store = open_store(run.model_dir)
    before = _before(store, record)
    if before is not None:
        record = dataclasses.replace(record, time=before.time, deadline=before.deadline)
        if (code := _over(store, record)) is not None:
            return code
    elif not flags.yes:
        _ask(stop)
    bundle.ship(store)
    if before is None:
        # Of an earlier launch, perhaps on another machine: workers would go by them.
        records.forget_outcomes(store)
    # Said first: what is created is then found again, whatever happens.
    records.write_record(store, record)
    try:
        record.engine().up(run, say)
    except RunFailedError as error:
        say(str(error))
        return _FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_parser("python -m tpu_launch up", __doc__)
    parser.add_argument(
        "--backend", choices=(GKE, TPU_VM), default=GKE, help="who runs it"
    )
    for flag, purpose in (
        ("--dry_run", "print what is created; create nothing"),
        ("--yes", "do not ask before money is spent"),
        ("--force", "launch what the planner says does not fit"),
    ):
        parser.add_argument(flag, action="store_true", help=purpose)
    return parser


def down(argv: Sequence[str], stop: threading.Event) -> int:
    """Deletes what a run has, and waits until it is gone; returns 0.

    Give it --gin.MODEL_DIR=gs://my-bucket/my/pretrain. Checkpoints and indexes stay,
    and `up` goes on from them.
    """
    parser = configuration.make_parser("python -m tpu_launch down", down.__doc__)
    _, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    store = open_store(model_dir)
    record = records.read_record(store)
    engine = record.engine()
    if engine is None:
        raise BadInputError(
            f"expected a run of an engine in {model_dir}, got one of this machine; "
            "end it with Ctrl-C"
        )
    said: set[str] = set()
    while left := engine.delete(record.id):
        for name in set(left) - said:
            say(f"deleting {name}")
        said |= set(left)
        if stop.wait(_DELETING_SECONDS):
            raise StoppedError("stopped waiting; `status` shows what is left")
    records.forget_outcomes(store)
    records.write_record(store, dataclasses.replace(record, deadline=None))
    say("nothing is left")
    return 0


def say(text: str) -> None:
    """Prints a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _launchable(stage: StageSpec) -> Any:
    """Returns the configuration of a stage that can be launched."""
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
    bert_settings.require_decided_remat()
    return config


def _configured_run(
    flags: argparse.Namespace,
    argv: Sequence[str],
    config: StageConfig,
    hardware: HardwareConfig,
) -> tuple[Run, Bundle]:
    """Returns the run that gin has read, and its code."""
    launch = configuration.configured_if_bound(LaunchConfig)
    _require_on_workers(config, launch)
    require_shipped(CODE, flags.import_module)
    gin_files = GinFiles(CODE)
    files = [f"--gin_file={gin_files.on_worker(file)}" for file in flags.gin_file]
    given = [argument for argument in argv if argument.startswith("--gin.")]
    given += [f"--import_module={module}" for module in flags.import_module]
    roles = [
        Role(
            name=TRAINER,
            machines=_tpu(hardware.trainer),
            slices=hardware.trainer_slices,
            provisioning=launch.provisioning,
            command=(config.stage.command, *files, *given),
            zone=launch.zone,
            left_out=unread_examples(launch.fetch, config.corpus, config.tasks),
        )
    ]
    # Only then does another job embed the corpus.
    if getattr(config, "refresh_mode", "") == RefreshMode.ASYNC.value:
        beside = map(gin_files.on_worker, launch.builder_gin_files)
        files += [f"--gin_file={file}" for file in beside]
        roles.append(_builder(config, launch, hardware, [*files, *given]))
    bundle = make_bundle(CODE, gin_files.shipped)
    name = run_id(launch.name, config.model_dir)
    return Run(name, config.model_dir, tuple(roles), bundle.sha256, launch), bundle


def _builder(
    config: StageConfig,
    launch: LaunchConfig,
    hardware: HardwareConfig,
    given: Sequence[str],
) -> Role:
    if not hardware.builder:
        raise BadInputError(
            "expected machines for the index builder, got none; set "
            "hardware.HardwareConfig.builder, or REFRESH_MODE to another than async"
        )
    command = (
        BUILD_INDEX.command,
        *given,
        f'--gin.MODEL_DIR="{config.model_dir}"',
        f'--gin.CORPUS="{config.corpus}"',
        *(f"--gin.{binding}" for binding in launch.builder_bindings),
    )
    return Role(
        name=BUILDER,
        machines=_tpu(hardware.builder),
        slices=1,
        provisioning=launch.builder_provisioning or launch.provisioning,
        command=command,
        zone=launch.builder_zone or launch.zone,
        left_out=unread_examples(launch.fetch, config.corpus, ()),
    )


def _require_readable(flags: argparse.Namespace, argv: Sequence[str], run: Run) -> None:
    """Requires that the builder can read its arguments, which its trainer does not."""
    given = [one for one in run.roles[-1].command if one.startswith("--gin.")]
    files = [*flags.gin_file, *run.config.builder_gin_files]
    parser = configuration.make_parser(f"realm {BUILD_INDEX.command}", None)
    configuration.parse(
        parser, [*(f"--gin_file={file}" for file in files), *given], BUILD_INDEX.command
    )
    # What the trainer reads again takes the place of what was read for the builder.
    parse_run(_parser(), argv)


def _require_on_workers(config: StageConfig, launch: LaunchConfig) -> None:
    """Requires that all a stage reads is in a bucket, or copied to each worker."""
    for url, folder in launch.fetch.items():
        if not _BUCKET.match(url):
            raise BadInputError(
                f"expected a folder on gs://BUCKET to copy from, got {url!r}; correct "
                "hardware.LaunchConfig.fetch"
            )
        if not pathlib.PurePosixPath(folder).is_absolute():
            raise BadInputError(
                f"expected the whole path of the folder that {url} is copied to, such "
                f"as /data/corpus, got {folder!r}; correct hardware.LaunchConfig.fetch"
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


def _tpu(accelerator_type: str) -> slices.Slice:
    machines = slices.parse(accelerator_type)
    if not machines.topology:
        raise BadInputError(
            f"expected a TPU slice to launch on, got {accelerator_type!r}; give a "
            "hardware file of one, such as gin/hardware/v4_64.gin, or use `local`"
        )
    return machines


def _record(backend: str, run: Run, total_steps: int) -> LaunchRecord:
    config, now = run.config, time.time()
    where: dict[str, Any] = {"namespace": config.namespace}
    if backend == TPU_VM:
        zones = sorted({role.zone for role in run.roles})
        where = {"project": config.project, "zones": zones}
    roles = {role.name: str(role) for role in run.roles}
    deadline = now + 3600 * config.deadline_hours
    return LaunchRecord(run.id, backend, roles, now, deadline, total_steps, where)


def _before(store: Store, record: LaunchRecord) -> LaunchRecord | None:
    """Returns what an engine may still have of this model directory; it is this."""
    before = records.find_record(store)
    if before is None or before.deadline is None:
        return None
    places = [(one.id, one.backend, dict(one.where)) for one in (record, before)]
    if places[0] != places[1]:
        expected, found = (f"{id} by {who} in {where}" for id, who, where in places)
        raise BadInputError(
            f"expected {expected} as before, got a directory of {found}; run `down` "
            "first"
        )
    return before


def _over(store: Store, record: LaunchRecord) -> int | None:
    """Says why a run must not be created again; returns the exit code, None if it may.

    On GKE a run has its own clock, which waiting in a queue does not move.
    """
    reason = ""
    for role, outcome in records.outcomes(store).items():
        if not outcome.done:
            reason = f"{role} has failed: {outcome.message} (code {outcome.code})"
    deadline = record.deadline or math.inf
    if not reason and record.backend == TPU_VM and time.time() >= deadline:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(deadline))
        reason = f"its deadline has passed, {at}"
    if reason:
        say(f"{reason}; `down`, and `up` again, to go on from the last checkpoint")
        return _FAILED
    if records.is_over(records.outcomes(store)):
        say("this run is done; to have it do more, `down`, and `up` again")
        return 0
    return None


def _show_costs(
    stage: StageSpec, backend: str, run: Run, hardware: HardwareConfig
) -> Plan:
    """Prints the run's planned time, and what its slices cost; returns the plan."""
    planned = plan.plan_command(stage.command, False, lambda text: None)
    hints = ["prices are those of hardware.HardwareConfig, on demand; spot costs less"]
    hours = run.config.deadline_hours
    if planned.figure("the run", "takes") > 3600 * hours:
        hints.append(
            f"the run takes longer than the deadline of {hours:g} hours "
            "(DEADLINE_HOURS); `down` and another `up` go on from the last checkpoint"
        )
    sections = {
        "the run, as planned": planned.sections["the run"],
        "slices": _prices(backend, run, hardware),
    }
    hints += [*planned.hints, *(f"may not fit: {one}" for one in planned.problems)]
    shown = Plan(f"{planned.title}, {run.id}", sections, hints=hints)
    show([shown], hardware.currency, Console(stderr=True))
    return planned


def _prices(backend: str, run: Run, hardware: HardwareConfig) -> list[Line]:
    """Returns lines on the prices of a run, and on what it costs at most, if known."""
    lines, total, is_known = [], 0.0, True
    for role in run.roles:
        of_slice = role.machines.hourly_price(hardware)
        name = f"{role} ({role.name})"
        if of_slice is None:
            lines.append(Line(name, role.num_workers, Unit.COUNT, "workers; no price"))
            is_known = False
            continue
        price = role.slices * of_slice
        total += price
        note = f"an hour, {role.num_workers} workers, {role.provisioning}"
        lines.append(Line(name, price, Unit.MONEY, note))
    if is_known:
        hours = run.config.deadline_hours
        name, note = "by the deadline", f"after {hours:g} hours everything is deleted"
        if backend == GKE and not run.config.queue:
            name = "by the deadline of a start"
            note = f"{hours:g} hours, anew at each restart where there is no queue"
        lines.append(Line(name, total * hours, Unit.MONEY, note))
    return lines


def _ask(stop: threading.Event) -> None:
    """Asks for confirmation on the terminal."""
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
