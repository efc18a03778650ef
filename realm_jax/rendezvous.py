"""Waits until all processes of a job are there, and says which are not.

JAX waits in silence and then aborts the process, from C++. So the processes meet before
it starts: process 0 listens on the address of JAX's coordinator, which is free until
then, and the others tell it their numbers. It answers with those that are missing,
every half minute, and with none of them when all are there.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator

from realm_jax.errors import BadInputError, StoppedError

_POLL_SECONDS = 0.5
_LONGEST_LINE = 1 << 16
# What something else than process 0 may answer.
_NO_MESSAGE = (json.JSONDecodeError, UnicodeDecodeError)

_log = logging.getLogger(__name__)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port`, or of `[host]:port` for IPv6."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInputError(
            "expected JAX_COORDINATOR_ADDRESS as host:port of process 0, such as "
            f"10.0.0.2:8476, got {address!r}; add what is missing"
        )
    return host.strip("[]"), int(port)


def meet(
    address: tuple[str, int],
    listens_on: str,
    number: int,
    count: int,
    *,
    seconds: float,
    stop: threading.Event,
    every: float = 30.0,
) -> None:
    """Returns when all processes of a job have called it.

    Process 0 listens on host `listens_on`, "" for all interfaces, at the port of
    `address`. A line on who is waited for is logged `every` so many seconds.

    Raises:
      BadInputError: process 0 cannot listen there, or a process has not come in
        `seconds`.
      StoppedError: `stop` was set.
    """
    wait = _Wait(seconds, every, stop)
    if number == 0:
        _receive(address, listens_on, count, wait)
    else:
        _report(address, number, wait)


@contextlib.contextmanager
def reminders(missing: str, seconds: float, every: float = 30.0) -> Iterator[None]:
    """Logs every so many seconds that `missing` are waited for, at most for `seconds`.

    For a wait that says nothing itself: of the processes that a platform provides, JAX
    does not tell which have come.
    """
    over = threading.Event()

    def remind() -> None:
        began = time.monotonic()
        while not over.wait(every):
            waited = time.monotonic() - began
            _log.warning(
                "waiting for %s for %.0f s, at most %.0f s", missing, waited, seconds
            )

    thread = threading.Thread(target=remind, name="reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Wait:
    """How long to wait, and when to say so."""

    def __init__(self, seconds: float, every: float, stop: threading.Event):
        self._began = self._said = time.monotonic()
        self._seconds, self._every, self._stop = seconds, every, stop
        self.poll_seconds = min(_POLL_SECONDS, seconds, every)

    def is_time(self, missing: Iterable[int]) -> bool:
        """Returns whether to say who is missing; raises when waiting is over."""
        names = _names(missing)
        if self._stop.is_set():
            raise StoppedError(f"stopped while waiting for {names}")
        now = time.monotonic()
        if now - self._began >= self._seconds:
            raise _never_came(missing)
        if now - self._said < self._every:
            return False
        self._said = now
        _log.warning(
            "waiting for %s for %.0f s, at most %.0f s",
            names,
            now - self._began,
            self._seconds,
        )
        return True

    def rest(self) -> None:
        self._stop.wait(self.poll_seconds)

    def anew(self) -> "_Wait":
        """Returns one that begins now and outlasts that of process 0."""
        return _Wait(self._seconds + self._every, self._every, self._stop)


def _never_came(missing: Iterable[int]) -> BadInputError:
    return BadInputError(
        "expected all processes of the job within HostsConfig.start_seconds, but "
        f"{_names(missing)} did not come; start every process with the same "
        "JAX_COORDINATOR_ADDRESS, which all can reach, or wait longer"
    )


def _names(missing: Iterable[int]) -> str:
    numbers = sorted(missing)
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _receive(
    address: tuple[str, int], listens_on: str, count: int, wait: _Wait
) -> None:
    missing = set(range(1, count))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(address, listens_on))
        listener.settimeout(wait.poll_seconds)
        arrived: dict[int, socket.socket] = {}
        try:
            while missing:
                if wait.is_time(missing):
                    _tell(arrived.values(), sorted(missing))
                with contextlib.suppress(OSError, ValueError):
                    connection, _ = listener.accept()
                    stack.enter_context(connection)
                    connection.settimeout(wait.poll_seconds)
                    number = int(next(_lines(connection), b""))
                    if 0 < number < count:
                        arrived[number] = connection
                        missing.discard(number)
                        if missing:
                            _tell([connection], sorted(missing))
        except BadInputError:
            _tell(arrived.values(), {"missing": sorted(missing)})
            raise
        _tell(arrived.values(), [])


def _listen(address: tuple[str, int], listens_on: str) -> socket.socket:
    # By both versions of IP, as JAX does: a name may have an address of either.
    both = not listens_on and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in listens_on else socket.AF_INET
    place = (listens_on, address[1])
    try:
        return socket.create_server(place, family=family, dualstack_ipv6=both)
    except OSError as error:
        raise BadInputError(
            f"expected a free port for process 0 of the job at "
            f"{address[0]}:{address[1]}, got {error.strerror or error}; choose another "
            "port in JAX_COORDINATOR_ADDRESS, the same for all processes"
        ) from error


def _tell(connections: Iterable[socket.socket], message: object) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")


def _report(address: tuple[str, int], number: int, wait: _Wait) -> None:
    while True:
        with (
            contextlib.suppress(OSError, *_NO_MESSAGE),
            socket.create_connection(address, timeout=wait.poll_seconds) as connection,
        ):
            connection.sendall(f"{number}\n".encode())
            if _are_all_there(connection, wait.anew()):
                return
        wait.is_time([0])
        wait.rest()


def _are_all_there(connection: socket.socket, wait: _Wait) -> bool:
    """Returns whether process 0 said so, and not where it has gone."""
    missing: list[int] = [0]
    lines = _lines(connection)
    while True:
        try:
            line = next(lines, None)
        except TimeoutError:
            lines = _lines(connection)
            wait.is_time(missing)
            continue
        if line is None:
            return False
        heard = json.loads(line)
        if isinstance(heard, dict):
            raise _never_came(heard["missing"])
        if not heard:
            return True
        missing = heard


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Yields what arrives, line by line; TimeoutError if nothing does for too long."""
    with connection.makefile("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            yield line
