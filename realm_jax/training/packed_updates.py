"""Updates that pack two documents, or two queries, into one row, where a batch fits.

Which documents a step retrieves is only known within it, and so are their lengths, but
the shapes of its program are fixed. An update is therefore compiled twice, packed and
not, and each step runs the one that its documents fit. Two documents that are both long
are not packed with each other (`models/packing.py`), so that rows hardly longer than a
padded document fit most batches of a corpus whose documents are half as long.

How long such a row is, is chosen from the lengths of the corpus.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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
_BATCHES = 256
_MULTIPLE = 8

# Of a model's work; packing that leaves more is not worth a second program.
_MOST_LEFT = 0.85


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Wordpieces of a row that two sequences share; None for a row for each."""

    document: int | None = None
    joined: int | None = None
    query: int | None = None


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
    num_queries: int = 0,
) -> PackedLengths | None:
    """Returns the lengths that save the most work; None if packing saves little.

    Batches of random blocks and queries, [example, query], are drawn. A longer row fits
    more of them, and a batch that does not fit is not packed. A microbatch on one
    device embeds `num_documents` and `num_queries`, perhaps 0, and reads `num_joined`.
    """
    random = np.random.default_rng(0)
    blocks = random.integers(corpus.num_blocks, size=_SAMPLED)
    titles, bodies = corpus.title_lengths(blocks), corpus.body_lengths(blocks)
    rows = np.sort(random.integers(len(query_ids), size=_SAMPLED))
    queries = random.permutation((query_ids[rows] != 0).sum(axis=1))
    queries = np.minimum(queries, lengths.query)
    # With [CLS] and two [SEP]; a query has its own, and one follows the body.
    documents = np.minimum(titles + bodies + 3, lengths.document)
    joined = np.minimum(queries + bodies + 1, lengths.joined)
    kinds = {
        "document": _Kind.draw(documents, lengths.document, num_documents, random),
        "joined": _Kind.draw(joined, lengths.joined, num_joined, random),
        "query": _Kind.draw(queries, lengths.query, num_queries, random),
    }
    worth = {
        name: kind
        for name, kind in kinds.items()
        if kind is not None and _least_work([kind])[1] <= _MOST_LEFT
    }
    if not worth:
        return None
    chosen, _ = _least_work(list(worth.values()))
    return PackedLengths(**dict(zip(worth, chosen, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Sequences of one kind in some batches.

    Attributes:
      needed: of each batch, the length of rows that hold it packed.
      packed, unpacked: positions of a batch with rows of one wordpiece, and unpacked.
    """

    needed: Int[np.ndarray, " batch"]
    packed: float
    unpacked: int

    @classmethod
    def draw(
        cls,
        found: Int[np.ndarray, " sample"],
        length: int,
        num_sequences: int,
        random: np.random.Generator,
    ) -> "_Kind | None":
        """Draws batches of sequences as long as those found; None if there are none."""
        if not num_sequences:
            return None
        batches = np.sort(random.choice(found, (_BATCHES, num_sequences)), axis=1)
        # The longest with the shortest, as they are packed.
        needed = (batches + batches[:, ::-1]).max(axis=1)
        needed += -needed % _MULTIPLE
        return cls(needed, num_sequences / 2, num_sequences * length)


def _least_work(kinds: Sequence[_Kind]) -> tuple[list[int], float]:
    """Returns the lengths of rows that leave the least work, and the share left.

    A batch of which one kind does not fit is not packed at all. So each kind gets rows
    that as many of its batches fit as of the others.
    """
    needed = np.stack([kind.needed for kind in kinds])
    levels = np.sort(needed, axis=1)
    fits = (needed[:, None] <= levels[:, :, None]).all(axis=0).mean(axis=1)
    packed = np.array([kind.packed for kind in kinds]) @ levels
    left = fits * packed / sum(kind.unpacked for kind in kinds) + 1 - fits
    best = int(left.argmin())
    return [int(length) for length in levels[:, best]], float(left[best])
