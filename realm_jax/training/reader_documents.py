"""Chooses the documents that the reader reads with masked sentences in a warm start.

REALM's reader has to read three kinds of document: some contain the sentence's answer,
most do not, and one is empty. A warm start can show it all three, in a given mixture.
"""

import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.answer_spans import answer_starts
from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.blocks import BlockStore
from realm_jax.index.candidates import find_trivial, restore_queries
from realm_jax.types import NULL_BLOCK, PretrainBatch


class DocumentKind(enum.Enum):
    """Kind of document with which a masked sentence is joined.

    OWN is the block that it was taken from, RETRIEVED as in `choose_retrieved`.
    """

    OWN = "own"
    NULL = "null"
    RETRIEVED = "retrieved"


KINDS = tuple(DocumentKind)
"""The kinds in order; a kind is encoded as its index here."""


def draw_kinds(
    shares: Sequence[float], seed: int, step: int, batch_size: int
) -> Int[np.ndarray, " batch"]:
    """Returns the kind of document of each row of a batch, as an index into `KINDS`.

    The kind of a row is a function of the shares, the seed, the step and the row alone,
    so that a resumed run and every process of a job draw the same. The shares sum to 1.
    """
    drawn = uniform(Stream.DOCUMENTS, seed, step, batch_size)
    bounds = np.cumsum(shares)
    # Normalised, because the sum may be a rounding error below 1.
    kinds = np.searchsorted(bounds / bounds[-1], drawn, side="right")
    return kinds.astype(np.int32)


def choose_retrieved(
    store: BlockStore,
    neighbours: Int[np.ndarray, "batch neighbour"],
    batch: PretrainBatch,
    joined_length: int,
    continues_word: Bool[np.ndarray, " vocab"],
) -> tuple[Int[np.ndarray, " batch"], Bool[np.ndarray, " batch"]]:
    """Returns the retrieved block with which each masked sentence is read.

    It is the best block that contains the answer, or else the best one, never a trivial
    one (`find_trivial`); -1, the null document, where all neighbours are trivial.
    Beside it stands whether it contains the answer: the first run of scored wordpieces,
    which is the span, and of several spans that are masked together the one that was
    drawn.

    Args:
      neighbours: block ids, best first; -1 where none was found.
      joined_length: length of the reader's input, in wordpieces. An answer counts only
        in the part of a body that the reader sees.
      continues_word: for each wordpiece, whether no word ends before it
        (`data.words.continues_word`); an answer does not end there either.
    """
    trivial = find_trivial(
        store,
        neighbours,
        restore_queries(batch),
        np.asarray(batch.source_block),
        joined_length,
    )
    usable = ~trivial & (neighbours != NULL_BLOCK)
    holds = usable & holds_answer(
        store, neighbours, batch, joined_length, continues_word
    )
    found = holds.any(axis=1)
    best = np.where(found, holds.argmax(axis=1), usable.argmax(axis=1))
    chosen = np.take_along_axis(neighbours, best[:, None], axis=1)[:, 0]
    return np.where(usable.any(axis=1), chosen, NULL_BLOCK), found


def holds_answer(
    store: BlockStore,
    block_ids: Int[np.ndarray, "batch neighbour"],
    batch: PretrainBatch,
    joined_length: int,
    continues_word: Bool[np.ndarray, " vocab"],
) -> Bool[np.ndarray, "batch neighbour"]:
    """Returns whether the part of each body that is read contains the answer.

    See `choose_retrieved`. The null document and empty slots (-1) contain none.
    """
    bodies = store.body_ids(block_ids, joined_length)
    # The body stands between the query and the last [SEP].
    room = joined_length - 1 - np.count_nonzero(batch.query_ids, axis=1)
    bodies = np.where(np.arange(joined_length) < room[:, None, None], bodies, 0)
    starts = answer_starts(bodies, masked_answers(batch)[:, :1], continues_word)
    return np.asarray(starts.any(axis=(2, 3)))


def masked_answers(batch: PretrainBatch) -> Int[np.ndarray, "batch answer piece"]:
    """Returns the wordpieces of each run of scored masks, in order, 0 where unused.

    The first is the span that was drawn; others are masked together with it. Adjacent
    spans are one run.
    """
    scored = np.asarray(batch.mask_weights) > 0
    positions = np.asarray(batch.mask_positions)
    count = positions.shape[1]
    begins = scored.copy()
    begins[:, 1:] &= ~scored[:, :-1] | (np.diff(positions, axis=1) != 1)
    run = np.cumsum(begins, axis=1) - 1
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0), axis=1)
    spans = np.zeros((len(positions), count, count), np.int32)
    row, mask = np.nonzero(scored)
    spans[row, run[row, mask], mask - first[row, mask]] = np.asarray(batch.mask_ids)[
        row, mask
    ]
    return spans
