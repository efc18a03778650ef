"""Coordinates the processes of one job.

A pod slice runs the same program once per host. The processes synchronise in the
collectives of a jitted step, and here, by small messages about what to do next. These
go through the coordination service of `jax.distributed`, so that no device waits for
them.

All processes must call the collective functions in the same order, from the main
thread. With a single process they are the identity.

The messages are JSON, and not pickled: whoever reaches the service could otherwise run
code here. They carry plain values, tuples, and exceptions by their names.
"""

import dataclasses
import ipaddress
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.hardware import LIBTPU_FLAGS
from realm_jax.ranges import require_ranges, whole
from realm_jax.rendezvous import meet, reminders, split_address

Value = TypeVar("Value")

_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Effectively unlimited: the coordination service ends all processes if one dies.
_PATIENCE_MS = 7 * 24 * 3600 * 1000
# Messages of the first process are kept until a barrier; one is inserted after this
# many calls, to delete them.
_BARRIER_AFTER = 256
_BROADCASTS, _GATHERS, _NOTES = "realm/broadcasts", "realm/gathers", "realm/notes"

_calls = itertools.count()
_last_barrier: list[int] = []


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Configuration of how the processes of a job find each other.

    `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID` in the environment, as set by a launcher on one machine, take
    precedence.

    Attributes:
      pod: whether the platform provides the other processes, as Cloud TPU and Slurm do.
      start_seconds: longest wait for the other processes at the start, in seconds.
      heartbeat_seconds: seconds without a heartbeat of a process after which all end.
    """

    pod: bool = False
    start_seconds: int = 600
    heartbeat_seconds: int = 100

    def __post_init__(self):
        require_ranges(self, start_seconds=whole(1), heartbeat_seconds=whole(1))


def join(config: HostsConfig, stop: threading.Event | None = None) -> None:
    """Joins the processes of the job; must be called before any other use of JAX.

    At `stop` waiting for those that the environment defines ends in a StoppedError.
    """
    given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    arguments: dict[str, Any] = {}
    if len(given) == len(_ENVIRONMENT):
        address, num_processes, process_id = (given[name] for name in _ENVIRONMENT)
        try:
            number, size = int(process_id), int(num_processes)
        except ValueError as error:
            raise _wrong_group(given) from error
        if not 0 <= number < size:
            raise _wrong_group(given)
        host, port = split_address(address)
        # JAX would listen on all interfaces, also for processes of one machine.
        is_here = _is_loopback(host)
        meet(
            (host, port),
            host if is_here else "",
            number,
            size,
            seconds=config.start_seconds,
            stop=stop or threading.Event(),
        )
        arguments = {
            "coordinator_address": address,
            "num_processes": size,
            "process_id": number,
            "coordinator_bind_address": address if is_here else None,
        }
    elif not config.pod:
        if given:
            raise _wrong_group(given)
        return
    if config.pod:
        os.environ.setdefault("LIBTPU_INIT_ARGS", LIBTPU_FLAGS)
    # It would replace the SIGTERM handler that makes the job save and stop.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with reminders("the other processes of the job", config.start_seconds):
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _wrong_group(given: dict[str, str]) -> BadInputError:
    return BadInputError(
        f"expected all of {', '.join(_ENVIRONMENT)} in the environment, with a number "
        f"of this process below that of all, or none, got {given}; unset "
        "them to run a single process"
    )


def count() -> int:
    """Returns the number of processes of the job."""
    return jax.process_count()


def number() -> int:
    """Returns the number of this process, counted from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Returns whether this is the process that logs and writes for all."""
    return number() == 0


def from_first(value: Value) -> Value:
    """Broadcasts the value of the first process to all; a collective call."""
    if count() == 1:
        return value
    call = next(_calls)
    if call % _BARRIER_AFTER == 0:
        _barrier(call)
    name = f"{_BROADCASTS}/{call}"
    if is_first():
        _service().key_value_set_bytes(name, encode(value))
        return value
    return decode(_service().blocking_key_value_get_bytes(name, _PATIENCE_MS))


def gather(value: Value) -> list[Value]:
    """Returns the values of all processes, in their order; a collective call."""
    if count() == 1:
        return [value]
    call = next(_calls)
    folder = f"{_GATHERS}/{call}"
    _service().key_value_set_bytes(f"{folder}/{number()}", encode(value))
    _barrier(call)
    found = _service().key_value_dir_get_bytes(f"{folder}/")
    return [value for _, value in sorted(map(_parse, found))]


def run_on_all(action: Callable[[], Value]) -> Value:
    """Runs an action in every process; returns this one's result when all are done.

    If it fails in any, all raise the exception of the first process in which it did.
    """
    result, error = _attempt(action)
    for raised in gather(error):
        if raised is not None:
            raise raised
    return result  # pyright: ignore[reportReturnType]


def run_on_primary(action: Callable[[], Value]) -> Value:
    """Runs an action in the first process; all return its result or raise its error."""
    result, error = from_first(_attempt(action) if is_first() else (None, None))
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def post(name: str, value: Any) -> None:
    """Publishes a note to the other processes, replacing the last; thread-safe."""
    if count() > 1:
        _service().key_value_set_bytes(
            f"{_NOTES}/{name}/{number()}", encode(value), allow_overwrite=True
        )


def posted(name: str) -> dict[int, Any]:
    """Returns the notes of this name by process; thread-safe."""
    if count() == 1:
        return {}
    return dict(map(_parse, _service().key_value_dir_get_bytes(f"{_NOTES}/{name}/")))


class StopRequest:
    """A stop request to any process of the job, seen by all at the same call."""

    def __init__(self, event: threading.Event):
        self._event = event
        self._said = False

    def asked(self) -> bool:
        """Returns whether this process was asked; in the first, whether any was."""
        if self._event.is_set() and not self._said:
            self._said = True
            post("stop", True)
        return self._event.is_set() or (is_first() and bool(posted("stop")))

    def is_set(self) -> bool:
        """Returns whether any process was asked; a collective call."""
        return from_first(self.asked())


def fetch(tree: PyTree) -> PyTree:
    """Returns the global arrays of a tree on this host; a collective call."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)


