"""Reads the logs of workers in a store, as they grow."""

import threading
from collections.abc import Callable, Iterator

from realm_jax.storage import MissingObjectError, Store

MISSING = "[lines may be missing here]"
"""Stands for lines that were overwritten between two reads."""

_LOG = ".log"
_POLL_SECONDS = 5.0


def stored_lines(
    store: Store,
    folder: str,
    role: str | None,
    worker: int | None,
    follow: bool,
    stop: threading.Event,
    is_over: Callable[[], bool],
) -> Iterator[tuple[str, str]]:
    """Yields the lines of logs in a store, as pairs of a worker and a line.

    Args:
      store: the store.
      folder: its folder of `<name>-<role>-<number>/<worker>.log`, of which for each
        worker the one counts that was written last, or "".
      role: role whose logs to read; None for both.
      worker: number of the worker; None for all.
      follow: whether to go on with new lines.
      stop: set when asked to stop.
      is_over: whether nothing more will be written.

    Raises:
      BadInputError: the store cannot be read.
      UnavailableStoreError: the store does not answer.
    """
    tails: dict[str, Tail] = {}
    while True:
        # What is written last is still read.
        was_over = not follow or is_over()
        for (of_role, of_worker), name in _newest(store, folder).items():
            if role in (None, of_role) and worker in (None, of_worker):
                try:
                    end = store.read(name)
                except MissingObjectError:
                    continue
                tail = tails.setdefault(name, Tail())
                for line in tail.see(end, was_over):
                    yield f"{of_role}/{of_worker}", line
        if was_over or stop.wait(_POLL_SECONDS):
            return


def _newest(store: Store, folder: str) -> dict[tuple[str, int], str]:
    """Returns the log of each worker that was written last, by role and number."""
    found: dict[tuple[str, int], tuple[float, str]] = {}
    for path, stat in store.stats(folder).items():
        name, _, file = path.rpartition("/")
        parts, number = name.rpartition("/")[2].split("-"), file.removesuffix(_LOG)
        if len(parts) < 2 or not (number.isdecimal() and parts[-1].isdecimal()):
            continue
        key = parts[-2], int(number)
        found[key] = max(found.get(key, (0.0, "")), (stat.modified, path))
    return {key: path for key, (_, path) in sorted(found.items())}


class Tail:
    """A log, reconstructed from its consecutive ends, of which only the last is stored.

    Every minute, a worker replaces its log in the model directory by the last 256 KiB
    of its command's output, from the beginning of a line.
    """

    def __init__(self):
        self._last = b""

    def see(self, end: bytes, is_last: bool) -> list[str]:
        """Returns the lines that are new in the end of a log.

        Args:
          end: the end of the log, from the beginning of a line.
          is_last: whether nothing more is read. Else an incomplete last line is left
            for the next call.
        """
        if not is_last:
            end = end[: end.rfind(b"\n") + 1]
        length = overlap(self._last, end)
        begins_anew = bool(self._last) and not length
        self._last = end
        lines = end[length:].decode(errors="replace").splitlines()
        return [MISSING, *lines] if begins_anew and lines else lines


def overlap(last: bytes, end: bytes) -> int:
    """Returns the length of the known part of a log's new end, in bytes.

    That is the longest suffix of the last end that is a prefix of the new one. It must
    begin at a line start in both, because the end of a line may equal another line.
    """
    if end.startswith(last):
        return len(last)
    seen, new = memoryview(last), memoryview(end)
    start = last.find(b"\n") + 1
    while 0 < start < len(last):
        length = len(last) - start
        if seen[start:] == new[:length]:
            return length
        start = last.find(b"\n", start) + 1
    return 0
