"""Deletes slices, and returns only once they are gone."""

from collections.abc import Callable, Mapping, Sequence

from realm_jax.errors import BadInputError, NoAccessError
from tpu_launch.backends.backend import Backend, BusyError, FoundSlice, SliceState
from tpu_launch.clock import Clock
from tpu_launch.operations import DeleteSlice

_DELETING_SECONDS = 1800.0


class GaveUpError(Exception):
    """Raised when a run or a deletion is given up unfinished; one line says why."""


def delete_all(
    backend: Backend,
    find: Callable[[], Sequence[FoundSlice]],
    clock: Clock,
    say: Callable[[str], None],
    not_before: float = 0.0,
    first_look: float = 5.0,
    known: Sequence[FoundSlice] = (),
) -> None:
    """Deletes slices, and returns when they are gone.

    Args:
      backend: executes operations.
      find: returns the slices that still exist.
      clock: the clock.
      say: prints messages.
      not_before: time until which to keep polling, for slices that may yet appear.
      first_look: seconds until the second poll; the interval then grows.
      known: the slices last seen, to name while `find` fails.

    Raises:
      GaveUpError: some still exist after half an hour; they cost money until they are
        deleted.
    """
    give_up = max(clock.now(), not_before) + _DELETING_SECONDS
    seconds, left, said = first_look, known, ""
    while True:
        try:
            left = find()
            if not left and clock.now() >= not_before:
                return
            said = _delete_each(backend, left, say)
        except (BusyError, NoAccessError) as error:
            said = str(error)
        except BadInputError as error:
            raise GaveUpError(_left_over(left, str(error))) from error
        if said:
            say(f"deleting again: {said}")
        if clock.now() >= give_up:
            raise GaveUpError(_left_over(left, said))
        clock.wait_anyway(seconds)
        seconds = min(2 * seconds, 12 * first_look)


def found_in(
    backend: Backend, zones: Sequence[str], labels: Mapping[str, str | None]
) -> list[FoundSlice]:
    """Returns the slices with the given labels in all of these zones."""
    return [one for zone in zones for one in backend.find(zone, labels)]


def _delete_each(
    backend: Backend, slices: Sequence[FoundSlice], say: Callable[[str], None]
) -> str:
    """Starts to delete each slice; returns the last error, or ""."""
    said = ""
    for one in slices:
        if one.state == SliceState.DELETING:
            continue
        say(f"deleting {one.name} in {one.zone}")
        try:
            backend.delete(DeleteSlice(one.name, one.zone))
        # What is refused of one slice must not keep the others.
        except (BusyError, BadInputError) as error:
            said = str(error)
    return said


def _left_over(slices: Sequence[FoundSlice], said: str) -> str:
    names = ", ".join(one.name for one in slices) or "the slices"
    because = f" ({said})" if said else ""
    return (
        f"could not delete {names}{because}; they cost money until they are gone: run "
        "`python -m tpu_launch down`, or delete them in the console"
    )
