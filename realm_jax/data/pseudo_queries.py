"""Draws pseudo-queries: pieces of a text that stand for the queries of people.

They are a title, a sentence, or some words in a row, as Contriever crops its texts
(Izacard et al. 2022, section 3.1).
"""

import numpy as np
from jaxtyping import Float

from realm_jax.data.blocks import BlockText
from realm_jax.data.words import answer_tokens, word_edges

PSEUDO_QUERY_LENGTH = 40
"""Wordpieces of `[CLS] x [SEP]` at most; people ask for things in fewer."""

NUM_DRAWS = 3
"""Random numbers that a pseudo-query takes."""

_FEWEST_WORDS = 3
_SPAN_WORDS = range(4, 15)


def pseudo_query(block: BlockText, drawn: Float[np.ndarray, " draw"]) -> str:
    """Returns a piece of a block: its title, a sentence, or 4 to 14 of its words.

    Each is drawn as often. Words stand in for a title or sentence of fewer than three.
    `drawn` are `NUM_DRAWS` numbers in [0, 1).
    """
    kind, place, size = drawn
    pieces = [block.title, "", ""]
    if block.sentences:
        start, end = block.sentences[int(place * len(block.sentences))]
        pieces[1] = block.body[start:end]
    piece = pieces[int(kind * len(pieces))]
    if len(answer_tokens(piece)) >= _FEWEST_WORDS:
        return piece
    begins = np.flatnonzero(word_edges(block.body).begins)
    count = min(_SPAN_WORDS[int(size * len(_SPAN_WORDS))], len(begins))
    first = int(place * (len(begins) - count + 1))
    edges = [*begins, len(block.body)]
    return block.body[edges[first] : edges[first + count]].rstrip()
