"""Assigns articles to splits by hash, independently of order and without a list."""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

TRAIN = "train"
VALIDATION = "validation"

VALIDATION_FRACTION = 0.01
"""Share of the articles that are held out from training."""


def stable_uniform(*key: int | str) -> float:
    """Returns a pseudorandom number in [0, 1) that depends on `key` alone.

    It is the same on every machine and in every version of Python and NumPy.
    """
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    # 53 bits are exact in a float; all 64 could round up to 1.0.
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_held_out(source_id: str, fraction: float = VALIDATION_FRACTION) -> bool:
    """Returns whether an article belongs to the validation split.

    All blocks of an article are in the same split. A larger fraction holds out a
    superset of the articles that a smaller one does.
    """
    return stable_uniform("validation", source_id) < fraction


def share_of_at_least_one(source_ids: Iterable[str], fraction: float) -> float:
    """Returns the fraction that holds out `fraction` of articles, and at least one.

    It is `fraction` itself unless that would hold out none of them: then the article
    that a growing fraction would hold out first is held out alone. 0 stays 0. Ids are
    read up to the first that is held out.
    """
    first = 1.0
    for source_id in source_ids:
        first = min(first, stable_uniform("validation", source_id))
        if first < fraction:
            break
    return math.nextafter(first, 1.0) if 0 < fraction <= first else fraction


def held_out(
    source_ids: Iterable[str], fraction: float = VALIDATION_FRACTION
) -> Bool[np.ndarray, " block"]:
    """Returns `is_held_out` of each article id."""
    return np.array([is_held_out(source, fraction) for source in source_ids], bool)
