"""Converts neighbours to the candidates that a step scores and reads.

Trivial blocks are removed (those that contain the sentence of the query, from which a
masked span could be copied without understanding), the null document is prepended, and
the blocks are converted to token arrays.

`own_candidates` makes a candidate of the block that a masked sentence was taken from,
without the sentence. The paper excludes that block, but in a corpus that states a fact
only once, hardly any helpful document is left then, and a weak retriever learns
nothing. Without the sentence, the block is an ordinary document on the same topic (an
extension; ICT, too, removes sentences from their blocks).
"""

from types import ModuleType

import numpy as np
from jaxtyping import Bool, Float, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.layout import A, from_lists, joined_inputs
from realm_jax.errors import BadInputError
from realm_jax.types import NULL_BLOCK, Array, Candidates, Neighbours, PretrainBatch

# Additional neighbours to search, which replace trivial ones.
SLACK = 8
# A block is a near-duplicate of the query's sentence if it contains this share of the
# sentence's distinct runs of GRAM_SIZE wordpieces. The whole sentence has share 1; an
# edited word breaks up to GRAM_SIZE runs.
GRAM_SIZE = 4
TRIVIAL_SHARE = 0.8
UNKNOWN = -1
"""Placeholder for a wordpiece that was masked but is not scored."""


def num_neighbours(num_candidates: int) -> int:
    """Returns the number of neighbours to search to keep `num_candidates`."""
    return num_candidates + SLACK


def pretrain_candidates(
    store: BlockStore,
    neighbours: Neighbours,
    batch: PretrainBatch,
    *,
    num_candidates: int,
    document_length: int,
    joined_length: int,
) -> Candidates:
    """Returns the candidates of masked sentences, without trivial retrievals.

    The neighbours are best first, at least `num_neighbours(num_candidates)` of them if
    the corpus has as many. `num_candidates` includes the null document, which is the
    first. `document_length` and `joined_length` are the wordpieces of the embedder's
    input and of the reader's.
    """
    ids = np.asarray(neighbours.ids)
    trivial = find_trivial(
        store,
        ids,
        restore_queries(batch),
        np.asarray(batch.source_block),
        joined_length,
    )
    block_ids, _ = choose_blocks(ids, trivial, num_candidates, include_null=True)
    return gather_candidates(
        store,
        block_ids,
        np.asarray(batch.query_ids),
        document_length=document_length,
        joined_length=joined_length,
    )


def question_candidates(
    store: BlockStore,
    neighbours: Neighbours,
    question_ids: Int[Array, "batch query"],
    *,
    num_candidates: int,
    document_length: int,
    joined_length: int,
) -> Candidates:
    """Returns the candidates of questions: the best blocks, and no null document.

    Questions are not made from blocks, so there is nothing to exclude.
    """
    ids = np.asarray(neighbours.ids)
    nothing = np.zeros(ids.shape, bool)
    block_ids, _ = choose_blocks(ids, nothing, num_candidates, include_null=False)
    return gather_candidates(
        store,
        block_ids,
        np.asarray(question_ids),
        document_length=document_length,
        joined_length=joined_length,
        include_null=False,
    )


def restore_queries(
    batch: PretrainBatch, xp: ModuleType = np
) -> Int[Array, "batch query"]:
    """Returns the queries with the scored masks restored; other masks become -1."""
    query_ids, positions, mask_ids = map(
        xp.asarray, (batch.query_ids, batch.mask_positions, batch.mask_ids)
    )
    scored = xp.asarray(batch.mask_weights) > 0
    first = xp.argmax(scored, axis=1)[:, None]
    mask_id = xp.take_along_axis(
        query_ids, xp.take_along_axis(positions, first, axis=1), axis=1
    )
    mask_id = xp.where(scored.any(axis=1, keepdims=True), mask_id, UNKNOWN)
    column = xp.arange(query_ids.shape[1])
    here = scored[..., None] & (positions[..., None] == column)
    # Positions are distinct, so the largest is the only one.
    masked = xp.where(here, mask_ids[..., None], 0).max(axis=1)
    restored = xp.where(here.any(axis=1), masked, query_ids)
    return xp.where(restored == mask_id, UNKNOWN, restored)


def find_trivial(
    store: BlockStore,
    block_ids: Int[np.ndarray, "batch neighbour"],
    restored_ids: Int[Array, "batch query"],
    source_block: Int[np.ndarray, " batch"],
    body_length: int,
) -> Bool[np.ndarray, "batch neighbour"]:
    """Marks retrieved blocks that reveal the query's sentence; id -1 never does.

    They are the block the sentence was taken from, as in the reference implementation,
    and blocks that contain the sentence or a near-duplicate (`TRIVIAL_SHARE`) in the
    `body_length` wordpieces that the reader sees. `restored_ids` are `[CLS] sentence
    [SEP]` without masks, see `restore_queries`.
    """
    bodies = store.body_ids(block_ids, body_length)
    shares = np.stack(
        [
            share_of_grams(ids[ids != 0][1:-1], body)
            for ids, body in zip(np.asarray(restored_ids), bodies, strict=True)
        ]
    )
    return is_trivial(block_ids, shares, source_block)


