"""Which articles are held out, decided by hash: no list to keep, no order to matter."""

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

TRAIN = "train"
VALIDATION = "validation"

VALIDATION_FRACTION = 0.01
"""Share of the articles that no training example is made from."""


def stable_uniform(*key: int | str) -> float:
    """Returns a number in [0, 1) that looks random and depends on `key` alone.

    The same on every machine and in every version of Python and NumPy.
    """
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    # 53 bits are exact in a float; all 64 could round up to 1.0.
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_held_out(source_id: str, fraction: float = VALIDATION_FRACTION) -> bool:
    """Whether an article belongs to the validation split.

    All blocks of an article fall on the same side. A larger fraction holds out a
    superset of what a smaller one does.
    """
    return stable_uniform("validation", source_id) < fraction


def held_out(
    source_ids: Iterable[str], fraction: float = VALIDATION_FRACTION
) -> Bool[np.ndarray, " block"]:
    """Returns `is_held_out` of each."""
    return np.array([is_held_out(source, fraction) for source in source_ids], bool)
