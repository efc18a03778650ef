"""Damages what a run that was killed left in its scratch folder."""

import pathlib
import random


def flip_a_bit_of_each(scratch: pathlib.Path, seed: int) -> list[pathlib.Path]:
    """Flips a random bit of each file below a folder, and returns the files."""
    rng = random.Random(seed)
    files = sorted(path for path in scratch.rglob("*") if path.is_file())
    for path in files:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return files
