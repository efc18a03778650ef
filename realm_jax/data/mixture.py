"""Mixes sets of examples, each with a share of all that an update sees.

Of every thousand examples in a row, a set has exactly its share, in an order that is
drawn anew for each thousand. Each set is visited in epochs of its own, as if it were
alone (`batch_order.py`). So everything follows from the seed and the step, and a small
set comes round more often than a large one.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int, Int64

from realm_jax.data.batch_order import Spans, shuffled, visited
from realm_jax.data.examples import Examples, Feature
from realm_jax.data.features import Example, FeatureSpecs
from realm_jax.errors import BadInputError

CYCLE = 1000
"""Examples in a row of which each set has its share."""

_order = shuffled.__wrapped__  # Whose cache is too small for several sets.

_OPTIONAL = {"answer_patterns"}
"""Features that a set may lack, because zeros mean that there is nothing."""


class Mixture:
    """Sets of examples in given shares, read as `Examples` are.

    Rows are numbered through all sets, in their order.

    Attributes:
      specs: shape and type of each feature: those of the widest set. What a narrower
        one lacks is 0, which is padding.
      features: each feature of all examples.
    """

    def __init__(self, sets: Mapping[str, Examples], shares: Sequence[int]):
        """Mixes sets.

        Args:
          sets: the examples by the names of their tasks.
          shares: how many of `CYCLE` examples are of each set; all of them together.
        """
        self._sets = list(sets.values())
        self.specs = common_specs({name: one.specs for name, one in sets.items()})
        self._starts = np.cumsum([0, *map(len, self._sets)])
        self.features = {name: Feature(self, name) for name in self.specs}
        self._in_cycle = shares
        # A batch can reach from one epoch of each set into the next.
        self._shuffled = functools.lru_cache(2 * len(sets))(_order)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return int(self._starts[-1])

    def step_rows(
        self,
        step: int,
        *,
        batch_size: int,
        seed: int,
        spans: Spans = Spans.ONE_PER_SENTENCE,
    ) -> Int64[np.ndarray, " batch"]:
        """Returns the rows of a step's batch; see `Examples.step_rows`."""
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        kinds, places = self._drawn(positions, seed)
        rows = np.empty_like(positions)
        for kind, (first, end) in enumerate(itertools.pairwise(self._starts)):
            here = kinds == kind
            _, found = visited(end - first, places[here], seed, self._shuffled)
            rows[here] = first + found
        return rows

    def batch(self, indices: Int[np.ndarray, " batch"] | slice) -> Example:
        """Returns the examples at `indices`, in the given order."""
        rows = np.arange(len(self))[indices]
        kinds = np.searchsorted(self._starts, rows, side="right") - 1
        found = {
            name: np.zeros((len(rows), *spec.shape), spec.dtype)
            for name, spec in self.specs.items()
        }
        for kind in np.unique(kinds):
            (here,) = np.nonzero(kinds == kind)
            part = self._sets[kind].batch(rows[here] - self._starts[kind])
            for name, array in part.items():
                columns = tuple(slice(0, size) for size in array.shape[1:])
                found[name][(here, *columns)] = array
        return found

    def together(self, indices: Int[np.ndarray, " batch"]) -> Example:
        """Returns `batch`: questions are not of one sentence."""
        return self.batch(indices)

    def _drawn(
        self, positions: Int64[np.ndarray, " batch"], seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the set of each position, and how many it had before in that set."""
        kinds, places = np.empty_like(positions), np.empty_like(positions)
        cycles, offsets = np.divmod(positions, CYCLE)
        sorted_kinds = np.repeat(np.arange(len(self._sets)), self._in_cycle)
        for cycle in np.unique(cycles):
            inside = cycles == cycle
            drawn = sorted_kinds[_order(CYCLE, seed, int(cycle))]
            of_kind = np.empty_like(drawn)
            for kind, count in enumerate(self._in_cycle):
                of_kind[drawn == kind] = cycle * count + np.arange(count)
            kinds[inside] = drawn[offsets[inside]]
            places[inside] = of_kind[offsets[inside]]
        return kinds, places


def common_specs(specs: Mapping[str, FeatureSpecs]) -> FeatureSpecs:
    """Returns the features of a mixture.

    Args:
      specs: features of the sets by the names of their tasks.
    """
    (first, expected), *others = specs.items()
    for name, found in others:
        if (expected.keys() ^ found.keys()) - _OPTIONAL:
            raise BadInputError(
                f"expected the features of {first} ({', '.join(expected)}) in {name}, "
                f"which is mixed with it, got {', '.join(found)}; prepare both with "
                "this version"
            )
    merged = dict(expected)
    for _, found in others:
        for name, spec in found.items():
            shapes = merged.get(name, spec).shape, spec.shape
            widest = tuple(map(max, *shapes)) if spec.shape else ()
            merged[name] = jax.ShapeDtypeStruct(widest, spec.dtype)
    return merged
