"""Puts rows of like length into batches of a few shapes."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

_PARTS = 4
_MULTIPLE = 8


def padded_lengths(longest: int) -> list[int]:
    """Returns the lengths that rows are padded to: quarters of the longest, ascending.

    Each is compiled once; more of them would save little padding.
    """
    quarters = (-(-longest * part // _PARTS) for part in range(1, _PARTS + 1))
    return sorted({min(q + -q % _MULTIPLE, longest) for q in quarters})


def batches_by_length(
    lengths: Int[np.ndarray, " row"], longest: int, batch_size: int
) -> Iterator[tuple[Int[np.ndarray, " some"], int]]:
    """Yields the rows of each batch, at most `batch_size`, and their padded length.

    That length depends on the row alone, so that what is computed of a row does not
    depend on the rows beside it. No row is longer than `longest`.
    """
    padded = np.array(padded_lengths(longest))
    chosen = padded[np.searchsorted(padded, lengths)]
    for length in np.unique(chosen):
        rows = np.flatnonzero(chosen == length)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size], int(length)


def fill(rows: Int[np.ndarray, " some"], count: int) -> Int[np.ndarray, " row"]:
    """Repeats the last row until there are `count`, as one shape is compiled."""
    return np.pad(rows, (0, count - len(rows)), mode="edge")
