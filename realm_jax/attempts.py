"""Records an attempt of a command, and reports what changed since the last one."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realm_jax import multihost
from realm_jax.errors import BadInputError
from realm_jax.run_record import (
    RunRecord,
    Trained,
    changes,
    new_record,
    newest_record,
    plain,
    settings_of,
    write_record,
)
from realm_jax.storage import open_store

# How a run is done, not what it computes: of no interest where it is resumed.
_UNIMPORTANT = ("profile", "log_period", "checkpoint_period")

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Attempt:
    """An attempt of a command, which the first process records when its work begins.

    A command that refuses its input, or has nothing left to do, records nothing.

    Attributes:
      config: the configuration, with its `model_dir`.
      others: further configurations by name, dataclasses too.
      note: called with a sentence on the settings that have changed.
    """

    command: str
    config: Any
    arguments: Sequence[str] = ()
    gin: Callable[[], str] = str
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: Callable[[str], None] = _log.info

    def __post_init__(self):
        self._has_begun = False

    def begin(self, trained: Trained | None = None) -> None:
        """Reports changed settings and writes the record, the first time."""
        if not self._has_begun and multihost.is_first():
            self._has_begun = True
            record = self._new(trained)
            self._report_changes(record)
            write_record(open_store(self.config.model_dir), record)

    def report_ignored_changes(self) -> None:
        """Reports changed settings that have no effect, because the run is complete."""
        if not self._has_begun and multihost.is_first():
            self._report_changes(self._new(), "; the run is done, so it has no effect")

    def _new(self, trained: Trained | None = None) -> RunRecord:
        return new_record(
            command=self.command,
            seed=getattr(self.config, "seed", None),
            arguments=list(self.arguments),
            settings={**settings_of(self.config), **plain(self.others)},
            gin=self.gin(),
            trained=trained,
        )

    def _report_changes(self, record: RunRecord, effect: str = "") -> None:
        try:
            earlier = newest_record(open_store(self.config.model_dir), [self.command])
        except BadInputError as error:
            self.note(str(error))
            return
        before = record.settings if earlier is None else earlier.settings
        listed = [
            f"{change.name} {change.first} -> {change.second}"
            for change in changes(before, record.settings, "not set")
            if change.name not in _UNIMPORTANT
        ]
        if listed:
            self.note(f"changed since the last start: {', '.join(listed)}{effect}")
