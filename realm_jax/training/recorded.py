"""Opens a run by its record and the manifests of its checkpoints, without arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.run_record import FOLDER, Trained, newest_record
from realm_jax.stages import TRAINING
from realm_jax.storage import Store, open_store
from realm_jax.training.checkpoint_manifests import all_details
from realm_jax.training.earlier_versions import trained_by_earlier_version


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run that has a checkpoint, and the details of its checkpoints by step."""

    model_dir: str
    trained: Trained
    checkpoints: Mapping[int, Mapping[str, Any]]

    @property
    def step(self) -> int:
        """Number of updates after which the newest checkpoint was saved."""
        return max(self.checkpoints)

    @property
    def train_steps(self) -> int:
        """Number of updates that the run was to make."""
        return self.checkpoints[self.step].get("train_steps", 0)

    @property
    def has_ended(self) -> bool:
        """Whether all of them are done."""
        return self.step >= self.train_steps

    def require(self, stage: str, wanted: Mapping[str, Any]) -> None:
        """Checks that a stage has ended, and the settings wanted of its identity.

        Raises:
          BadInputError: it is unfinished, or its settings differ.
        """
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
    """Opens the run in a directory; None if it has no checkpoint.

    Raises:
      BadInputError: its record is missing or damaged.
    """
    store = open_store(model_dir)
    checkpoints = all_details(store)
    if not checkpoints:
        return None
    trained = find_trained(store, checkpoints[max(checkpoints)])
    if trained is None:
        raise BadInputError(
            f"expected the record of the run in {store.url(FOLDER)}, found none; start "
            "the stage again with the settings that it had, which are then recorded"
        )
    return RecordedRun(model_dir, trained, checkpoints)


def find_trained(store: Store, details: Mapping[str, Any]) -> Trained | None:
    """Returns what a run has trained; None if it has no record.

    The details of its newest checkpoint say it if an earlier version wrote them.
    """
    record = newest_record(store, TRAINING)
    if record is not None and record.trained is not None:
        return record.trained
    return trained_by_earlier_version(details, record)
