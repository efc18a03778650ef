"""Chooses the examples of each update, as a function of the seed and the step alone.

A resumed run therefore sees the examples that an uninterrupted one would have seen, and
each host of a job determines its part of a batch without communication. The same holds
for other random numbers that an update depends on (`uniform`), which are functions of
the seed, the step and a stream.
"""

import enum
import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, Int64, UInt64


class Spans(enum.Enum):
    """Selects the masked spans of a sentence that an epoch visits.

    Attributes:
      ONE_PER_SENTENCE: one of them, drawn anew in every epoch (REALM, section 3.4).
      ALL: every one. A sentence with ten names then counts ten times as much as a
        sentence with one, and text that is dense in names dominates.
      TOGETHER: one, and in the same example as many others of the sentence as can be
        scored. An extension for the reader's warm start: it predicts several spans for
        the cost of one forward pass.
    """

    ONE_PER_SENTENCE = "one_per_sentence"
    ALL = "all"
    TOGETHER = "together"


def batch_rows(
    num_examples: int, step: int, *, batch_size: int, seed: int
) -> Int64[np.ndarray, " batch"]:
    """Returns the rows of a step's batch, counted from 0.

    Epochs follow each other without a gap: each visits every example once, in its own
    order, and a batch may hold the end of one and the start of the next.
    """
    _, rows = visited(num_examples, _positions(step, batch_size), seed)
    return rows


def sentence_rows(
    starts: Int[np.ndarray, " boundary"], step: int, *, batch_size: int, seed: int
) -> Int64[np.ndarray, " batch"]:
    """Returns the rows of a step's batch, one row for each sentence it visits.

    Epochs follow each other as in `batch_rows`, but each visits every sentence once and
    draws one of its rows uniformly, by a hash of seed, epoch and sentence.

    Args:
      starts: the row at which each sentence begins, then the number of rows; every
        sentence has at least one row. It may be memory-mapped: only what the batch
        needs is read.
    """
    positions = _positions(step, batch_size)
    epochs, sentences = visited(len(starts) - 1, positions, seed)
    first = starts[sentences].astype(np.int64)
    counts = starts[sentences + 1] - first
    return first + (_hashed(seed, epochs, sentences) % counts.astype(np.uint64)).astype(
        np.int64
    )


@functools.lru_cache(maxsize=2)  # A batch can reach from one epoch into the next.
def shuffled(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " item"]:
    """Returns 0..count-1, read-only, in an order that depends on the arguments alone.

    It sorts a raw bit stream, because NumPy guarantees stable bit streams across
    versions, but not stable permutations.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(count)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def visited(
    count: int,
    positions: Int64[np.ndarray, " batch"],
    seed: int,
    order: Callable[[int, int, int], np.ndarray] = shuffled,
) -> tuple[Int64[np.ndarray, " batch"], Int64[np.ndarray, " batch"]]:
    """Returns the epoch and the item at each position.

    Args:
      count: number of items.
      positions: how many items were visited before each.
      seed: seeds the order, not negative.
      order: `shuffled`, perhaps with a cache of its own.
    """
    epochs, offsets = np.divmod(positions, count)
    items = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        items[inside] = order(count, seed, int(epoch))[offsets[inside]]
    return epochs, items


def _positions(step: int, batch_size: int) -> Int64[np.ndarray, " batch"]:
    return np.arange(step * batch_size, (step + 1) * batch_size)


def _hashed(
    seed: int, epochs: Int64[np.ndarray, " batch"], items: Int64[np.ndarray, " batch"]
) -> UInt64[np.ndarray, " batch"]:
    """Returns 64 hashed bits for each (seed, epoch, item), without a sequential stream.

    Each number in turn is added to the hash so far and mixed as in SplitMix64 (Steele
    et al. 2014), where each input bit changes about half of the output bits.
    """
    bits = np.full(items.shape, seed, np.uint64)
    for values in (epochs, items):
        bits = _mixed(bits) + values.astype(np.uint64)
    return _mixed(bits)


def _mixed(bits: UInt64[np.ndarray, " batch"]) -> UInt64[np.ndarray, " batch"]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class Stream(enum.IntEnum):
    """What numbers of the same seed and step are drawn for."""

    DOCUMENTS = 1
    UNMASKED = 2
    PSEUDO_QUERIES = 3
    PROJECTION = 4


def uniform(
    stream: Stream, seed: int, step: int, *shape: int
) -> Float[np.ndarray, "..."]:
    """Returns numbers in [0, 1), the first of which do not depend on their number."""
    # Raw bits, which NumPy guarantees to keep from version to version.
    bits = np.random.Philox(key=[seed, step], counter=[0, 0, 0, stream])
    drawn = bits.random_raw(int(np.prod(shape))) >> np.uint64(11)
    return (drawn * 2.0**-53).reshape(shape)
