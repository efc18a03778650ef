"""Updates that pack two documents into one row, where the documents of a batch fit.

Which documents a step retrieves is only known within it, and so are their lengths, but
the shapes of its program are fixed. An update is therefore compiled twice, packed and
not, and each step runs the one that its documents fit. Two documents that are both long
are not packed with each other (`models/packing.py`), so that rows hardly longer than a
padded document fit most batches of a corpus whose documents are half as long.

How long such a row is, is chosen from the lengths of the corpus.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import AnyFeature
from realm_jax.metrics.means import Means, mean_of
from realm_jax.models import packing
from realm_jax.training.step import split_batch
from realm_jax.types import Array, Lengths

Inputs = TypeVar("Inputs")
Auxiliary = TypeVar("Auxiliary")

_SAMPLED = 4096
_BATCHES = 64
_MULTIPLE = 8

# Of a model's work; packing that leaves more is not worth a second program.
_MOST_LEFT = 0.85


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


def choose_packed_lengths(
    corpus: BlockStore,
    query_ids: AnyFeature,
    lengths: Lengths,
    *,
    num_documents: int,
    num_joined: int,
) -> PackedLengths | None:
    """Returns the lengths that save the most work; None if packing saves little.

    Batches of random blocks and queries, [example, query], are drawn. A longer row fits
    more of them, and a batch that does not fit is not packed. A
    microbatch on one device embeds `num_documents`, perhaps 0, and reads `num_joined`.
    """
    random = np.random.default_rng(0)
    blocks = random.integers(corpus.num_blocks, size=_SAMPLED)
    titles, bodies = corpus.title_lengths(blocks), corpus.body_lengths(blocks)
    rows = np.sort(random.integers(len(query_ids), size=_SAMPLED))
    queries = random.permutation((query_ids[rows] != 0).sum(axis=1))
    # With [CLS] and two [SEP]; a query has its own, and one follows the body.
    documents = np.minimum(titles + bodies + 3, lengths.document)
    joined = np.minimum(queries + bodies + 1, lengths.joined)
    chosen = PackedLengths(
        _row_length(documents, lengths.document, num_documents, random),
        _row_length(joined, lengths.joined, num_joined, random),
    )
    return None if chosen == PackedLengths() else chosen


def _row_length(
    found: Int[np.ndarray, " sample"],
    unpacked: int,
    num_sequences: int,
    random: np.random.Generator,
) -> int | None:
    """Returns the length of packed rows that leaves the least work, None if much."""
    if not num_sequences:
        return None
    batches = np.sort(random.choice(found, (_BATCHES, num_sequences)), axis=1)
    # The longest with the shortest, as they are packed.
    needed = (batches + batches[:, ::-1]).max(axis=1)
    candidates = np.arange(_MULTIPLE, 2 * unpacked, _MULTIPLE)
    fits = (needed[:, None] <= candidates).mean(axis=0)
    left = fits * candidates / (2 * unpacked) + (1 - fits)
    best = int(left.argmin())
    return int(candidates[best]) if left[best] <= _MOST_LEFT else None
