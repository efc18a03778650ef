"""Runs a model within a loss: dropout keys, and batches in parts.

`microbatches` is the number of parts of a batch that pass through a model one after
the other, forward and backward. The loss and its gradient are unchanged, also where
examples are compared with each other, in the memory of one part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import PyTree

from realm_jax.types import Array


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """Returns one dropout key per forward pass; None for each without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def run_model(
    model: nn.Module,
    params: PyTree,
    *inputs: Array,
    key: jax.Array | None,
    method: str | None = None,
    microbatches: int = 1,
    **options: Any,
) -> Any:
    """Runs a method of a model on arrays of a batch; no key means no dropout."""

    def run(key: jax.Array | None, *inputs: Array) -> Any:
        return model.apply(
            {"params": params},
            *inputs,
            deterministic=key is None,
            method=method,
            rngs=None if key is None else {"dropout": key},
            **options,
        )

    if microbatches == 1:
        return run(key, *inputs)
    keys = None if key is None else jax.random.split(key, microbatches)
    # The backward pass recomputes each part; only its inputs are kept.
    outputs = jax.lax.map(
        lambda part: jax.checkpoint(run)(*part),
        (keys, *(split_batch(array, microbatches) for array in inputs)),
    )
    return jax.tree.map(join_batch, outputs)


def split_batch(array: Array, parts: int) -> Array:
    """Reshapes [batch, ...] to [part, example, ...].

    Every n-th example goes to the same part, so that each part is spread over the
    devices as the batch is.
    """
    return jnp.swapaxes(array.reshape(-1, parts, *array.shape[1:]), 0, 1)


def join_batch(array: Array) -> Array:
    """Inverts `split_batch`."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])
