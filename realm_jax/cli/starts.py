"""Writes down how a command was started, and says what changed since the last time."""

from collections.abc import Mapping, Sequence
from typing import Any

import gin

from realm_jax import __version__, multihost
from realm_jax.cli.progress import StageProgress
from realm_jax.errors import BadInputError
from realm_jax.settings import Start, changes, new_start, read_starts, write_start
from realm_jax.storage import open_store

# How a run is done, not what it computes: of no interest where it is resumed.
_UNIMPORTANT = ("profile", "log_period", "checkpoint_period")


class StartRecord:
    """The record of a start, written by the first process when work begins.

    A command that refuses its input, or has nothing left to do, writes none.
    """

    def __init__(
        self,
        command: str,
        config: Any,
        arguments: Sequence[str],
        progress: StageProgress,
        others: Mapping[str, Any] | None = None,
        *,
        is_written_late: bool = False,
    ):
        """Has the record written before the first progress is shown.

        Args:
          command: command of `realm`.
          config: its configuration, with its `model_dir`.
          arguments: its command line.
          progress: shows the progress of the command.
          others: further configurations by name, dataclasses too.
          is_written_late: whether the command calls `write` itself instead, as
            evaluation does, which finds bad input while it measures.
        """
        self._command, self._config = command, config
        self._arguments, self._others = arguments, others or {}
        self._progress = progress
        self._is_written = False
        if not is_written_late:
            progress.before_first(self.write)

    def end(self) -> None:
        """Reports changed settings that have no effect, because the run is complete."""
        if not self._is_written and multihost.is_first():
            self._say_changes(self._new(), "; the run is done, so it has no effect")

    def write(self) -> None:
        """Says what changed since the last start, and writes the record, once."""
        if not self._is_written and multihost.is_first():
            self._is_written = True
            start = self._new()
            self._say_changes(start)
            write_start(open_store(self._config.model_dir), start)

    def _new(self) -> Start:
        return new_start(
            self._command,
            self._config,
            self._arguments,
            gin.operative_config_str,
            self._others,
            __version__,
        )

    def _say_changes(self, start: Start, effect: str = "") -> None:
        try:
            starts = read_starts(open_store(self._config.model_dir))
        except BadInputError as error:
            # What an earlier start recorded decides nothing.
            self._progress.note(str(error))
            return
        earlier = [one for one in starts if one.command == self._command]
        if not earlier:
            return
        listed = [
            f"{name} {change}"
            for name, change in changes(earlier[-1].settings, start.settings).items()
            if name not in _UNIMPORTANT
        ]
        if listed:
            said = f"changed since the last start: {', '.join(listed)}{effect}"
            self._progress.note(said)
