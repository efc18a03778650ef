"""Damages every bit of a small file."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from realm_jax.errors import BadInputError


def flipped(data: bytes) -> Iterator[bytes]:
    """Yields the data with one bit changed, for each of its bits."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def flip(path: pathlib.Path, place: int = -1, bits: int = 1) -> None:
    """Changes bits of one byte of a file, of the last one unless it is said which."""
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def read_flipped(
    path: pathlib.Path, read: Callable[[], Any], every: int = 1
) -> list[Any]:
    """Returns what is read of a file for each of its bits that is not refused.

    Of a large file only `every` so many bits are changed.
    """
    sound, found = path.read_bytes(), []
    for data in itertools.islice(flipped(sound), 0, None, every):
        path.write_bytes(data)
        with contextlib.suppress(BadInputError):
            found.append(read())
    path.write_bytes(sound)
    return found
