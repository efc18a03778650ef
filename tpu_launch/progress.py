"""Reads the progress of a command from its model directory.

The launcher uses it to tell a failure that repeats at the same place from one that
happens by chance in a run that makes progress.
"""

import contextlib
import dataclasses

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import Store
from realm_jax.training.checkpoint_manifests import finished_steps
from tpu_launch.job import BUILDER, TRAINER

HEARTBEATS = {TRAINER: "trainer", BUILDER: "index_builder"}


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a role.

    Attributes:
      step: the last known training step, or -1.
      reached: text that changes with progress; "" if nothing is known.
      is_waiting: whether it is a builder that waits for the next retriever.
    """

    step: int = -1
    reached: str = ""
    is_waiting: bool = False


def of_role(store: Store, role: str) -> Progress:
    """Returns the progress of a role, from checkpoints or the builder's heartbeat.

    Args:
      store: the model directory.
      role: "trainer" or "builder".

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: the directory is unavailable.
    """
    status: JobStatus | None = None
    # A damaged heartbeat gives no information.
    with contextlib.suppress(BadInputError):
        status = read_heartbeat(store, HEARTBEATS[role])
    step = status.step if status else -1
    if role == BUILDER:
        done = status.extra.get("blocks_done", 0) if status else 0
        reached = f"block {done} of the index of step {step}" if status else ""
        is_waiting = status is not None and status.extra.get("activity") == "waiting"
        return Progress(step, reached, is_waiting)
    steps = finished_steps(store)
    # The command would resume from its newest checkpoint.
    reached = f"checkpoint {steps[-1]}" if steps else "the beginning"
    return Progress(max([step, *steps]), reached)


def has_built_all(store: Store) -> bool:
    """Returns whether the newest retriever has an index, or was refused one.

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: the directory is unavailable.
    """
    newest = SnapshotSeries(store, RETRIEVER_SERIES).latest_step()
    if newest is None or newest in SnapshotSeries(store, INDEX_SERIES).steps():
        return True
    builder = read_heartbeat(store, HEARTBEATS[BUILDER])
    return builder is not None and str(newest) in builder.extra.get("refused", ())
