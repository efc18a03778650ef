"""Records the attempts of a run and its launchers in the model directory.

    launch/<run>/launchers/<n>.json                  a launcher; the last has the run
    launch/<run>/launchers/<n>-ended.json            that it has ended, and why
    launch/<run>/<role>/<attempt>/attempt.json       written before slices are requested
    launch/<run>/<role>/<attempt>/slices.json        their last state in the service
    launch/<run>/<role>/<attempt>/active.json        written when they are active
    launch/<run>/<role>/<attempt>/ended.json         written when they are deleted

Both numbers are claimed by creating an object, so that only one of several launchers
gets a number. An attempt thus has at most one slice, even if a launcher dies or runs
twice.
"""

import contextlib
import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Sequence

from realm_jax.errors import BadInputError
from realm_jax.storage import AlreadyExistsError, Store
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.worker_state import attempt_folder, damaged, read_json, role_folder

DEFAULT_CURRENCY = "USD"

# Exceptions that reading a malformed note can raise.
_DAMAGED = (BadInputError, AttributeError, KeyError, TypeError, ValueError)


class TakenOverError(Exception):
    """Raised when another launcher has the run, and its slices must not be deleted."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt of a role.

    Attributes:
      number: number of the attempt.
      begun: time of the first request for slices, in Unix seconds.
      price: price of the slices per hour on demand, or None.
      active: time at which a launcher first saw them active, or None; they cost money
        from then on.
      ended: time at which they were gone, or None.
      reason: why the attempt ended.
      currency: currency of the price.
      launcher: number of the launcher that began it.
    """

    number: int
    begun: float
    price: float | None
    active: float | None = None
    ended: float | None = None
    reason: str = ""
    currency: str = DEFAULT_CURRENCY
    launcher: int = 0


@dataclasses.dataclass(frozen=True)
class SlicesNote:
    """The last known state of the slices of an attempt.

    Attributes:
      state: state, as named by the Cloud TPU API.
      time: start of this state, in Unix seconds.
    """

    state: str
    time: float


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher of a run.

    Attributes:
      number: number of the launcher among those of the run.
      host: its machine.
      process: its process id.
      time: time at which it took the run, in Unix seconds.
      total_steps: total steps of the training, or None.
      ended: time at which it ended, with all slices deleted, or None.
      reason: why it ended.
    """

    number: int
    host: str
    process: int
    time: float
    total_steps: int | None = None
    ended: float | None = None
    reason: str = ""


class Attempts:
    """The records of a run, written by the launcher that currently has it."""

    def __init__(
        self, store: Store, run: str, now: float, total_steps: int | None = None
    ):
        """Takes the run; a launcher that had it before will notice.

        Args:
          store: the model directory.
          run: id of the run.
          now: time in Unix seconds.
          total_steps: total steps of the training, for display.
        """
        self._store = store
        self._run = run
        self._me = uuid.uuid4().hex
        note = {
            "launcher": self._me,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": now,
            "total_steps": total_steps,
        }
        self._number = self._take(f"launch/{run}/launchers", "{}.json", note)

    def require_ours(self) -> None:
        """Requires that no other launcher has taken the run.

        Raises:
          TakenOverError: another launcher has.
        """
        folder = f"launch/{self._run}/launchers"
        if _last(self._store, folder) > self._number:
            raise TakenOverError(
                f"{self._run} was launched anew elsewhere; this launcher ends, and "
                "leaves the slices to that one"
            )

    def close(self, now: float, reason: str) -> None:
        """Records that this launcher has ended, and that all slices are gone."""
        for role in (TRAINER, BUILDER):
            for attempt in read_attempts(self._store, self._run, role):
                if attempt.ended is None:
                    self.end(role, attempt, now, "run ended")
        path = f"launch/{self._run}/launchers/{self._number:03d}-ended.json"
        note = {"ended": now, "reason": reason}
        self._store.write(path, json.dumps(note).encode())

    def begin(
        self,
        role: str,
        now: float,
        price: float | None,
        currency: str = DEFAULT_CURRENCY,
    ) -> Attempt:
        """Claims the next attempt number of a role.

        Raises:
          TakenOverError: another launcher has taken the run; nothing may be created.
        """
        note = {
            "launcher": self._me,
            "launcher_number": self._number,
            "begun": now,
            "price": price,
            "currency": currency,
        }
        folder = role_folder(self._run, role)
        number = self._take(folder, "{}/attempt.json", note)
        attempt = Attempt(number, now, price, currency=currency, launcher=self._number)
        try:
            self.require_ours()
        except TakenOverError:
            self.end(role, attempt, now, "another launcher had the run")
            raise
        return attempt

    def note_slices(self, role: str, attempt: Attempt, state: str, now: float) -> None:
        """Records the state of slices in the service, if it has changed.

        The record is for display only, so a failure to write it is ignored.
        """
        with contextlib.suppress(BadInputError, OSError):
            noted = read_slices(self._store, self._run, role, attempt.number)
            if noted is None or noted.state != state:
                folder = attempt_folder(self._run, role, attempt.number)
                note = json.dumps({"state": state, "time": now}).encode()
                self._store.write(f"{folder}/slices.json", note)

    def activate(self, role: str, attempt: Attempt, now: float) -> None:
        """Records that the slices of an attempt are active, unless that is recorded."""
        folder = attempt_folder(self._run, role, attempt.number)
        if not self._store.exists(f"{folder}/active.json"):
            note = json.dumps({"active": now}).encode()
            self._store.write(f"{folder}/active.json", note)

    def end(self, role: str, attempt: Attempt, now: float, reason: str) -> None:
        """Records that the slices of an attempt are gone."""
        folder = attempt_folder(self._run, role, attempt.number)
        note = {"ended": now, "reason": reason}
        self._store.write(f"{folder}/ended.json", json.dumps(note).encode())

    def unended(self, role: str) -> Attempt | None:
        """Returns the last attempt of a role if its slices may still exist.

        It is that of the latest launcher: one that had lost the run may have claimed a
        higher number.
        """
        attempts = read_attempts(self._store, self._run, role)
        last = max(attempts, key=lambda a: (a.launcher, a.number), default=None)
        return last if last and last.ended is None else None

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
    """Returns the record of an attempt, or None if there was none.

    Raises:
      BadInputError: the record is malformed.
    """
    folder = attempt_folder(run, role, number)
    begun = read_json(store, f"{folder}/attempt.json")
    if begun is None:
        return None
    active = read_json(store, f"{folder}/active.json") or {}
    ended = read_json(store, f"{folder}/ended.json") or {}
    try:
        return Attempt(
            number,
            float(begun["begun"]),
            _number(begun["price"]),
            _number(active.get("active")),
            _number(ended.get("ended")),
            str(ended.get("reason", "")),
            str(begun.get("currency", DEFAULT_CURRENCY)),
            int(begun.get("launcher_number", 0)),
        )
    except _DAMAGED as error:
        raise damaged(store, folder) from error


def read_attempts(store: Store, run: str, role: str) -> list[Attempt]:
    """Returns all attempts of a role, in order."""
    numbers = attempt_numbers(store, run, role)
    found = (read_attempt(store, run, role, number) for number in numbers)
    return [attempt for attempt in found if attempt is not None]


def attempt_numbers(store: Store, run: str, role: str) -> list[int]:
    """Returns the numbers of a role's attempts, in order."""
    return _numbers(store, role_folder(run, role))


