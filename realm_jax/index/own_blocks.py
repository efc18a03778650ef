"""Makes a candidate of the block that a masked sentence was taken from.

The paper excludes that block, because the masked span could be copied from it. In a
corpus that states a fact only once, hardly any helpful document is left then, and a
weak retriever learns nothing. Without the sentence, the block is an ordinary document
on the same topic (an extension; ICT, too, removes sentences from their blocks).
"""

import numpy as np
from jaxtyping import Int

from realm_jax.index.candidates import (
    UNKNOWN,
    TokenStore,
    gather_candidates,
    restore_queries,
)
from realm_jax.types import NULL_BLOCK, Candidates, PretrainBatch


def own_candidates(
    store: TokenStore,
    batch: PretrainBatch,
    *,
    document_length: int,
    joined_length: int,
) -> Candidates:
    """Returns the own block of each sentence, one candidate per row.

    The embedder's input is the whole block, as in the index. In the reader's input the
    body lacks the sentence. The slot is empty where the sentence has no block or is not
    found in it, and where the block contains nothing else.

    Args:
      store: the blocks.
      batch: the masked sentences.
      document_length: wordpieces of the embedder's input.
      joined_length: wordpieces of the reader's input.
    """
    query_ids, source = np.asarray(batch.query_ids), np.asarray(batch.source_block)
    bodies = store.body_ids(source, joined_length + query_ids.shape[1])
    rests = [
        without_sentence(body[body != 0], sentence[sentence != 0][1:-1])
        for body, sentence in zip(bodies, restore_queries(batch), strict=True)
    ]
    is_left = np.array([len(rest) > 0 for rest in rests])
    block_ids = np.where(is_left, source, NULL_BLOCK).astype(np.int32)[:, None]
    candidates = gather_candidates(
        store,
        block_ids,
        query_ids,
        document_length=document_length,
        joined_length=joined_length,
        include_null=False,
    )
    joined_ids = np.zeros_like(candidates.joined_ids)
    segments = np.zeros_like(candidates.joined_segment_ids)
    for row, (query, rest) in enumerate(zip(query_ids, rests, strict=True)):
        first = np.count_nonzero(query)
        last = first + min(len(rest), joined_length - 1 - first)
        joined_ids[row, 0, :first] = query[:first]
        joined_ids[row, 0, first:last] = rest[: last - first]
        # [SEP], which is the query's last wordpiece, too.
        joined_ids[row, 0, last] = query[first - 1]
        segments[row, 0, first : last + 1] = 1
    return Candidates(
        block_ids=block_ids,
        document_ids=candidates.document_ids,
        document_segment_ids=candidates.document_segment_ids,
        joined_ids=joined_ids,
        joined_segment_ids=segments,
        valid=candidates.valid,
    )


def without_sentence(
    body: Int[np.ndarray, " body"], sentence: Int[np.ndarray, " sentence"]
) -> Int[np.ndarray, " rest"]:
    """Returns the body without any occurrence of the sentence.

    Args:
      body: wordpieces.
      sentence: wordpieces; -1 matches any.

    Returns:
      The remaining wordpieces; none if the sentence does not occur, because the body
      may contain it in another form.
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
