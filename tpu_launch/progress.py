"""How far a command has got, read from its model directory.

A failure at a place that was reached before is one that repeats: so the launcher tells
it from one more stroke of bad luck in a run that goes on.
"""

import ast
import contextlib
import re
from collections.abc import Sequence

from realm_jax.errors import BadInputError
from realm_jax.index.heartbeat import read_heartbeat
from realm_jax.storage import Store, UnavailableStoreError, open_store
from realm_jax.training.checkpoint_manifests import finished_steps

_MODEL_DIR = re.compile(r"(?:--gin\.)?MODEL_DIR\s*=(.*)", re.DOTALL)
_BUILDER_ROLE = "index_builder"


def of_training(bindings: Sequence[str]) -> str:
    """Names the newest checkpoint, from which the command would go on.

    Args:
      bindings: of gin, as a person gives them; the last MODEL_DIR counts.

    Returns:
      Words that change when it gets further; "" if the bindings name no folder.
    """
    store = _model_store(bindings)
    if store is None:
        return ""
    # One that is away tells nothing, and costs one comparison.
    with contextlib.suppress(BadInputError, UnavailableStoreError):
        steps = finished_steps(store)
        return f"checkpoint {steps[-1]}" if steps else "the beginning"
    return ""


def of_building(bindings: Sequence[str]) -> str:
    """Names what the index builder said last that it does; see `of_training`."""
    store = _model_store(bindings)
    if store is None:
        return ""
    with contextlib.suppress(BadInputError, UnavailableStoreError):
        status = read_heartbeat(store, _BUILDER_ROLE)
        if status is not None:
            done = status.extra.get("blocks_done", 0)
            return f"block {done} of the index of step {status.step}"
    return ""


def _model_store(bindings: Sequence[str]) -> Store | None:
    found = [match[1] for match in map(_MODEL_DIR.fullmatch, bindings) if match]
    if not found:
        return None
    with contextlib.suppress(ValueError, SyntaxError):
        return open_store(ast.literal_eval(found[-1].strip()))
    return None