def local_rows(array: jax.Array) -> np.ndarray:
    """Returns the rows (of the first axis) on this process's devices."""
    if array.is_fully_addressable:
        return np.asarray(array)
    # Devices along other axes of the mesh hold the same rows.
    parts = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])


def encode(value: Any) -> bytes:
    """Returns a message: None, bool, int, float, str, and lists, tuples, dictionaries
    and exceptions of these. Anything else is a TypeError.
    """
    return json.dumps(_packed(value)).encode()


def decode(message: bytes) -> Any:
    """Inverts `encode`, but for exceptions, of which class and text remain."""
    return _unpacked(json.loads(message))


def _attempt(action: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        if count() == 1:
            raise
        return None, error


def _barrier(call: int) -> None:
    service = _service()
    service.wait_at_barrier(f"{_GATHERS}-{call}", _PATIENCE_MS)
    if is_first():
        # All processes have read the earlier messages, but may still be reading the
        # values of this barrier.
        service.key_value_delete(f"{_BROADCASTS}/")
        for last in _last_barrier:
            service.key_value_delete(f"{_GATHERS}/{last}/")
        _last_barrier[:] = [call]


def _parse(note: tuple[str, bytes]) -> tuple[int, Any]:
    name, value = note
    return int(name.rpartition("/")[2]), decode(value)


def _packed(value: Any) -> Any:
    # JSON has lists alone, and names alone as keys.
    if isinstance(value, tuple):
        return {"tuple": [_packed(inner) for inner in value]}
    if isinstance(value, list):
        return [_packed(inner) for inner in value]
    if isinstance(value, Mapping):
        return {"dict": [[_packed(key), _packed(of)] for key, of in value.items()]}
    if isinstance(value, Exception):
        kinds = [[kind.__module__, kind.__qualname__] for kind in type(value).__mro__]
        return {"error": kinds, "text": str(value)}
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(packed: Any) -> Any:
    match packed:
        case list():
            return [_unpacked(inner) for inner in packed]
        case {"tuple": list(inner)}:
            return tuple(map(_unpacked, inner))
        case {"dict": list(items)}:
            return {_unpacked(key): _unpacked(of) for key, of in items}
        case {"error": list(kinds), "text": str(text)}:
            return _make_error(kinds, text)
        case dict():
            raise ValueError(f"expected a message of this job, got {packed!r:.80}")
    return packed


def _make_error(kinds: Sequence[Sequence[str]], text: str) -> Exception:
    """Returns an exception of the first of these classes that this process has, too."""
    for module, name in kinds:
        if module != "builtins" and not module.startswith("realm_jax."):
            continue
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:
                continue  # It is made of more than a text.
    return RuntimeError(text)


def _service() -> Any:
    # JAX has no public name for its client of the coordination service; Orbax uses
    # this one, too.
    return distributed.global_state.client
