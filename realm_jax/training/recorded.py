"""Opens a run by its record and the manifests of its checkpoints, without arrays."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.run_record import FOLDER, Trained, newest_record, trained_of
from realm_jax.stages import TRAINING
from realm_jax.storage import Store, open_store
from realm_jax.training.checkpoint_manifests import (
    ENDED_EARLY,
    all_details,
    manifest_name,
)
from realm_jax.training.earlier_versions import trained_by_earlier_version

TRAINED = "trained"
"""In a checkpoint's details: `Trained`, for a run whose record is damaged or lost."""


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run that has a checkpoint, and the details of its checkpoints by step."""

    model_dir: str
    trained: Trained
    checkpoints: Mapping[int, Mapping[str, Any]]

    @property
    def step(self) -> int:
        """Updates done when the newest checkpoint was saved."""
        return max(self.checkpoints)

    @property
    def train_steps(self) -> int:
        """Updates that the run was to make."""
        return self.checkpoints[self.step].get("train_steps", 0)

    @property
    def has_ended(self) -> bool:
        """Whether all of them are done, or the run has ended early."""
        is_early = self.checkpoints[self.step].get(ENDED_EARLY, False)
        return is_early or self.step >= self.train_steps

    def require(self, stage: str, wanted: Mapping[str, Any]) -> None:
        """Checks that a stage has ended, and the settings wanted of its identity."""
        for change in self.trained.differences({"stage": stage, **wanted}):
            raise BadInputError(
                f"expected a run with {change.name} {change.first!r} in "
                f"{self.model_dir}, got {change.second!r}; give the model file, corpus "
                "and settings it has"
            )
        if not self.has_ended:
            raise BadInputError(
                f"expected a finished {stage} run in {self.model_dir}, found step "
                f"{self.step} of {self.train_steps}; let it end first"
            )


def open_run(model_dir: str) -> RecordedRun | None:
    """Opens the run in a directory; None if it has no checkpoint."""
    store = open_store(model_dir)
    checkpoints = all_details(store)
    if not checkpoints:
        return None
    trained = _find_trained(store, max(checkpoints), checkpoints[max(checkpoints)])
    return RecordedRun(model_dir, trained, checkpoints)


def _find_trained(store: Store, step: int, details: Mapping[str, Any]) -> Trained:
    record = None
    # A damaged record is named by the next attempt that compares itself with it.
    with contextlib.suppress(BadInputError):
        record = newest_record(store, TRAINING)
    if record is not None and record.trained is not None:
        return record.trained
    if TRAINED in details:
        return trained_of(details[TRAINED], store.url(manifest_name(step)))
    trained = trained_by_earlier_version(details, record)
    if trained is None:
        raise BadInputError(
            f"expected the record of the run in {store.url(FOLDER)}, found none that "
            "can be read; copy that folder with the checkpoints, or use the version "
            "that the run is of"
        )
    return trained
