"""Draws random numbers that an update depends on, the same in every process.

They are functions of the seed, the step and a stream alone, so that a resumed run and
all processes of a job draw the same ones.
"""

import enum

import numpy as np
from jaxtyping import Float


class Stream(enum.IntEnum):
    """What numbers of the same seed and step are drawn for."""

    DOCUMENTS = 1
    UNMASKED = 2
    PSEUDO_QUERIES = 3


def uniform(
    stream: Stream, seed: int, step: int, *shape: int
) -> Float[np.ndarray, "..."]:
    """Returns numbers in [0, 1), the first of which do not depend on their number."""
    # Raw bits, which NumPy guarantees to keep from version to version.
    bits = np.random.Philox(key=[seed, step], counter=[0, 0, 0, stream])
    drawn = bits.random_raw(int(np.prod(shape))) >> np.uint64(11)
    return (drawn * 2.0**-53).reshape(shape)
