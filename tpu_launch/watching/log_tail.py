"""What is new in a log of which only ever the end is seen.

A worker replaces `<worker>.log` every minute by the last 256 KiB of what its command
wrote, from the beginning of a line (`reporter.py`).
"""

MISSING = "[lines may be missing here]"
"""In place of what was written between two looks and was not seen."""


class Tail:
    """A log, from the ends of it that were seen one after the other."""

    def __init__(self):
        self._last = b""
        self._rest = b""

    def see(self, end: bytes) -> list[str]:
        """Returns the whole lines that are new in the end of a log.

        What follows the last of them is kept, until its line is whole.

        Args:
          end: of the log, from the beginning of a line.
        """
        length = overlap(self._last, end)
        begins_anew = bool(self._last) and not length
        before = [*self.rest(), MISSING] if begins_anew and end else []
        self._last = end
        *whole, self._rest = (self._rest + end[length:]).split(b"\n")
        return [*before, *map(_text, whole)]

    def rest(self) -> list[str]:
        """Returns the last line, though it is not whole, for no more will come."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def overlap(last: bytes, end: bytes) -> int:
    """Returns how much of a log's end was seen before, in bytes.

    That is the longest end of what was seen last that the new one begins with. It
    begins with a line in both: a line's end may look like another line.
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
