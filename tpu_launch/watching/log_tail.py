"""Finds the new lines of a log of which only the end is stored.

Every minute, a worker replaces `<worker>.log` by the last 256 KiB of its command's
output, from the beginning of a line (`reporter.py`).
"""

MISSING = "[lines may be missing here]"
"""Stands for lines that were overwritten between two reads."""


class Tail:
    """A log, reconstructed from its consecutive ends."""

    def __init__(self):
        self._last = b""
        self._rest = b""

    def see(self, end: bytes) -> list[str]:
        """Returns the complete lines that are new in the end of a log.

        An incomplete last line is kept until it is complete.

        Args:
          end: the end of the log, from the beginning of a line.
        """
        length = overlap(self._last, end)
        begins_anew = bool(self._last) and not length
        before = [*self.rest(), MISSING] if begins_anew and end else []
        self._last = end
        *whole, self._rest = (self._rest + end[length:]).split(b"\n")
        return [*before, *map(_text, whole)]

    def rest(self) -> list[str]:
        """Returns the incomplete last line, if any, at the end of the log."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


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


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
