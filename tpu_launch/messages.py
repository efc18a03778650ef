"""Formats and prints the messages of a launch."""

import contextlib
import sys
import time
from collections.abc import Callable

from realm_jax.storage import Store
from tpu_launch import operations, worker_state
from tpu_launch.attempts import cost, read_attempts
from tpu_launch.backends.backend import Backend
from tpu_launch.job import Job
from tpu_launch.operations import CreateSlice, DeleteSlice, Operation, ShipBundle


def described(operation: Operation, backend: Backend) -> str:
    """Formats an operation for display; requests are shown verbatim."""
    match operation:
        case CreateSlice():
            return f"# create slice {operation.name}\n{backend.described(operation)}"
        case DeleteSlice():
            return f"# delete slice {operation.name}\n{backend.described(operation)}"
        case ShipBundle():
            return f"# bundle\nwrite {operation.url}"
        case operations.AwaitDone():
            until = time.strftime("%Y-%m-%d %H:%M", time.localtime(operation.until))
            return (
                f"# await {operation.role}\nread {operation.marker} until {until}; "
                "replace slices that are lost"
            )
        case operations.Collect():
            return f"# collect {operation.role}\nread {operation.folder}"


def say(text: str) -> None:
    """Prints a message with the time of day, unless the terminal is gone.

    A launcher whose terminal is closed has slices to delete.
    """
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def summarize(
    job: Job, store: Store, currency: str, say: Callable[[str], None] = say
) -> None:
    """Prints a summary of each role that is done."""
    for role in job.roles:
        done = worker_state.read_done(store, job.run, role.name)
        attempts = read_attempts(store, job.run, role.name)
        paid = cost(attempts, time.time())
        money = "" if paid is None else f", {paid:,.2f} {currency} on demand"
        if done is not None:
            tries = f"{len(attempts)} attempt{'s' if len(attempts) != 1 else ''}"
            say(f"{role.name}: done at step {done.step}, {tries}{money}")
