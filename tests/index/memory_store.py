"""Blocks of given wordpieces, which lie in no files."""

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece

VOCABULARY = WordPiece(SPECIAL_PIECES)


class MemoryStore(BlockStore):
    """A store of titles and bodies; it has no texts."""

    def __init__(self, bodies, titles=None, vocabulary=VOCABULARY):
        titles = titles or [[]] * len(bodies)
        rows = [[*title, *body] for title, body in zip(titles, bodies, strict=True)]
        self.vocabulary = vocabulary
        self.num_blocks = len(bodies)
        self._ids = np.array([piece for row in rows for piece in row], np.int32)
        self._offsets = np.cumsum([0, *map(len, rows)])
        self._title_lengths = np.array(list(map(len, titles)))