def is_trivial(
    block_ids: Int[A, "batch neighbour"],
    shares: Float[A, "batch neighbour"],
    source_block: Int[A, " batch"],
) -> Bool[A, "batch neighbour"]:
    """Marks the source of each sentence and blocks that hold most of its grams."""
    from_source = block_ids == source_block[:, None]
    trivial = (from_source | (shares >= TRIVIAL_SHARE)) & (block_ids != NULL_BLOCK)
    return trivial  # pyright: ignore[reportReturnType]


def share_of_grams(
    sentence: Int[np.ndarray, " piece"], bodies: Int[np.ndarray, "neighbour length"]
) -> np.ndarray:
    """Returns the share (0 to 1) of the sentence's distinct grams in each body.

    A gram is a run of `GRAM_SIZE` wordpieces, or the whole of a shorter sentence, and
    none with a -1. An empty sentence has share 0 with every body. The sentence has no
    special pieces and no padding, bodies are padded with 0.
    """
    size = min(GRAM_SIZE, len(sentence))
    if size == 0 or size > bodies.shape[-1]:
        return np.zeros(len(bodies))
    # Replace ids by ranks, so that a gram fits one integer with any vocabulary.
    pieces = np.unique(sentence)
    ranks, body_ranks = _rank(pieces, sentence), _rank(pieces, bodies)
    known = np.lib.stride_tricks.sliding_window_view(sentence != UNKNOWN, size)
    wanted = np.unique(_grams(ranks, size)[known.all(axis=-1)])
    if not len(wanted):
        return np.zeros(len(bodies))
    present = _grams(body_ranks, size)
    nearest = np.searchsorted(wanted, present).clip(max=len(wanted) - 1)
    rows, columns = np.nonzero(wanted[nearest] == present)
    found = np.zeros((len(bodies), len(wanted)), bool)
    found[rows, nearest[rows, columns]] = True
    return found.mean(axis=1)


def _rank(pieces: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the indices of `ids` in the sorted `pieces`, `len(pieces)` for others."""
    nearest = np.searchsorted(pieces, ids).clip(max=len(pieces) - 1)
    return np.where(pieces[nearest] == ids, nearest, len(pieces))


def _grams(ranks: Int[np.ndarray, "*dims length"], size: int) -> np.ndarray:
    """Returns every run of `size` pieces as one integer with 16 bits per piece."""
    pieces = np.lib.stride_tricks.sliding_window_view(ranks.astype(np.uint64), size, -1)
    shifts = 16 * np.arange(size, dtype=np.uint64)
    return np.bitwise_or.reduce(pieces << shifts, axis=-1)


def choose_blocks(
    block_ids: Int[A, "batch neighbour"],
    dropped: Bool[A, "batch neighbour"],
    num_candidates: int,
    include_null: bool,
    xp: ModuleType = np,
) -> tuple[Int[A, "batch candidate"], Int[A, "batch candidate"]]:
    """Returns the best blocks that were not dropped, and their places.

    The places are among the neighbours. The blocks keep their order, best first, after
    the null document if there is one, which `num_candidates` includes. Both are int32,
    and -1 for the null document and for empty slots. `xp` is numpy or jax.numpy.
    """
    num_retrieved = num_candidates - include_null
    if num_retrieved < 1:
        raise BadInputError(
            f"expected at least {1 + include_null} candidates, the null document "
            f"{'included' if include_null else 'left out'}, got {num_candidates}; "
            "raise NUM_CANDIDATES."
        )
    kept = xp.where(dropped, NULL_BLOCK, block_ids).astype(xp.int32)
    # A stable sort moves the kept blocks to the front in their order.
    order = xp.argsort(kept == NULL_BLOCK, axis=1, stable=True)[:, :num_retrieved]
    chosen = xp.take_along_axis(kept, order, axis=1)
    places = xp.where(chosen == NULL_BLOCK, -1, order)
    padding = ((0, 0), (int(include_null), num_retrieved - chosen.shape[1]))
    return (
        xp.pad(chosen, padding, constant_values=NULL_BLOCK),
        xp.pad(places, padding, constant_values=-1),
    )


def valid_slots(
    block_ids: Int[A, "batch candidate"], include_null: bool, xp: ModuleType = np
) -> Bool[A, "batch candidate"]:
    """Marks the slots that hold a block, or the null document at position 0."""
    is_null = (xp.arange(block_ids.shape[1]) == 0) & include_null
    return (block_ids != NULL_BLOCK) | is_null


def gather_candidates(
    store: BlockStore,
    block_ids: Int[np.ndarray, "batch candidate"],
    query_ids: Int[np.ndarray, "batch query"],
    *,
    document_length: int,
    joined_length: int,
    include_null: bool = True,
) -> Candidates:
    """Returns the token arrays of the blocks that `choose_blocks` returned.

    `query_ids` are the reader's queries, with masks. With `include_null`, the -1 at
    position 0 is the null document, which is valid, and not an empty slot.
    """
    document_ids, document_segments = store.document_ids(block_ids, document_length)
    joined_ids, joined_segments = store.joined_ids(query_ids, block_ids, joined_length)
    return Candidates(
        block_ids=block_ids,
        document_ids=document_ids,
        document_segment_ids=document_segments,
        joined_ids=joined_ids,
        joined_segment_ids=joined_segments,
        valid=valid_slots(block_ids, include_null),
    )


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
