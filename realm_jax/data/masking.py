"""Makes pre-training examples: one sentence with one salient span masked.

The query is the single sentence that holds the span, and every wordpiece of the span
becomes [MASK]: there is no 80/10/10 rule as in BERT (paper, §3.4, and `realm/` of the
authors' code).
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

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
    query_row,
    stack,
)
from realm_jax.data.salient_spans import Span, Tagger
from realm_jax.data.wordpiece import Encoding, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.types import NULL_BLOCK

QUERY_LENGTH = 96
MAX_MASKS = 10


def pretrain_specs(
    query_length: int = QUERY_LENGTH, max_masks: int = MAX_MASKS
) -> FeatureSpecs:
    """Returns the features of one example of `types.PretrainBatch`.

    Raises:
      BadInputError: a length leaves no room for an example.
    """
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

    Raises:
      BadInputError: a length leaves no room for an example.
    """
    return {**pretrain_specs(query_length, max_masks), SENTENCE_ID: int64()}


def sentence_id(block_id: int, index: int) -> np.ndarray:
    """Returns the id of a sentence, from its block and its index within the block.

    Ids ascend from sentence to sentence of a corpus. They identify sentences where
    `source_block` does not: it is -1 for a corpus that is not the one searched.
    """
    return np.array(int(block_id) << 32 | index, np.int64)


def make_salient_example(
    body: Encoding,
    sentence: tuple[int, int],
    span: tuple[int, int],
    *,
    vocabulary: WordPiece,
    source_block: int = NULL_BLOCK,
    query_length: int = QUERY_LENGTH,
    max_masks: int = MAX_MASKS,
) -> Example | None:
    """Returns the query that masks a span of a sentence.

    Args:
      body: wordpieces of the text that holds the sentence.
      sentence: characters [start, end) of the sentence in that text.
      span: characters [start, end) of the span in that text.
      vocabulary: the tokenizer that made `body`.
      source_block: the block the text is the body of; -1 if none.
      query_length: wordpieces of the query, `[CLS]` and `[SEP]` included.
      max_masks: masked pieces that are scored. Pieces beyond this number are masked
        too, because they would reveal the answer.

    Returns:
      The features of `pretrain_specs`, or None if there is nothing to mask: the span
      does not lie in the sentence, has no wordpieces, or ends beyond the query.
    """
    if not sentence[0] <= span[0] < span[1] <= sentence[1]:
        return None
    query = pieces_of_sentence(body.offsets, sentence)
    masked = pieces_of_span(body.offsets, span)
    first, end = masked.start - query.start, masked.stop - query.start
    if not 0 <= first < end <= min(query_length - 2, query.stop - query.start):
        return None
    return masked_example(
        body.ids[query],
        np.arange(first, end),
        vocabulary=vocabulary,
        source_block=source_block,
        query_length=query_length,
        max_masks=max_masks,
    )


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
      pieces: the sentence.
      masked: indices of the wordpieces that become [MASK], in order of preference; all
        lie within the query. The first `max_masks` are scored, in text order.
      vocabulary: the tokenizer.
      source_block: the block of the sentence; -1 if none.
      query_length: wordpieces of the query, `[CLS]` and `[SEP]` included.
      max_masks: masked pieces that are scored.
    """
    scored = np.sort(masked[:max_masks])
    hidden = pieces.copy()
    hidden[masked] = vocabulary.mask
    example = {
        "query_ids": query_row(hidden, query_length, vocabulary),
        "mask_positions": np.zeros(max_masks, np.int32),
        "mask_ids": np.zeros(max_masks, np.int32),
        "mask_weights": np.zeros(max_masks, np.float32),
        "source_block": np.array(source_block, np.int32),
    }
    example["mask_positions"][: len(scored)] = 1 + scored  # After [CLS].
    example["mask_ids"][: len(scored)] = pieces[scored]
    example["mask_weights"][: len(scored)] = 1.0
    return example


def mask_together(examples: Example) -> Example:
    """Returns one example in which several spans of a sentence are masked.

    Args:
      examples: an example for each span of one sentence, along a leading axis. The
        first span is always masked; the others follow in their order, as long as all
        their wordpieces can be scored.

    Returns:
      An example without the leading axis.
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
    """Returns an example for every salient span of the blocks.

    The trainer draws from the spans of a sentence; see `batch_order.Spans`.

    Args:
      store: the corpus.
      block_ids: shape [block].
      query_length: wordpieces of a query.
      max_masks: masked pieces that are scored.
      tagger: finds the spans in the bodies of the blocks; None uses the stored spans.

    Returns:
      The features of `sentence_specs` along a leading axis, in the order of blocks and
      of spans within them.

    Raises:
      BadInputError: a block id is out of range or a text cannot be read.
    """
    specs = sentence_specs(query_length, max_masks)
    texts = store.texts(block_ids)
    bodies = store.vocabulary.encode_batch([text.body for text in texts])
    spans = [text.spans for text in texts]
    if tagger is not None:
        spans = tagger.tag([text.body for text in texts])
    made = []
    for block_id, text, body, tagged in zip(
        block_ids, texts, bodies, spans, strict=True
    ):
        for span, index in _with_sentences(tagged, text.sentences):
            example = make_salient_example(
                body,
                text.sentences[index],
                (span.start, span.end),
                vocabulary=store.vocabulary,
                source_block=int(block_id),
                query_length=query_length,
                max_masks=max_masks,
            )
            if example is not None:
                made.append({**example, SENTENCE_ID: sentence_id(block_id, index)})
    return stack(made, specs)


def _with_sentences(
    spans: Iterable[Span], sentences: Sequence[tuple[int, int]]
) -> Iterator[tuple[Span, int]]:
    """Yields each span with the index of the sentence it begins in."""
    starts = [start for start, _ in sentences]
    for span in spans:
        index = int(np.searchsorted(starts, span.start, side="right")) - 1
        if index >= 0:
            yield span, index
