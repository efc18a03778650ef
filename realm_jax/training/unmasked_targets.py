"""Draws unmasked wordpieces for the reader's warm start to predict.

Of the wordpieces that BERT is scored on, a tenth is left unchanged, so that the output
at each position keeps identifying the wordpiece there (Devlin et al. 2019, section
3.1). A salient mask hides them all. An encoder made for sentence embeddings, such as
MiniLM, then has to learn from two masks per sentence how its features encode
wordpieces, before it can copy any; from visible wordpieces it learns that at once.
"""

import flax.struct
import numpy as np
from jaxtyping import Float, Int

from realm_jax.data.draws import Stream, uniform
from realm_jax.data.wordpiece import WordPiece
from realm_jax.types import Array, PretrainBatch


@flax.struct.dataclass
class UnmaskedTargets:
    """Wordpieces that are predicted at their own position in the reader's input.

    Weights are 0.0 where a row has no target.
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
    """Draws a wordpiece for each slot that a row's masks leave empty.

    The reader then scores as many positions as before, and the step takes no longer.
    Wordpieces, no special ones, are drawn uniformly and with replacement; they depend
    on the seed, the step, the row of the whole batch (`rows`) and its text alone.
    """
    count = batch.mask_weights.shape[1]
    drawn = uniform(Stream.UNMASKED, seed, step, int(rows.max()) + 1, count)[rows]
    can_be = ~np.isin(joined_ids, _special_ids(vocabulary))
    # A row's wordpieces, those that can be drawn first, in order.
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
