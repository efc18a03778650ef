"""How far a command has got, read from its model directory.

A failure at a place that was reached before is one that repeats: so the launcher tells
it from one more stroke of bad luck in a run that goes on.
"""

import ast
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import JobStatus, read_heartbeat
from realm_jax.storage import Store, UnavailableStoreError, open_store
from realm_jax.training.checkpoint_manifests import finished_steps
from tpu_launch.job import BUILDER, TRAINER

_MODEL_DIR = re.compile(r"(?:--gin\.)?MODEL_DIR\s*=(.*)", re.DOTALL)
_HEARTBEATS = {TRAINER: "trainer", BUILDER: "index_builder"}


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a role has got.

    Attributes:
      step: the last training step that is known of, or -1.
      reached: words that change when it gets further; "" where nothing is known.
      details: what its job said last of itself.
    """

    step: int = -1
    reached: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
        status = read_heartbeat(store, _HEARTBEATS[role])
    step = status.step if status else -1
    details = status.extra if status else {}
    if role == BUILDER:
        done = details.get("blocks_done", 0)
        reached = f"block {done} of the index of step {step}" if status else ""
        return Progress(step, reached, details)
    steps = finished_steps(store)
    # From its newest checkpoint the command would go on.
    reached = f"checkpoint {steps[-1]}" if steps else "the beginning"
    return Progress(max([step, *steps]), reached, details)


def of_training(bindings: Sequence[str]) -> str:
    """Names the newest checkpoint, from which the command would go on.

    Args:
      bindings: of gin, as a person gives them; the last MODEL_DIR counts.

    Returns:
      Words that change when it gets further; "" if the bindings name no folder.
    """
    return _reached(bindings, TRAINER)


def of_building(bindings: Sequence[str]) -> str:
    """Names what the index builder said last that it does; see `of_training`."""
    return _reached(bindings, BUILDER)


def _reached(bindings: Sequence[str], role: str) -> str:
    store = _model_store(bindings)
    # One that is away tells nothing, and costs one comparison.
    with contextlib.suppress(BadInputError, UnavailableStoreError):
        return of_role(store, role).reached if store else ""
    return ""


def _model_store(bindings: Sequence[str]) -> Store | None:
    found = [match[1] for match in map(_MODEL_DIR.fullmatch, bindings) if match]
    if not found:
        return None
    with contextlib.suppress(ValueError, SyntaxError):
        return open_store(ast.literal_eval(found[-1].strip()))
    return None
