"""Updates that pack two documents into one row, where the documents of a batch fit.

Which documents a step retrieves is only known within it, and so are their lengths, but
the shapes of its program are fixed. An update is therefore compiled twice, packed and
not, and each step runs the one that its documents fit. Two documents that are both long
are not packed with each other (`models/packing.py`), so that rows hardly longer than a
padded document fit most batches of a corpus whose documents are half as long.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, PyTree

from realm_jax.metrics.means import Means, mean_of
from realm_jax.models import packing
from realm_jax.training.model_calls import split_batch
from realm_jax.types import Array

Inputs = TypeVar("Inputs")
Auxiliary = TypeVar("Auxiliary")


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Wordpieces of a row that two sequences share; None for a row for each."""

    document: int | None = None
    joined: int | None = None


UNPACKED = PackedLengths()

Compute = Callable[[PackedLengths, PyTree, Inputs, jax.Array], tuple[Array, Auxiliary]]
"""A loss: (lengths of rows, parameters, inputs, key) to a scalar and what is beside
it."""

Sequences = Iterable[tuple[Int[Array, "*batch length"], int | None]]
"""Wordpieces of a model's inputs, 0 where padded, each with the length of their packed
rows, None if they are not packed."""


def compute_packed(
    compute: Compute[Inputs, Auxiliary],
    lengths: PackedLengths | None,
    sequences: Callable[[PackedLengths], Sequences],
    microbatches: int,
    params: PyTree,
    inputs: Inputs,
    key: jax.Array,
) -> tuple[Array, Auxiliary, Means]:
    """Computes a loss with packed rows if all its sequences fit, else without packing.

    Only the scalar has a gradient, and only with respect to `params`. The sequences of
    each microbatch are packed by themselves. Returns the scalar, what is beside it, and
    the metric `packed`, the share of updates that packed; without lengths there is
    none, and one program is compiled.
    """
    if lengths is None:
        loss, auxiliary = compute(UNPACKED, params, inputs, key)
        return loss, auxiliary, {}
    fits = _all_fit(sequences(lengths), microbatches)
    loss, auxiliary = _packed_if(fits, compute, lengths, params, inputs, key)
    return loss, auxiliary, {"packed": mean_of(fits, 1.0)}


def _all_fit(sequences: Sequences, microbatches: int) -> Bool[Array, ""]:
    found = jnp.array(True)
    for ids, length in sequences:
        if length is not None:
            parts = split_batch(jnp.asarray(ids), microbatches)
            parts = jnp.reshape(parts, (microbatches, -1, ids.shape[-1]))
            fits = jax.vmap(functools.partial(packing.fits, length=length))(parts)
            found &= fits.all()
    return found


def _packed_if(
    fits: Bool[Array, ""],
    compute: Compute[Inputs, Auxiliary],
    lengths: PackedLengths,
    params: PyTree,
    inputs: Inputs,
    key: jax.Array,
) -> tuple[Array, Auxiliary]:
    """Computes a loss with packed rows if they fit, else without packing.

    Both programs compute the gradient together with the scalar: if they kept their
    intermediate results for a backward pass instead, those of both would be in memory.
    """
    branches = [functools.partial(compute, each) for each in (lengths, UNPACKED)]

    @jax.custom_vjp
    def run(params: PyTree, fits: Array, inputs: Inputs, key: jax.Array) -> Any:
        return jax.lax.cond(fits, *branches, params, inputs, key)

    def forward(params: PyTree, fits: Array, inputs: Inputs, key: jax.Array) -> Any:
        with_gradients = [jax.value_and_grad(each, has_aux=True) for each in branches]
        return jax.lax.cond(fits, *with_gradients, params, inputs, key)

    def backward(gradient: PyTree, cotangents: Any) -> Any:
        of_scalar, _ = cotangents
        return jax.tree.map(lambda g: g * of_scalar, gradient), None, None, None

    run.defvjp(forward, backward)
    return run(params, fits, inputs, key)
