"""Folders that `realm prepare` leaves: what is in them, and damage to it."""

import pathlib
import random

from tests.flipped import flip


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the bytes of every file below a folder, by its path from there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip_a_bit_of_each(scratch: pathlib.Path, seed: int) -> list[pathlib.Path]:
    """Flips a random bit of each file below a folder, and returns the files."""
    rng = random.Random(seed)
    files = sorted(path for path in scratch.rglob("*") if path.is_file())
    for path in files:
        flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
    return files
