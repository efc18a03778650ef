"""Damages every bit of a small file."""

import contextlib
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


def read_flipped(path: pathlib.Path, read: Callable[[], Any]) -> list[Any]:
    """Returns what is read of a file for each of its bits that is not refused."""
    sound, found = path.read_bytes(), []
    for data in flipped(sound):
        path.write_bytes(data)
        with contextlib.suppress(BadInputError):
            found.append(read())
    path.write_bytes(sound)
    return found
