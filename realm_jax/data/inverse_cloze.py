"""Makes inverse cloze examples: a sentence paired with its block (ORQA, §4)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.chunking import divide
from realm_jax.data.documents import stable_uniform
from realm_jax.data.features import Example, FeatureSpecs, int32, pieces_of_sentence
from realm_jax.data.layout import document_inputs, query_inputs, without_parts
from realm_jax.data.references import (
    ABOUT,
    BLOCK,
    SentenceRows,
    as_rows,
    find_sentences,
    read_blocks,
)
from realm_jax.data.wordpiece import Encoding
from realm_jax.errors import BadInputError

QUERY_LENGTH = 64
DOCUMENT_LENGTH = 288
REMOVED = "removed"
REMOVAL_PROBABILITY = 0.9
"""Share of examples whose document is the block without the sentence. The others keep
the sentence, so that the retriever also learns lexical matching."""

# A lone sentence of so many wordpieces is divided, and each part paired with the rest.
_DIVIDED = 16


def inverse_cloze_specs(
    query_length: int = QUERY_LENGTH, document_length: int = DOCUMENT_LENGTH
) -> FeatureSpecs:
    """Returns the features of one example of `types.InverseClozeBatch`."""
    if query_length < 3 or document_length < 4:
        raise BadInputError(
            "expected a query length of at least 3 and a document length of at least "
            f"4, got {query_length} and {document_length}; raise them (the paper uses "
            "64 and 288)."
        )
    return {
        "query_ids": int32(query_length),
        "document_ids": int32(document_length),
        "document_segment_ids": int32(document_length),
        "block_ids": int32(),
    }


@dataclasses.dataclass(frozen=True)
class PairRows(SentenceRows):
    """Rows that pair a sentence with its block."""

    kind: ClassVar[str] = "inverse_cloze"
    about: ClassVar[str] = (
        f"{ABOUT}, from which it is removed in the document of this row, or not"
    )

    query_length: int
    document_length: int

    def __post_init__(self):
        inverse_cloze_specs(self.query_length, self.document_length)  # Checks them.

    @property
    def specs(self) -> FeatureSpecs:
        """Features of an example in a batch."""
        return inverse_cloze_specs(self.query_length, self.document_length)

    @property
    def own_columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """See `SentenceRows.own_columns`."""
        return {REMOVED: ((), np.dtype(bool))}

    def lay_out(self, store: BlockStore, rows: Mapping[str, np.ndarray]) -> Example:
        """Returns the examples of rows; see `SentenceRows.lay_out`."""
        sentences = find_sentences(store, rows)
        blocks, first, end = sentences
        special = (store.vocabulary.cls, store.vocabulary.sep)
        removed_end = np.where(rows[REMOVED] != 0, end, first)
        document_ids, segments = document_inputs(
            without_parts(blocks, first, removed_end),
            self.document_length,
            *special,
            np,
        )
        return {
            "query_ids": query_inputs(
                sentences.pieces, self.query_length, *special, np
            ),
            "document_ids": document_ids,
            "document_segment_ids": segments,
            "block_ids": rows[BLOCK].astype(np.int32),
        }


def parts_to_pair(
    text: str,
    body: Encoding,
    sentences: Sequence[tuple[int, int]],
    tokenize_chinese_chars: bool = True,
) -> Sequence[tuple[int, int]]:
    """Returns the parts of a block's body that are paired with the block.

    They are its sentences or, if there is one alone, the parts that it has at half its
    length (see `chunking.divide`): a corpus of single sentences has pairs, too.
    """
    if len(sentences) != 1 or len(body.ids) < _DIVIDED:
        return sentences
    starts = divide(
        text, body.offsets, math.ceil(len(body.ids) / 2), tokenize_chinese_chars
    )
    first = [sentences[0][0], *body.offsets[starts[1:], 0].tolist()]
    return list(zip(first, [*first[1:], sentences[0][1]], strict=True))


def take_sentence(
    body: Encoding, sentence: tuple[int, int], remove: bool
) -> slice | None:
    """Returns the wordpieces of a sentence that are paired with a body.

    None if there are none, or if the rest of the body would be empty.
    """
    query = pieces_of_sentence(body.offsets, sentence)
    count = query.stop - query.start
    is_left = not remove or count < len(body.ids)
    return query if count and is_left else None


def inverse_cloze_examples(
    store: BlockStore,
    block_ids: np.ndarray,
    *,
    query_length: int = QUERY_LENGTH,
    document_length: int = DOCUMENT_LENGTH,
    removal_probability: float = REMOVAL_PROBABILITY,
    seed: int = 0,
) -> Example:
    """Returns an example for every sentence of the blocks; see `parts_to_pair`.

    The reference implementation draws one sentence of a block each time it visits the
    block; here an epoch visits every sentence. Whether a sentence is removed depends on
    `seed`, the block and the sentence alone.
    """
    layout = PairRows(query_length, document_length)
    rows = inverse_cloze_rows(
        store, block_ids, removal_probability=removal_probability, seed=seed
    )
    return layout.lay_out(store, rows)


def inverse_cloze_rows(
    store: BlockStore,
    block_ids: np.ndarray,
    *,
    removal_probability: float = REMOVAL_PROBABILITY,
    seed: int = 0,
) -> Example:
    """Returns the examples of `inverse_cloze_examples` as columns of `PairRows`."""
    made = []
    chinese = store.vocabulary.tokenize_chinese_chars
    for block, (text, body) in zip(
        block_ids, read_blocks(store, block_ids), strict=True
    ):
        parts = parts_to_pair(text.body, body, text.sentences, chinese)
        for index, sentence in enumerate(parts):
            remove = stable_uniform(seed, int(block), index) < removal_probability
            query = take_sentence(body, sentence, remove)
            if query is not None:
                made.append((block, query.start, query.stop, remove))
    specs = PairRows(QUERY_LENGTH, DOCUMENT_LENGTH).columns
    columns = np.array(made, np.int64).reshape(-1, len(specs)).T
    return as_rows(dict(zip(specs, columns, strict=True)), specs)
