"""Tracks the checkpoints of a pre-training run that remain, and their indexes.

`Checkpointer` keeps the newest and the best by held-out utility. The trainer follows it
here, to recognise a new best one, and to know the indexes that garbage collection must
keep: a run whose newest checkpoints are damaged resumes from the best, with the index
that it names.
"""

import math
from collections.abc import Mapping
from typing import Any

from realm_jax import multihost
from realm_jax.storage import Store
from realm_jax.training.checkpoint_manifests import (
    HELD_OUT_UTILITY,
    all_details,
    best_step,
)
from realm_jax.training.checkpoints import KEPT_CHECKPOINTS


class KeptCheckpoints:
    """The details of the checkpoints that remain, by step."""

    def __init__(self, store: Store):
        """Reads the existing checkpoints.

        Args:
          store: the model directory.
        """
        self._details = multihost.run_on_primary(lambda: all_details(store))
        self._measured: dict[int, float] = {}

    @property
    def index_steps(self) -> tuple[int, ...]:
        """Versions of the indexes with which they resume, in order of their steps."""
        return tuple(details["index_step"] for details in self._details.values())

    def note_utility(self, step: int, utility: float) -> bool:
        """Notes the held-out utility of a step, for the checkpoint of that step.

        Args:
          step: updates done.
          utility: in nats.

        Returns:
          Whether no checkpoint has a higher utility.
        """
        self._measured = {step: utility}
        best = best_step(self._details)
        if best is None:
            return math.isfinite(utility)
        return utility >= self._details[best][HELD_OUT_UTILITY]

    def add(self, step: int, details: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds a checkpoint that is being saved, and drops those that it replaces.

        Args:
          step: updates done.
          details: details of the checkpoint.

        Returns:
          The details with the held-out utility of this step, if it was measured.
        """
        utility = (
            {HELD_OUT_UTILITY: self._measured[step]} if step in self._measured else {}
        )
        details = {**details, **utility}
        # An existing checkpoint keeps its details, see `Checkpointer.save`.
        found = {**self._details, step: {**details, **self._details.get(step, {})}}
        found[step].update(utility)
        newest = sorted(found)[-KEPT_CHECKPOINTS:]
        kept = {*newest, best_step(found)}
        self._details = {step: found[step] for step in sorted(found) if step in kept}
        return details
