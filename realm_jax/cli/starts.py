"""Writes down how a command was started, and says what changed since the last time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from realm_jax import multihost
from realm_jax.settings import changes, new_start, read_starts, write_start
from realm_jax.storage import open_store

# How a run is done, not what it computes: of no interest where it is resumed.
_UNIMPORTANT = ("profile", "log_period", "checkpoint_period")


def record(
    command: str,
    config: Any,
    arguments: Sequence[str],
    say: Callable[[str], None],
    *,
    others: Mapping[str, Any] | None = None,
    is_done: bool = False,
) -> None:
    """Records a start in the command's model directory, by its first process.

    Args:
      command: command of `realm`.
      config: its configuration, with its `model_dir`.
      arguments: its command line.
      say: shows a line.
      others: further configurations by name, dataclasses too.
      is_done: whether there is nothing left to do. Then nothing is recorded, as no
        setting has an effect.

    Raises:
      BadInputError: the model directory cannot be read or written.
    """
    if not multihost.is_first():
        return
    store = open_store(config.model_dir)
    start = new_start(
        command, config, arguments, gin.operative_config_str, others or {}
    )
    earlier = [one for one in read_starts(store) if one.command == command]
    if earlier:
        changed = changes(earlier[-1].settings, start.settings)
        changed = {
            name: change for name, change in changed.items() if name not in _UNIMPORTANT
        }
        if changed:
            listed = ", ".join(f"{name} {change}" for name, change in changed.items())
            effect = "; the run is done, so it has no effect" if is_done else ""
            say(f"changed since the last start: {listed}{effect}")
    if not is_done:
        write_start(store, start)
