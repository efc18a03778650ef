"""Accumulates metrics as sums and counts, divided once, when they are written."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from clu.metrics import Average

from realm_jax.models.bert import PAD_ID
from realm_jax.types import Array

Means = dict[str, Average]
"""Total and count by metric name; device scalars until `compute`."""


def mean_of(total: Array, count: Array | float) -> Average:
    """Returns a metric with the value total / count, mergeable with others."""
    return Average.empty().replace(
        total=jnp.asarray(total, jnp.float32), count=jnp.asarray(count, jnp.float32)
    )


def padding_share(
    *ids: Array, packed: Iterable[tuple[Array, int | None]] = ()
) -> Average:
    """Returns the share of padding among the positions that models compute.

    `ids` are the inputs of each model in a step, of any shape; 0 is padding. `packed`
    are further ones, with the wordpieces of a row that two sequences share; None for a
    row for each.
    """
    sequences = [*((array, None) for array in ids), *packed]
    tokens = sum(jnp.sum(array != PAD_ID) for array, _ in sequences)
    num_positions = sum(
        array.size if length is None else _packed_size(array, length)
        for array, length in sequences
    )
    return mean_of(num_positions - jnp.asarray(tokens), num_positions)


def _packed_size(ids: Array, length: int) -> int:
    num_sequences = ids.size // ids.shape[-1]
    return -(-num_sequences // 2) * length


def merge(left: Means, right: Means) -> Means:
    """Adds totals and counts; a metric that only one side has is kept."""
    return {
        name: left[name].merge(right[name]) if name in left and name in right else mean
        for name, mean in {**left, **right}.items()
    }


def compute(means: Means) -> dict[str, float]:
    """Divides totals by counts; a metric with a count of 0 is left out."""
    host = jax.device_get(means)
    return {
        name: float(mean.total / mean.count)
        for name, mean in host.items()
        if mean.count > 0
    }
