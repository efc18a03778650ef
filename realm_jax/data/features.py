"""Builds the features of examples: named NumPy arrays of fixed shape and type."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Int, Int32

from realm_jax.data.layout import from_lists, query_inputs
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

Example: TypeAlias = dict[str, np.ndarray]
"""Arrays of one example, or of several along a leading axis."""

FeatureSpecs: TypeAlias = dict[str, jax.ShapeDtypeStruct]
"""Shape and type of each array of one example."""

SENTENCE_ID = "sentence_id"
"""Name of the feature that examples of one sentence share: an integer that never
decreases from one example to the next. It is not part of a batch; see
`examples.write_examples`."""

WORDPIECE_FEATURES = frozenset(
    ("query_ids", "mask_ids", "document_ids", "question_ids", "answer_ids")
)
"""Names of the features of a batch whose values are ids of the vocabulary."""


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the specification of an int32 feature."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def int64(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the specification of an int64 feature, which is kept off the devices."""
    return jax.ShapeDtypeStruct(shape, np.int64)


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the specification of a float32 feature."""
    return jax.ShapeDtypeStruct(shape, np.float32)


def stack(examples: Sequence[Mapping[str, object]], specs: FeatureSpecs) -> Example:
    """Returns the examples stacked along a new leading axis; there may be none."""
    return {
        name: np.array([example[name] for example in examples], spec.dtype).reshape(
            len(examples), *spec.shape
        )
        for name, spec in specs.items()
    }


def query_row(
    pieces: Int[np.ndarray, " pieces"], length: int, vocabulary: WordPiece
) -> Int32[np.ndarray, " length"]:
    """Returns `[CLS] x [SEP]` padded with 0; x is truncated where it does not fit."""
    if length < 3:
        raise BadInputError(
            f"expected room for [CLS] x [SEP], got a query length of {length}; raise "
            "it to 3 or more (the paper uses 96)."
        )
    sentences = from_lists([pieces[:0]], [pieces])
    return query_inputs(sentences, length, vocabulary.cls, vocabulary.sep, np)[0]


def query_rows(
    texts: Sequence[str], length: int, vocabulary: WordPiece
) -> Int32[np.ndarray, "batch length"]:
    """Returns `query_row` of each text, of which there is at least one."""
    return np.stack(
        [query_row(ids, length, vocabulary) for ids in vocabulary.ids_batch(texts)]
    )


def pieces_of_sentence(
    offsets: Int[np.ndarray, "pieces 2"], sentence: tuple[int, int]
) -> slice:
    """Returns the wordpieces that begin inside the characters [start, end)."""
    start, end = np.searchsorted(offsets[:, 0], sentence)
    return slice(int(start), int(end))


def pieces_of_span(
    offsets: Int[np.ndarray, "pieces 2"], span: tuple[int, int]
) -> slice:
    """Returns the wordpieces that overlap the characters [start, end)."""
    first = np.searchsorted(offsets[:, 1], span[0], side="right")
    end = np.searchsorted(offsets[:, 0], span[1], side="left")
    return slice(int(first), max(int(first), int(end)))


def in_chunks(items: np.ndarray, size: int) -> Iterable[np.ndarray]:
    """Yields consecutive pieces of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
