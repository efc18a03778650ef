"""Packs two padded sequences into one row, so that an encoder computes less padding.

The longest sequence shares a row with the shortest, the second longest with the second
shortest, and so on. Attention stays within a sequence, and positions count from its
first wordpiece, so that the encoder's output at each wordpiece is that of the sequence
alone. Packing is what T5X and MaxText do to their training examples on the host; here
the sequences are retrieved documents, which only the devices know.

Rows are packed within each device's share of the batch, without communication.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from realm_jax import axes


@flax.struct.dataclass
class Packed:
    """Packed rows, and where each sequence is in them.

    `row` is half the number of sequences, rounded up in each device's share.

    Attributes:
      ids: wordpieces, 0 where padded.
      segment_ids: likewise; arbitrary where padded.
      sequences: 1 or 2 for the row's first or second sequence, 0 for padding.
      positions: position of each wordpiece within its sequence; 0 where padded.
      starts: where the row's two sequences begin.
      order: [share, sequence], the sequences of a device's share: the first ones of its
        rows, then the second ones.
      count: number of sequences in each share.
    """

    ids: Int[Array, "row length"]
    segment_ids: Int[Array, "row length"]
    sequences: Int[Array, "row length"]
    positions: Int[Array, "row length"]
    starts: Int[Array, "row 2"]
    order: Int[Array, "share sequence"]
    count: int = flax.struct.field(pytree_node=False)

    def places(
        self, positions: Int[Array, "batch position"]
    ) -> Int[Array, "row two_positions"]:
        """Returns where in its row each of some positions within the sequences is.

        Those of the row's first sequence come before those of the second.
        """
        paired = _in_pairs(_shares(positions, len(self.order)), self.order)
        own = paired.reshape(-1, *paired.shape[2:])
        return (self.starts[:, :, None] + own).reshape(len(own), -1)

    def unpack(
        self, states: Float[Array, "row two_positions embed"]
    ) -> Float[Array, "batch position embed"]:
        """Inverts `places`: returns what was computed there, sequence by sequence."""
        shares, num_sequences = self.order.shape
        rows, positions, embed = states.shape
        by_sequence = states.reshape(shares, rows // shares, 2, positions // 2, embed)
        # As in `order`: all first sequences, then all second ones.
        by_sequence = by_sequence.swapaxes(1, 2).reshape(
            shares, num_sequences, positions // 2, embed
        )
        back = jnp.argsort(self.order, axis=1)[:, : self.count]
        unpacked = jnp.take_along_axis(by_sequence, back[..., None, None], axis=1)
        return unpacked.reshape(-1, positions // 2, embed)


def pack(
    ids: Int[Array, "batch sequence"],
    segment_ids: Int[Array, "batch sequence"],
    length: int,
) -> Packed:
    """Packs sequences in pairs into rows of `length`; they must fit, see `fits`.

    Wordpieces are padded at the end with 0; segments are arbitrary there.
    """
    shares = _num_shares(len(ids))
    by_share = _shares(ids, shares)
    order, lengths = _pairs(by_share)
    paired = [_in_pairs(a, order) for a in (by_share, _shares(segment_ids, shares))]
    lengths = lengths.reshape(-1, 2)
    column = jnp.arange(length)
    is_first = column < lengths[:, :1]
    is_second = ~is_first & (column < lengths.sum(axis=1, keepdims=True))
    positions = jnp.where(is_first, column, column - lengths[:, :1])
    positions = jnp.where(is_first | is_second, positions, 0)

    def lay_out(pair: Int[Array, "share row 2 sequence"]) -> Int[Array, "row length"]:
        first, second = jnp.moveaxis(pair.reshape(-1, *pair.shape[2:]), 1, 0)
        taken = [
            jnp.take_along_axis(each, positions, axis=1, mode="clip")
            for each in (first, second)
        ]
        return jnp.where(is_first, taken[0], jnp.where(is_second, taken[1], 0))

    packed_ids, packed_segments = (lay_out(pair) for pair in paired)
    return Packed(
        ids=packed_ids,
        segment_ids=packed_segments,
        sequences=is_first + 2 * is_second,
        positions=positions,
        starts=jnp.stack([jnp.zeros_like(lengths[:, 0]), lengths[:, 0]], axis=1),
        order=order,
        count=len(ids) // shares,
    )


def fits(ids: Int[Array, "batch sequence"], length: int) -> Bool[Array, ""]:
    """Returns whether every pair of sequences fits a packed row of `length`."""
    _, lengths = _pairs(_shares(ids, _num_shares(len(ids))))
    return lengths.sum(axis=-1).max() <= length


def within_sequences(
    sequences: Int[Array, "row length"],
) -> Bool[Array, "row length length"]:
    """Returns [row, query, key], whether a wordpiece may attend to another."""
    return sequences[:, :, None] == sequences[:, None, :]


def _num_shares(batch: int) -> int:
    """Returns the number of parts into which devices split a batch."""
    shares = axes.num_batch_shards(jax.sharding.get_abstract_mesh().shape)
    # A batch that they do not split evenly is packed as a whole.
    return shares if batch % shares == 0 else 1


def _shares(
    array: Int[Array, "batch sequence"], shares: int
) -> Int[Array, "share sequence length"]:
    """Splits sequences by device; an odd number of them gets an empty one."""
    split = array.reshape(shares, -1, array.shape[-1])
    return jnp.pad(split, ((0, 0), (0, split.shape[1] % 2), (0, 0)))


def _pairs(
    ids: Int[Array, "share sequence length"],
) -> tuple[Int[Array, "share sequence"], Int[Array, "share row 2"]]:
    """Returns which sequences share a row, see `Packed.order`, and their lengths."""
    lengths = (ids != 0).sum(axis=-1)
    by_length = jnp.argsort(-lengths, axis=1, stable=True)
    half = ids.shape[1] // 2
    longer, shorter = by_length[:, :half], by_length[:, half:][:, ::-1]
    order = jnp.concatenate([longer, shorter], axis=1)
    return order, _in_pairs(lengths, order)


def _in_pairs(
    array: Int[Array, "share sequence *dims"], order: Int[Array, "share sequence"]
) -> Int[Array, "share row 2 *dims"]:
    """Arranges sequences by row."""
    index = order.reshape(*order.shape, *[1] * (array.ndim - 2))
    ordered = jnp.take_along_axis(array, index, axis=1)
    shares, count, *dims = ordered.shape
    return ordered.reshape(shares, 2, count // 2, *dims).swapaxes(1, 2)
