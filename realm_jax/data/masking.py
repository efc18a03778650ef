"""Makes pre-training examples: one sentence with one salient span masked.

The query is the single sentence that holds the span, and every wordpiece of the span
becomes [MASK]: there is no 80/10/10 rule as in BERT (paper, §3.4, and `realm/` of the
authors' code).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import (
    SENTENCE_ID,
    Example,
    FeatureSpecs,
    float32,
    int32,
    int64,
    pieces_of_sentence,
    pieces_of_span,
)
from realm_jax.data.layout import Documents, from_lists, query_inputs
from realm_jax.data.references import (
    ABOUT,
    BLOCK,
    SentenceRows,
    as_rows,
    find_sentences,
    read_blocks,
    require_masks,
)
from realm_jax.data.salient_spans import Span, Tagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

QUERY_LENGTH = 96
MAX_MASKS = 10
MASK_FIRST, MASK_END = "mask_first", "mask_end"


def pretrain_specs(
    query_length: int = QUERY_LENGTH, max_masks: int = MAX_MASKS
) -> FeatureSpecs:
    """Returns the features of one example of `types.PretrainBatch`."""
    if query_length < 3 or max_masks < 1:
        raise BadInputError(
            "expected a query length of at least 3 and at least 1 mask, got "
            f"{query_length} and {max_masks}; raise them (the paper uses 96 and 10)."
        )
    return {
        "query_ids": int32(query_length),
        "mask_positions": int32(max_masks),
        "mask_ids": int32(max_masks),
        "mask_weights": float32(max_masks),
        "source_block": int32(),
    }


def sentence_specs(
    query_length: int = QUERY_LENGTH, max_masks: int = MAX_MASKS
) -> FeatureSpecs:
    """Returns the features of one example of a masked-sentence task.

    They are those of `pretrain_specs`, and `features.SENTENCE_ID`.
    """
    return {**pretrain_specs(query_length, max_masks), SENTENCE_ID: int64()}


def sentence_id(block_id: int, index: int) -> np.ndarray:
    """Returns the id of a sentence, from its block and its index within the block.

    Ids ascend from sentence to sentence of a corpus. They identify sentences where
    `source_block` does not: it is -1 for a corpus that is not the one searched.
    """
    return np.array(int(block_id) << 32 | index, np.int64)


@dataclasses.dataclass(frozen=True)
class MaskedRows(SentenceRows):
    """Rows that mask wordpieces of a sentence.

    Attributes:
      query_length: wordpieces of the query, `[CLS]` and `[SEP]` included.
      max_masks: maximum number of masked pieces that are scored.
    """

    query_length: int
    max_masks: int

    def __post_init__(self):
        pretrain_specs(self.query_length, self.max_masks)  # Checks them.

    @property
    def specs(self) -> FeatureSpecs:
        """Features of an example in a batch."""
        return pretrain_specs(self.query_length, self.max_masks)


class SpanRows(MaskedRows):
    """Rows that mask one span of a sentence, whose first pieces are scored."""

    kind: ClassVar[str] = "masked_span"
    about: ClassVar[str] = (
        f"{ABOUT}, of which [mask_first, mask_end), counted from its first one, are "
        "masked"
    )

    @property
    def own_columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """See `SentenceRows.own_columns`."""
        dtype = np.min_scalar_type(self.query_length)
        return {MASK_FIRST: ((), dtype), MASK_END: ((), dtype)}

    def lay_out(self, store: BlockStore, rows: Mapping[str, np.ndarray]) -> Example:
        """Returns the examples of rows; see `SentenceRows.lay_out`."""
        sentences = find_sentences(store, rows)
        first, end = (rows[name].astype(np.int64) for name in (MASK_FIRST, MASK_END))
        most = np.minimum(sentences.end - sentences.first, self.query_length - 2)
        require_masks((first >= 0) & (first < end) & (end <= most), rows)
        column = np.arange(self.query_length - 2)
        is_masked = (first[:, None] <= column) & (column < end[:, None])
        return masked_inputs(
            sentences.pieces,
            is_masked,
            is_masked & (column < first[:, None] + self.max_masks),
            rows[BLOCK],
            vocabulary=store.vocabulary,
            max_masks=self.max_masks,
        )


def find_span(
    offsets: Int[np.ndarray, "pieces 2"],
    sentence: tuple[int, int],
    span: tuple[int, int],
    query_length: int,
) -> tuple[int, int, int, int] | None:
    """Returns first and end of a sentence in its text, and of a span in the sentence.

    Those of the span count from the sentence. None if there is nothing to mask: the
    span does not lie in the sentence, has no wordpieces, or ends beyond the query.

    Args:
      offsets: characters [start, end) of the wordpieces of the text.
      sentence: characters [start, end) of the sentence in that text.
      span: the same of the span.
      query_length: wordpieces of the query, `[CLS]` and `[SEP]` included.
    """
    if not sentence[0] <= span[0] < span[1] <= sentence[1]:
        return None
    query = pieces_of_sentence(offsets, sentence)
    masked = pieces_of_span(offsets, span)
    first, end = masked.start - query.start, masked.stop - query.start
    if not 0 <= first < end <= min(query_length - 2, query.stop - query.start):
        return None
    return query.start, query.stop, first, end


def masked_example(
    pieces: Int[np.ndarray, " pieces"],
    masked: Int[np.ndarray, " masked"],
    *,
    vocabulary: WordPiece,
    source_block: int,
    query_length: int,
    max_masks: int,
) -> Example:
    """Returns the features of `pretrain_specs` for a sentence with masked wordpieces.

    Args:
      masked: indices of the wordpieces that become [MASK], in order of preference; all
        lie within the query. The first `max_masks` are scored, in text order. The
        others are masked too, because they would reveal the answer.
    """
    is_masked, is_scored = np.zeros((2, 1, query_length - 2), bool)
    is_masked[0, masked] = True
    is_scored[0, masked[:max_masks]] = True
    examples = masked_inputs(
        from_lists([pieces[:0]], [pieces]),
        is_masked,
        is_scored,
        np.array([source_block]),
        vocabulary=vocabulary,
        max_masks=max_masks,
    )
    return {name: array[0] for name, array in examples.items()}


def masked_inputs(
    sentences: Documents[np.ndarray],
    is_masked: Bool[np.ndarray, "row piece"],
    is_scored: Bool[np.ndarray, "row piece"],
    source_block: Int[np.ndarray, " row"],
    *,
    vocabulary: WordPiece,
    max_masks: int,
) -> Example:
    """Returns the features of `pretrain_specs` for many sentences.

    Args:
      sentences: the wordpieces of each, as bodies without titles.
      is_masked: which of the wordpieces that fit a query become [MASK].
      is_scored: which of them are scored, at most `max_masks` of a sentence.
      max_masks: slots for scored pieces, which are filled in text order.
    """
    count, room = is_masked.shape
    query_ids = query_inputs(sentences, room + 2, vocabulary.cls, vocabulary.sep, np)
    pieces = query_ids[:, 1:-1]
    rows, columns = np.nonzero(is_scored)
    slots = (is_scored.cumsum(axis=1) - 1)[rows, columns]
    examples = {
        "query_ids": query_ids,
        "mask_positions": np.zeros((count, max_masks), np.int32),
        "mask_ids": np.zeros((count, max_masks), np.int32),
        "mask_weights": np.zeros((count, max_masks), np.float32),
        "source_block": source_block.astype(np.int32),
    }
    examples["mask_positions"][rows, slots] = 1 + columns  # After [CLS].
    examples["mask_ids"][rows, slots] = pieces[rows, columns]
    examples["mask_weights"][rows, slots] = 1.0
    pieces[is_masked] = vocabulary.mask
    return examples


def mask_together(examples: Example) -> Example:
    """Returns one example in which several spans of a sentence are masked.

    Args:
      examples: an example for each span of one sentence, along a leading axis. The
        first span is always masked; the others follow in their order, as long as all
        their wordpieces can be scored.

    """
    max_masks = examples["mask_positions"].shape[1]
    counts = (examples["mask_weights"] > 0).sum(axis=1)
    merged = {name: array[0].copy() for name, array in examples.items()}
    used = int(counts[0])
    # The id at a scored position is the vocabulary's [MASK].
    mask = merged["query_ids"][merged["mask_positions"][0]]
    for row in range(1, len(counts)):
        count = int(counts[row])
        hidden = (examples["query_ids"][row] == mask).sum()
        # A span with masked but unscored pieces would hide more than is predicted.
        if used + count > max_masks or hidden != count:
            continue
        positions = examples["mask_positions"][row, :count]
        merged["query_ids"][positions] = mask
        merged["mask_positions"][used : used + count] = positions
        merged["mask_ids"][used : used + count] = examples["mask_ids"][row, :count]
        merged["mask_weights"][used : used + count] = 1.0
        used += count
    return merged


def salient_examples(
    store: BlockStore,
    block_ids: np.ndarray,
    *,
    query_length: int = QUERY_LENGTH,
    max_masks: int = MAX_MASKS,
    tagger: Tagger | None = None,
) -> Example:
    """Returns an example for every salient span of the blocks, in their order.

    The trainer draws from the spans of a sentence; see `batch_order.Spans`.

    Args:
      tagger: finds the spans in the bodies of the blocks; None uses the stored spans.

    """
    layout = SpanRows(query_length, max_masks)
    rows = salient_rows(store, block_ids, query_length=query_length, tagger=tagger)
    return {**layout.lay_out(store, rows), SENTENCE_ID: rows[SENTENCE_ID]}


def salient_rows(
    store: BlockStore,
    block_ids: np.ndarray,
    *,
    query_length: int = QUERY_LENGTH,
    tagger: Tagger | None = None,
) -> Example:
    """Returns `salient_examples` as columns of `SpanRows`, and `SENTENCE_ID`."""
    found = read_blocks(store, block_ids)
    spans = [text.spans for text, _ in found]
    if tagger is not None:
        spans = tagger.tag([text.body for text, _ in found])
    made = [
        (sentence_id(block_id, index), block_id, *place)
        for block_id, (text, body), tagged in zip(block_ids, found, spans, strict=True)
        for span, index in _with_sentences(tagged, text.sentences)
        if (
            place := find_span(
                body.offsets,
                text.sentences[index],
                (span.start, span.end),
                query_length,
            )
        )
    ]
    specs = {SENTENCE_ID: int64(), **SpanRows(query_length, MAX_MASKS).columns}
    columns = np.array(made, np.int64).reshape(-1, len(specs)).T
    return as_rows(dict(zip(specs, columns, strict=True)), specs)


def _with_sentences(
    spans: Iterable[Span], sentences: Sequence[tuple[int, int]]
) -> Iterator[tuple[Span, int]]:
    """Yields each span with the index of the sentence it begins in."""
    starts = [start for start, _ in sentences]
    for span in spans:
        index = int(np.searchsorted(starts, span.start, side="right")) - 1
        if index >= 0:
            yield span, index
