"""The processes of one job, and what they say to each other.

A pod slice runs the same program once a host. The processes meet in the collectives of
a jitted step, and here, in a few words about what to do next. Those go through the
coordination service of `jax.distributed`, so that no device waits for them.

Whatever all processes take part in they must call in the same order, from the main
thread. With a single process all of it is the identity.
"""

import dataclasses
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from realm_jax.chips import LIBTPU_FLAGS
from realm_jax.errors import BadInputError

Value = TypeVar("Value")

_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Who waits does not judge: the coordination service ends all processes if one dies.
_PATIENCE_MS = 7 * 24 * 3600 * 1000
# Words of the first are kept until all have met; after so many they meet to forget.
_MEET_AFTER = 256
_WORDS, _MEETINGS, _NOTES = "realm/words", "realm/meetings", "realm/notes"

_calls = itertools.count()


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """How the processes of a job find each other.

    `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID` in the environment come first, as a launcher on one machine sets
    them.

    Attributes:
      pod: whether the platform knows the others, as Cloud TPU and Slurm do.
      start_seconds: how long to wait for them at the start.
      heartbeat_seconds: after so long without a word from one, all end.
    """

    pod: bool = False
    start_seconds: int = 600
    heartbeat_seconds: int = 100


def join(config: HostsConfig) -> None:
    """Joins the processes of the job; call it before anything else of JAX.

    Raises:
      BadInputError: the environment names a group by halves, or the platform knows of
        none.
    """
    given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    arguments: dict[str, Any] = {}
    if len(given) == len(_ENVIRONMENT):
        address, num_processes, process_id = (given[name] for name in _ENVIRONMENT)
        try:
            arguments = {
                "coordinator_address": address,
                "num_processes": int(num_processes),
                "process_id": int(process_id),
            }
        except ValueError as error:
            raise _wrong_group(given) from error
    elif not config.pod:
        if given:
            raise _wrong_group(given)
        return
    if config.pod:
        os.environ.setdefault("LIBTPU_INIT_ARGS", LIBTPU_FLAGS)
    # It would take SIGTERM away from the handler that makes the job save and stop.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=config.start_seconds,
            heartbeat_timeout_seconds=config.heartbeat_seconds,
        )
    except ValueError as error:
        raise BadInputError(
            f"expected a platform that knows the processes of this job, as Cloud TPU "
            f"does, got none ({error}); set {', '.join(_ENVIRONMENT)}, or "
            "HostsConfig.pod = False for a single process"
        ) from error


def _wrong_group(given: dict[str, str]) -> BadInputError:
    return BadInputError(
        f"expected all of {', '.join(_ENVIRONMENT)} in the environment, or none, got "
        f"{given}; unset them to run a single process"
    )


def count() -> int:
    """Returns how many processes the job has."""
    return jax.process_count()


def number() -> int:
    """Returns which of them this is, counted from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Returns whether this is the process that speaks and writes for all."""
    return number() == 0


def from_first(value: Value) -> Value:
    """Returns, in every process, the value that the first one gave."""
    if count() == 1:
        return value
    call = next(_calls)
    if call % _MEET_AFTER == 0:
        _meet(call)
    name = f"{_WORDS}/{call}"
    if is_first():
        _service().key_value_set_bytes(name, pickle.dumps(value))
        return value
    return pickle.loads(_service().blocking_key_value_get_bytes(name, _PATIENCE_MS))


def gather(value: Value) -> list[Value]:
    """Returns, in every process, the values that all gave, in their order."""
    if count() == 1:
        return [value]
    call = next(_calls)
    folder = f"{_MEETINGS}/{call}"
    _service().key_value_set_bytes(f"{folder}/{number()}", pickle.dumps(value))
    _meet(call)
    found = _service().key_value_dir_get_bytes(f"{folder}/")
    return [value for _, value in sorted(map(_parse, found))]


def run_on_all(action: Callable[[], Value]) -> Value:
    """Acts in every process; returns what this one's action gave, when all are done.

    Raises:
      Exception: what it raised in the first process in which it failed, in all.
    """
    result, error = _attempt(action)
    for raised in gather(error):
        if raised is not None:
            raise raised
    return result  # pyright: ignore[reportReturnType]


def run_on_primary(action: Callable[[], Value]) -> Value:
    """Acts in the first process; returns what that gave in all.

    Raises:
      Exception: what it raised there, in all.
    """
    result, error = from_first(_attempt(action) if is_first() else (None, None))
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def post(name: str, value: Any) -> None:
    """Leaves a note for the others, in place of the last; any thread may do it."""
    if count() > 1:
        _service().key_value_set_bytes(
            f"{_NOTES}/{name}/{number()}", pickle.dumps(value), allow_overwrite=True
        )


def posted(name: str) -> dict[int, Any]:
    """Returns the notes of this name, by process; any thread may ask."""
    if count() == 1:
        return {}
    return dict(map(_parse, _service().key_value_dir_get_bytes(f"{_NOTES}/{name}/")))


class StopRequest:
    """Whether any process of the job was asked to stop; all see it at the same call."""

    def __init__(self, event: threading.Event):
        """Wraps what this process's signals set."""
        self._event = event
        self._said = False

    def asked(self) -> bool:
        """Returns, in the first process, whether any was asked; tells it in others."""
        if self._event.is_set() and not self._said:
            self._said = True
            post("stop", True)
        return self._event.is_set() or (is_first() and bool(posted("stop")))

    def is_set(self) -> bool:
        """Returns the same in all processes, which must all call it."""
        asked = self.asked()
        return from_first(asked)


def fetch(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree on this host, whole; all processes take part."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)


def local_rows(array: jax.Array) -> np.ndarray:
    """Returns the rows (of the first axis) that this process's devices hold."""
    if array.is_fully_addressable:
        return np.asarray(array)
    # Devices along other axes of the mesh hold the same rows.
    parts = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])


def _attempt(action: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        if count() == 1:
            raise
        return None, error


def _meet(call: int) -> None:
    service = _service()
    service.wait_at_barrier(f"{_MEETINGS}-{call}", _PATIENCE_MS)
    if is_first():
        # All have heard what was said before; of meetings, they may still be reading
        # this one.
        service.key_value_delete(f"{_WORDS}/")
        _forget_meeting(call)


_last_meeting: list[int] = []


def _forget_meeting(call: int) -> None:
    for last in _last_meeting:
        _service().key_value_delete(f"{_MEETINGS}/{last}/")
    _last_meeting[:] = [call]


def _parse(note: tuple[str, bytes]) -> tuple[int, Any]:
    name, value = note
    return int(name.rpartition("/")[2]), pickle.loads(value)


def _service() -> Any:
    # JAX has no public name for its client of the coordination service; Orbax takes
    # it from here, too.
    return distributed.global_state.client
