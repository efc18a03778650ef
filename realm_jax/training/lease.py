"""Keeps a second trainer out of a model directory.

Two trainers in one directory would overwrite each other's metrics and checkpoints. The
one that trains holds a lease: `lease/<number>.json`, created only if it is absent, and
beside it `lease/<number>.beat.json`, which it writes again and again. Whoever comes
later watches that file, by its own clock, since clocks of machines differ. If the file
changes, the newcomer is refused; if not, its trainer is gone, and the newcomer creates
the lease with the next number. A trainer that was suspended meanwhile may wake up, so
it looks for a newer lease before it writes what its successor writes, too.

A lease carries its crc32c. A holder that finds its own unreadable, and none that is
newer, writes it anew.
"""

import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from realm_jax import multihost
from realm_jax.errors import BadInputError
from realm_jax.manifests import seal, unseal
from realm_jax.storage import AlreadyExistsError, MissingObjectError, Store

_FOLDER = "lease"
_BEAT_SECONDS = 5.0
# Several beats: a trainer that writes to a busy disk is not gone.
_STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_DAMAGED: dict[str, Any] = {}

_log = logging.getLogger(__name__)


class Lease:
    """The right of a job to train in a model directory; its first process holds it."""

    def __init__(self, store: Store, stale_seconds: float = _STALE_SECONDS):
        """Takes the lease, at once where its last holder has ended where this one runs.

        Elsewhere a holder may be silent for `stale_seconds`.
        """
        self._store = store
        self._released = threading.Event()
        # `Store.create` takes equal bytes for its own.
        self._claim = uuid.uuid4().hex
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": _pid_namespace(),
        }
        self._sealed = seal({**owner, "claim": self._claim})
        # Begin of the last look that was followed by a sign of life, by `_now`.
        self._last_held = -math.inf
        self._number = multihost.run_on_primary(lambda: self._acquire(stale_seconds))
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        if multihost.is_first():
            self._beat(0)
            self._thread.start()

    def require_held(self) -> None:
        """Requires that no other trainer has taken the lease over from a suspended job.

        It lists a folder and reads a small file. The first process calls it for all.
        """
        if not self.is_held():
            newest = self._newest()
            raise BadInputError(
                f"expected to train alone in {self._store.url()}, but "
                f"{self._holder(newest)} has taken over while this one was "
                "suspended; nothing more is saved here"
            )

    def is_held(self, *, lately: bool = False) -> bool:
        """Returns whether no other trainer has taken the lease over.

        The first process calls it. With `lately` a sign of life of the last seconds
        answers, which costs no request: nobody takes a lease over so soon after one.
        """
        if lately and _now() - self._last_held < 2 * _BEAT_SECONDS:
            return True
        newest = self._newest()
        owner = self._read(_name(newest))
        if owner != _DAMAGED or newest != self._number:
            return _is_by(owner, self._claim)
        _log.warning(
            "%s was damaged; it is written anew", self._store.url(_name(newest))
        )
        self._store.write(_name(newest), self._sealed)
        return self._newest() == newest

    def release(self) -> None:
        """Ends the lease; the next trainer need not wait."""
        if not multihost.is_first() or self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        # Numbers begin anew, so that a lease is known by its claim.
        owner = self._read(_name(self._number))
        if owner == _DAMAGED or _is_by(owner, self._claim):
            self._delete(self._number)

    def _acquire(self, stale_seconds: float) -> int:
        while True:
            newest = self._newest()
            if newest and not self._is_over(newest):
                self._require_silence(newest, stale_seconds)
                if self._newest() != newest:
                    continue  # It was released; there may be another newcomer.
            try:
                self._store.create(_name(newest + 1), self._sealed)
            except AlreadyExistsError:
                continue  # Another newcomer was faster.
            if newest:
                self._delete(newest)
            return newest + 1

    def _delete(self, number: int) -> None:
        self._store.delete(_beat_name(number))
        self._store.delete(_name(number))

    def _is_over(self, number: int) -> bool:
        """Returns whether the process that held a lease is known here to have ended."""
        owner = self._read(_name(number))
        if not owner or owner.get("pid_namespace") != _pid_namespace():
            return False
        pid = owner.get("pid")
        # A process with the number of this one was its predecessor.
        return pid == os.getpid() or not (isinstance(pid, int) and _is_alive(pid))

    def _require_silence(self, number: int, stale_seconds: float) -> None:
        """Watches a lease until it is stale or released; a sign of life is refused."""
        seen = self._read(_beat_name(number))
        deadline = time.monotonic() + stale_seconds
        _log.info("waiting for %s to end, or to be silent", self._holder(number))
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            if self._newest() != number or self._is_over(number):
                return
            if self._read(_beat_name(number)) != seen:
                raise BadInputError(
                    f"expected no other trainer in {self._store.url()}, but "
                    f"{self._holder(number)} is at work there; wait for its end, stop "
                    "it, or use another MODEL_DIR"
                )
        _log.warning("%s is silent; taking over", self._holder(number))

    def _newest(self) -> int:
        """Returns the number of the newest lease, 0 without one."""
        names = (name.rpartition("/")[2] for name in self._store.list(_FOLDER))
        stems = (name.partition(".")[0] for name in names)
        return max((int(stem) for stem in stems if stem.isdigit()), default=0)

    def _holder(self, number: int) -> str:
        owner = self._read(_name(number))
        if not owner:
            return "another trainer"
        return f"a trainer (process {owner.get('pid')} on {owner.get('host')})"

    def _keep(self) -> None:
        count = 0
        while not self._released.wait(_BEAT_SECONDS):
            count += 1
            try:
                began = _now()
                if not self.is_held():
                    self._last_held = -math.inf
                    return
                self._beat(count)
                self._last_held = began
            except (BadInputError, OSError) as error:
                # The next one may succeed; `require_held` tells whether it mattered.
                _log.warning("a sign of life could not be written: %s", error)

    def _beat(self, count: int) -> None:
        self._store.write(
            _beat_name(self._number), json.dumps({"beat": count}).encode()
        )

    def _read(self, name: str) -> dict[str, Any] | None:
        """Returns a JSON object; None if it is absent, `_DAMAGED` if it is damaged."""
        try:
            # Earlier releases wrote no checksum.
            return unseal(self._store.read(name), required=False)
        except MissingObjectError:
            return None
        except ValueError:
            return _DAMAGED


def _is_by(owner: dict[str, Any] | None, claim: str) -> bool:
    return owner is not None and owner.get("claim") == claim


def _name(number: int) -> str:
    return f"{_FOLDER}/{number}.json"


def _beat_name(number: int) -> str:
    return f"{_FOLDER}/{number}.beat.json"


def _now() -> float:
    # Unlike `time.monotonic` it goes on while the machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _pid_namespace() -> str:
    """Returns what names the set of processes to which a process number belongs.

    Containers of a machine, also those with its host name, do not see each other's.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Only Linux has these.
        return socket.gethostname()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
