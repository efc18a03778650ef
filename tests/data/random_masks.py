"""Examples with random masks, laid out at once of the rows that tasks store."""

from realm_jax.data.features import SENTENCE_ID
from realm_jax.data.random_masking import PieceRows, random_rows


def random_examples(store, block_ids, draw, *, query_length=64, max_masks=10, seed=0):
    """An example for every sentence of the blocks of which a part can be masked."""
    lengths = {"query_length": query_length, "max_masks": max_masks}
    rows = random_rows(store, block_ids, draw, seed=seed, **lengths)
    examples = PieceRows(query_length, max_masks).lay_out(store, rows)
    return {**examples, SENTENCE_ID: rows[SENTENCE_ID]}
