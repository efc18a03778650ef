"""How far a command has got, read from its model directory.

A failure at a place that was reached before is one that repeats: so the launcher tells
it from one more stroke of bad luck in a run that goes on.
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
    """How far a role has got.

    Attributes:
      step: the last training step that is known of, or -1.
      reached: words that change when it gets further; "" where nothing is known.
    """

    step: int = -1
    reached: str = ""


def of_role(store: Store, role: str) -> Progress:
    """Returns how far a role has got: by its checkpoints, or as a builder says.

    Args:
      store: the model directory.
      role: "trainer" or "builder".

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: it is away.
    """
    status: JobStatus | None = None
    # One that is damaged tells nothing.
    with contextlib.suppress(BadInputError):
        status = read_heartbeat(store, HEARTBEATS[role])
    step = status.step if status else -1
    if role == BUILDER:
        done = status.extra.get("blocks_done", 0) if status else 0
        reached = f"block {done} of the index of step {step}" if status else ""
        return Progress(step, reached)
    steps = finished_steps(store)
    # From its newest checkpoint the command would go on.
    reached = f"checkpoint {steps[-1]}" if steps else "the beginning"
    return Progress(max([step, *steps]), reached)


def has_built_all(store: Store) -> bool:
    """Returns whether the newest retriever has an index, or was refused one.

    Raises:
      BadInputError: the directory cannot be read.
      UnavailableStoreError: it is away.
    """
    newest = SnapshotSeries(store, RETRIEVER_SERIES).latest_step()
    if newest is None or newest in SnapshotSeries(store, INDEX_SERIES).steps():
        return True
    builder = read_heartbeat(store, HEARTBEATS[BUILDER])
    return builder is not None and str(newest) in builder.extra.get("refused", ())