def read_slices(store: Store, run: str, role: str, number: int) -> SlicesNote | None:
    """Returns the last recorded state of slices, or None if there is none."""
    with contextlib.suppress(*_DAMAGED):
        note = read_json(store, f"{attempt_folder(run, role, number)}/slices.json")
        if note is not None:
            return SlicesNote(str(note["state"]), float(note["time"]))
    return None


def read_launcher(store: Store, run: str) -> Launcher | None:
    """Returns the last launcher of a run, or None if there is none or it is malformed.

    Raises:
      UnavailableStoreError: the model directory is unavailable.
    """
    folder = f"launch/{run}/launchers"
    number = _last(store, folder)
    # A record is for display: a malformed one is treated as missing.
    with contextlib.suppress(*_DAMAGED):
        note = read_json(store, f"{folder}/{number:03d}.json") or {}
        steps = _number(note.get("total_steps"))
        launcher = Launcher(
            number,
            str(note["host"]),
            int(note["process"]),
            float(note["time"]),
            None if steps is None else int(steps),
        )
        with contextlib.suppress(*_DAMAGED):
            ended = read_json(store, f"{folder}/{number:03d}-ended.json") or {}
            return dataclasses.replace(
                launcher, ended=float(ended["ended"]), reason=str(ended["reason"])
            )
        return launcher
    return None


def cost(attempts: Sequence[Attempt], now: float) -> float | None:
    """Returns the cost of attempts so far; None if a price is not known.

    It is the price on demand, from the time when slices were active.
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


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # pyright: ignore[reportArgumentType]


def _last(store: Store, folder: str) -> int:
    return max(_numbers(store, folder), default=0)


def _numbers(store: Store, folder: str) -> list[int]:
    """Returns the numbers in a folder, of objects or of folders in it, in order."""
    names = (name.removeprefix(f"{folder}/") for name in store.list(folder))
    stems = {name.partition("/")[0].removesuffix(".json") for name in names}
    return sorted(int(stem) for stem in stems if stem.isdecimal())
