"""Chooses how much of a ScaNN tree a search visits, by measurement.

The shape of the tree follows from the number of blocks. How many of its leaves have to
be visited does not: it depends on how the queries lie among the blocks. ScaNN takes the
numbers of leaves and of rescored candidates with every search, so they are chosen for a
tree that is built, on queries whose neighbours are known.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

# Blocks per leaf on which k-means is trained.
_TRAINED_ON_PER_LEAF = 60
# Candidates that are rescored: few lose neighbours to the error of the codes, which no
# number of leaves makes up for.
_RESCORED = (50, 100, 200, 400)
# Cost of reading and scoring a row, in codes that are scored meanwhile.
_CODES_PER_ROW = 25


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a search reads: codes of `leaves`, and rows of `reordered` candidates."""

    leaves: int
    reordered: int


def tree_shape(num_blocks: int) -> tuple[int, int]:
    """Returns the number of leaves, and of the blocks that k-means is trained on."""
    leaves = min(num_blocks, 2 * math.isqrt(num_blocks))
    return leaves, min(num_blocks, _TRAINED_ON_PER_LEAF * leaves)


def usual_leaves(num_blocks: int) -> int:
    """Returns the number of leaves to visit where no queries are at hand.

    The share falls with the fourth root of the number of blocks, from 30 % of 32,570
    blocks of text (docs/benchmarks.md).
    """
    leaves, _ = tree_shape(num_blocks)
    return max(1, min(leaves, round(4 * leaves / num_blocks**0.25)))


def share_found(
    found: Int[np.ndarray, "query k"], exact: Int[np.ndarray, "query k"]
) -> float:
    """Returns recall@k: the share of the exact neighbours that were found."""
    pairs = zip(found, exact, strict=True)
    return float(np.mean([np.isin(wanted, row).mean() for row, wanted in pairs]))


def cheapest_visit(
    recall_of: Callable[[Visit], float],
    recall: float,
    *,
    num_blocks: int,
    num_leaves: int,
    leaves: int | None = None,
    reordered: int | None = None,
) -> Visit | None:
    """Returns the cheapest visit with this recall, None if there is none.

    Costs are counted, not timed, so that the same tree and queries give the same
    choice on every machine. Leaves are doubled until they are enough, then bisected:
    together the searches take some twenty times as long as the one that is chosen.
    """
    best = None
    for rescored in _RESCORED if reordered is None else [reordered]:
        # More leaves than this, and the visit would cost more than the best so far.
        most = num_leaves
        if best is not None:
            saved = (rescored - best.reordered) * _CODES_PER_ROW
            most = best.leaves - math.ceil(saved * num_leaves / num_blocks)
        few, most = (1, most) if leaves is None else (leaves, min(leaves, most))
        if few > most:
            break
        found = _least_visit(recall_of, recall, range(few, most + 1), rescored)
        best = found or best
    return best


def _least_visit(
    recall_of: Callable[[Visit], float], recall: float, leaves: range, reordered: int
) -> Visit | None:
    too_few, count = leaves.start - 1, leaves.start
    while recall_of(Visit(count, reordered)) < recall:
        if count == leaves[-1]:
            return None
        too_few, count = count, min(2 * count, leaves[-1])
    while count - too_few > 1:
        middle = (too_few + count) // 2
        if recall_of(Visit(middle, reordered)) >= recall:
            count = middle
        else:
            too_few = middle
    return Visit(count, reordered)
