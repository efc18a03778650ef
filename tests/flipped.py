"""Damages every bit of a small file."""

from collections.abc import Iterator


def flipped(data: bytes) -> Iterator[bytes]:
    """Yields the data with one bit changed, for each of its bits."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
