"""Wordpieces that the reader's warm start predicts although they are not masked.

Of the wordpieces that BERT is scored on, a tenth is left as it is, so that the encoder
keeps saying at each place which wordpiece stands there (Devlin et al. 2019, section
3.1). A salient mask hides them all. An encoder that was made for sentence embeddings,
such as MiniLM, then has to find out from two masks a sentence how its features spell
wordpieces, before it can copy any; from what it can see it learns that at once.
"""

import flax.struct
import numpy as np
from jaxtyping import Float, Int

from realm_jax.data.wordpiece import WordPiece
from realm_jax.types import Array, PretrainBatch

# Sets these numbers apart from those that draw documents with the same key.
_STREAM = 2


@flax.struct.dataclass
class UnmaskedTargets:
    """Wordpieces of sentence and document that are predicted where they stand.

    Attributes:
      weights: 1.0 where a row has one, else 0.0.
      positions: of the reader's input.
      ids: what stands there.
    """

    weights: Float[Array, "batch target"]
    positions: Int[Array, "batch target"]
    ids: Int[Array, "batch target"]


def draw_unmasked(
    batch: PretrainBatch,
    joined_ids: Int[np.ndarray, "batch joined"],
    vocabulary: WordPiece,
    *,
    seed: int,
    step: int,
    rows: Int[np.ndarray, " batch"],
) -> UnmaskedTargets:
    """Draws as many wordpieces of each row as it has masks fewer than the most.

    So the reader scores as many places as before, and the step takes no longer. They
    are drawn evenly and with replacement, and depend on the seed, the step, the row and
    its text alone.

    Args:
      batch: the masked sentences.
      joined_ids: what the reader reads.
      vocabulary: whose special wordpieces are not drawn, masks among them.
      seed: of the run, not negative.
      step: updates done.
      rows: which rows of the whole batch these are.

    Returns:
      Targets in the slots that the masks leave empty; in the others, weights of 0.
    """
    count = batch.mask_weights.shape[1]
    # Raw bits, which NumPy promises to keep from version to version.
    bits = np.random.Philox(key=[seed, step], counter=[0, 0, 0, _STREAM])
    drawn = (bits.random_raw((int(rows.max()) + 1) * count) >> np.uint64(11)) * 2.0**-53
    drawn = drawn.reshape(-1, count)[rows]
    can_be = ~np.isin(joined_ids, _special_ids(vocabulary))
    # A row's wordpieces, those that can be drawn first, in their order.
    order = np.argsort(~can_be, axis=1, kind="stable")
    number = can_be.sum(axis=1, keepdims=True)
    positions = np.take_along_axis(order, (drawn * number).astype(np.int64), axis=1)
    is_free = (np.asarray(batch.mask_weights) == 0) & (number > 0)
    return UnmaskedTargets(
        is_free.astype(np.float32),
        positions.astype(np.int32),
        np.take_along_axis(joined_ids, positions, axis=1),
    )


def _special_ids(vocabulary: WordPiece) -> list[int]:
    return [
        vocabulary.pad,
        vocabulary.unk,
        vocabulary.cls,
        vocabulary.sep,
        vocabulary.mask,
    ]
