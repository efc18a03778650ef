"""Which attempts there were, and who launches: the launcher's own notes.

    launch/<run>/launchers/<n>.json                  who launches; the last one does
    launch/<run>/<role>/<attempt>/attempt.json       written before slices are asked for
    launch/<run>/<role>/<attempt>/active.json        written when they are there
    launch/<run>/<role>/<attempt>/ended.json         written when they are gone

Both numbers are taken by creating an object, so of several launchers one gets
it. An attempt thus has one slice at most, whoever dies or comes twice.
"""

import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Sequence

from realm_jax.storage import AlreadyExistsError, Store
from tpu_launch.worker_state import attempt_folder, read_json, role_folder


class TakenOverError(Exception):
    """Another launcher has taken the run; its slices are not ours to delete."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt of a role.

    Attributes:
      number: of the attempt.
      begun: when slices were first asked for, in Unix seconds.
      price: of an hour of them on demand, or None.
      active: when a launcher first saw them active, or None; from then on they cost.
      ended: when they were gone, or None.
      reason: why they went.
    """

    number: int
    begun: float
    price: float | None
    active: float | None = None
    ended: float | None = None
    reason: str = ""


class Attempts:
    """The notes of a run, by the launcher that has it now."""

    def __init__(self, store: Store, run: str, now: float):
        """Takes the run; whoever had it before will notice."""
        self._store = store
        self._run = run
        self._me = uuid.uuid4().hex
        note = {
            "launcher": self._me,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": now,
        }
        self._number = self._take(f"launch/{run}/launchers", "{}.json", note)

    def require_ours(self) -> None:
        """Checks that nobody has taken the run since.

        Raises:
          TakenOverError: somebody has.
        """
        folder = f"launch/{self._run}/launchers"
        if _last(self._store, folder) > self._number:
            raise TakenOverError(
                f"{self._run} was launched anew elsewhere; this launcher ends, and "
                "leaves the slices to that one"
            )

    def begin(self, role: str, now: float, price: float | None) -> Attempt:
        """Takes the next number of a role."""
        note = {"launcher": self._me, "begun": now, "price": price}
        folder = role_folder(self._run, role)
        number = self._take(folder, "{}/attempt.json", note)
        return Attempt(number, now, price)

    def activate(self, role: str, attempt: Attempt, now: float) -> None:
        """Notes that the slices of an attempt are there, unless it is noted."""
        folder = attempt_folder(self._run, role, attempt.number)
        if not self._store.exists(f"{folder}/active.json"):
            note = json.dumps({"active": now}).encode()
            self._store.write(f"{folder}/active.json", note)

    def end(self, role: str, attempt: Attempt, now: float, reason: str) -> None:
        """Notes that the slices of an attempt are gone."""
        folder = attempt_folder(self._run, role, attempt.number)
        note = {"ended": now, "reason": reason}
        self._store.write(f"{folder}/ended.json", json.dumps(note).encode())

    def unended(self, role: str) -> Attempt | None:
        """Returns the last attempt of a role if its slices may still be there."""
        number = _last(self._store, role_folder(self._run, role))
        attempt = read_attempt(self._store, self._run, role, number)
        return attempt if attempt and attempt.ended is None else None

    def _take(self, folder: str, name: str, note: dict[str, object]) -> int:
        while True:
            number = _last(self._store, folder) + 1
            path = f"{folder}/{name.format(f'{number:03d}')}"
            try:
                self._store.create(path, json.dumps(note).encode())
            except AlreadyExistsError:
                continue
            return number


def read_attempt(store: Store, run: str, role: str, number: int) -> Attempt | None:
    """Returns what is noted of an attempt, or None if there was none."""
    folder = attempt_folder(run, role, number)
    begun = read_json(store, f"{folder}/attempt.json")
    if begun is None:
        return None
    active = read_json(store, f"{folder}/active.json") or {}
    ended = read_json(store, f"{folder}/ended.json") or {}
    return Attempt(
        number,
        begun["begun"],
        begun["price"],
        active.get("active"),
        ended.get("ended"),
        ended.get("reason", ""),
    )


def read_attempts(store: Store, run: str, role: str) -> list[Attempt]:
    """Returns all attempts of a role, in order."""
    last = _last(store, role_folder(run, role))
    found = (read_attempt(store, run, role, n) for n in range(1, last + 1))
    return [attempt for attempt in found if attempt is not None]


def cost(attempts: Sequence[Attempt], now: float) -> float | None:
    """Returns what attempts have cost so far; None if a price is not known.

    At the price on demand, from when they were active.
    """
    total = 0.0
    for attempt in attempts:
        if attempt.active is None:
            continue
        if attempt.price is None:
            return None
        hours = ((attempt.ended or now) - attempt.active) / 3600
        total += hours * attempt.price
    return total


def _last(store: Store, folder: str) -> int:
    """Returns the highest number in a folder, of an object or of a folder in it."""
    names = (name.removeprefix(f"{folder}/") for name in store.list(folder))
    numbers = (name.partition("/")[0].removesuffix(".json") for name in names)
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
