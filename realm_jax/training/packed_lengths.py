"""Chooses the length of rows that two documents share, from the lengths of a corpus."""

import numpy as np
from jaxtyping import Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import AnyFeature
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.types import Lengths

_SAMPLED = 4096
_BATCHES = 64
_MULTIPLE = 8
# Of a model's work; packing that leaves more is not worth a second program.
_MOST_LEFT = 0.85


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
    more of them, and a batch that does not fit is not packed (`packed_updates.py`). A
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
