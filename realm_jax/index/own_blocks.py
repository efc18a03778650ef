"""Makes a candidate of the block that a masked sentence was taken from.

The paper excludes that block, because the masked span could be copied from it. In a
corpus that states a fact only once, hardly any helpful document is left then, and a
weak retriever learns nothing. Without the sentence, the block is an ordinary document
on the same topic (an extension; ICT, too, removes sentences from their blocks).
"""

import numpy as np
from jaxtyping import Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.layout import from_lists, joined_inputs
from realm_jax.index.candidates import (
    UNKNOWN,
    restore_queries,
    valid_slots,
)
from realm_jax.types import NULL_BLOCK, Candidates, PretrainBatch


def own_candidates(
    store: BlockStore,
    batch: PretrainBatch,
    *,
    document_length: int,
    joined_length: int,
) -> Candidates:
    """Returns the own block of each sentence, one candidate per row.

    The embedder's input is the whole block, as in the index. In the reader's input the
    body lacks the sentence. The slot is empty where the sentence has no block or is not
    found in it, and where the block contains nothing else.
    """
    query_ids, source = np.asarray(batch.query_ids), np.asarray(batch.source_block)
    bodies = store.body_ids(source, joined_length + query_ids.shape[1])
    rests = [
        without_sentence(body[body != 0], sentence[sentence != 0][1:-1])
        for body, sentence in zip(bodies, restore_queries(batch), strict=True)
    ]
    is_left = np.array([len(rest) > 0 for rest in rests])
    block_ids = np.where(is_left, source, NULL_BLOCK).astype(np.int32)[:, None]
    document_ids, document_segments = store.document_ids(block_ids, document_length)
    joined_ids, joined_segments = joined_inputs(
        from_lists([rest[:0] for rest in rests], rests, (len(rests), 1)),
        query_ids,
        joined_length,
        # The last wordpiece of a query is [SEP].
        query_ids[0, np.count_nonzero(query_ids[0]) - 1],
        np,
    )
    return Candidates(
        block_ids=block_ids,
        document_ids=document_ids,
        document_segment_ids=document_segments,
        joined_ids=joined_ids,
        joined_segment_ids=joined_segments,
        valid=valid_slots(block_ids, include_null=False),
    )


def without_sentence(
    body: Int[np.ndarray, " body"], sentence: Int[np.ndarray, " sentence"]
) -> Int[np.ndarray, " rest"]:
    """Returns the body without any occurrence of the sentence, whose -1 match anything.

    Nothing is left if there is none: the body may contain the sentence in another form.
    """
    size = len(sentence)
    if not 0 < size <= len(body):
        return body[:0]
    windows = np.lib.stride_tricks.sliding_window_view(body, size)
    starts = ((windows == sentence) | (sentence == UNKNOWN)).all(axis=1)
    if not starts.any():
        return body[:0]
    covered = np.convolve(starts, np.ones(size, int)) > 0
    return body[~covered]
