"""Deletes slices: those of a run (`down`), or those left behind (`reap`)."""

import contextlib
import threading
import time
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from realm_jax.hardware import LaunchConfig
from realm_jax.storage import UnavailableStoreError, open_store
from tpu_launch import operations, up
from tpu_launch.attempts import Attempts
from tpu_launch.backends.backend import Backend, BusyError, FoundSlice
from tpu_launch.clock import SystemClock
from tpu_launch.deleting import GaveUpError, delete_all, found_in
from tpu_launch.job import run_id
from tpu_launch.messages import say
from tpu_launch.operations import DeleteSlice
from tpu_launch.stage_configs import parse_run, stage_config

_DOWN = """`python -m tpu_launch down`: deletes the slices of a run.

Give it what `up` was given. An `up` that is still at work elsewhere ends, and what the
run has made stays: `up` goes on from the last checkpoint.
"""
_REAP = """`python -m tpu_launch reap`: deletes slices that are past their deadline.

Of all runs in the project and the zones of the gin files, whoever launched them: what
`up` would have deleted, had its machine not died.
"""


def down(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs `down`; returns 0, and 1 if slices are left.

    Raises:
      BadInputError: a setting is missing, or there is no access.
    """
    parser = configuration.make_parser("python -m tpu_launch down", _DOWN)
    up.add_backend(parser)
    flags, stage = parse_run(parser, argv)
    launch = _launch_config()
    model_dir = stage_config(stage.command).model_dir
    run = run_id(launch.name, model_dir)
    backend = up.make_backend(flags.backend, launch.project)
    ours = None if flags.dry_run else _take_over(model_dir, run)
    labels = {operations.RUN: run}
    code = _delete(
        backend, lambda: found_in(backend, _zones(launch), labels), flags.dry_run, stop
    )
    if ours and code == 0:
        # The slices are gone and cost nothing more; failing to record that is harmless.
        with contextlib.suppress(BadInputError, UnavailableStoreError):
            ours.close(time.time(), "taken down")
    return code


def reap(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs `reap`; returns 0, and 1 if slices are left.

    Raises:
      BadInputError: a setting is missing, or there is no access.
    """
    parser = configuration.make_parser("python -m tpu_launch reap", _REAP)
    up.add_backend(parser)
    flags = configuration.parse(parser, argv)
    launch = _launch_config()
    backend = up.make_backend(flags.backend, launch.project)

    def find() -> list[FoundSlice]:
        labels = {operations.RUN: None, operations.EXPIRES: None}
        found = found_in(backend, _zones(launch), labels)
        return [one for one in found if is_expired(one, time.time())]

    return _delete(backend, find, flags.dry_run, stop)


def is_expired(found: FoundSlice, now: float) -> bool:
    """Returns whether the launcher of a slice should have deleted it by now."""
    expires = found.labels.get(operations.EXPIRES, "")
    return expires.isdecimal() and int(expires) <= now


def _launch_config() -> LaunchConfig:
    launch = configuration.configured_if_bound(LaunchConfig)
    launch.require_valid()
    return launch


def _zones(launch: LaunchConfig) -> list[str]:
    return sorted({launch.zone, launch.builder_zone or launch.zone})


def _take_over(model_dir: str, run: str) -> Attempts | None:
    """Makes a running launcher end, because it would create slices again."""
    try:
        return Attempts(open_store(model_dir), run, time.time())
    except (BadInputError, UnavailableStoreError) as error:
        say(f"a launcher that still runs may create slices anew: {error}")
        return None


def _delete(backend: Backend, find, dry_run: bool, stop: threading.Event) -> int:
    try:
        found = find()
    except BusyError as error:
        say(f"nothing was deleted: {error}; run this again")
        return up.GAVE_UP
    for one in found:
        what = f"{one.slices} x {one.accelerator_type}, {one.state}"
        print(f"{one.name} in {one.zone}: {what}")
        if dry_run:
            print(backend.described(DeleteSlice(one.name, one.zone)))
    if not found:
        print("nothing to delete")
    if dry_run or not found:
        return 0
    try:
        delete_all(backend, find, SystemClock(stop), say)
    except GaveUpError as error:
        say(str(error))
        return up.GAVE_UP
    print("deleted")
    return 0
