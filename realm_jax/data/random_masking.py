"""Makes pre-training examples with random masks, the ablations of the paper (Table 2).

*Random tokens*, as in BERT (Devlin et al. 2019, §3.1): 15 % of the wordpieces of a
sentence. *Random spans*, as in SpanBERT (Joshi et al. 2020, §3.1): runs of whole words
with geometrically distributed lengths, until 15 % of the wordpieces are masked.

Every masked piece becomes [MASK]. BERT and SpanBERT keep a tenth of them and replace
another tenth by random pieces, to reduce the mismatch with fine-tuning, which has no
[MASK]. Here that would bias the comparison: salient spans are always [MASK] (see
`masking.py`), and a piece that is kept reveals the answer to retriever and reader.

The choice of masks is a function of a seed, the block and the sentence alone.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import (
    SENTENCE_ID,
    Example,
    int64,
    pieces_of_sentence,
)
from realm_jax.data.masking import (
    MAX_MASKS,
    QUERY_LENGTH,
    MaskedRows,
    masked_inputs,
    sentence_id,
)
from realm_jax.data.references import (
    ABOUT,
    BLOCK,
    END,
    FIRST,
    as_rows,
    find_sentences,
    read_blocks,
    require_masks,
)
from realm_jax.data.wordpiece import WordPiece

MASKED_FRACTION = 0.15
"""Share of a sentence's wordpieces that are masked."""
SPAN_STOP_PROBABILITY = 0.2
"""The parameter p of the geometric distribution of span lengths."""
MAX_SPAN_WORDS = 10
MASKED, SCORED = "masked", "scored"

# SpanBERT calls it clipping, but its mean of 3.8 words is that of the distribution
# truncated at ten and renormalised.
_LENGTH_CDF = (1 - (1 - SPAN_STOP_PROBABILITY) ** np.arange(1, MAX_SPAN_WORDS + 1)) / (
    1 - (1 - SPAN_STOP_PROBABILITY) ** MAX_SPAN_WORDS
)

Draw: TypeAlias = Callable[
    [WordPiece, Int[np.ndarray, " pieces"], Sequence[int | str]],
    Int[np.ndarray, " masked"],
]
"""Maps (vocabulary, wordpieces of the query, key) to the positions to mask, those to be
scored first. Empty where the query is too short to mask a part of it only."""


class PieceRows(MaskedRows):
    """Rows that mask any wordpieces of a sentence."""

    kind: ClassVar[str] = "masked_pieces"
    about: ClassVar[str] = (
        f"{ABOUT}; a bit for each of them, the highest of the first byte first, says "
        "whether it is masked, and whether it is scored"
    )

    @property
    def own_columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """See `SentenceRows.own_columns`."""
        bits = ((_num_bytes(self.query_length),), np.dtype(np.uint8))
        return {MASKED: bits, SCORED: bits}

    def lay_out(self, store: BlockStore, rows: Mapping[str, np.ndarray]) -> Example:
        """Returns the examples of rows; see `SentenceRows.lay_out`."""
        sentences = find_sentences(store, rows)
        room = self.query_length - 2
        is_masked, is_scored = (
            np.unpackbits(rows[name].astype(np.uint8), axis=1, count=room).astype(bool)
            for name in (MASKED, SCORED)
        )
        lengths = sentences.end - sentences.first
        outside = is_masked & (np.arange(room) >= lengths[:, None])
        wrong = outside | (is_scored & ~is_masked)
        counts = is_scored.sum(axis=1)
        fits = (counts > 0) & (counts <= self.max_masks)
        require_masks(~wrong.any(axis=1) & fits, rows)
        return masked_inputs(
            sentences.pieces,
            is_masked,
            is_scored,
            rows[BLOCK],
            vocabulary=store.vocabulary,
            max_masks=self.max_masks,
        )


def random_rows(
    store: BlockStore,
    block_ids: np.ndarray,
    draw: Draw,
    *,
    query_length: int = QUERY_LENGTH,
    max_masks: int = MAX_MASKS,
    seed: int = 0,
) -> Example:
    """Returns columns of `PieceRows`, and `SENTENCE_ID`, for sentences of the blocks.

    Sentences too short to mask a part of them only are left out.

    Args:
      max_masks: masked pieces that are scored, the first of those drawn. BERT masks no
        more than it scores; here the share of masked pieces is kept, and those beyond
        are masked without being scored.
    """
    layout = PieceRows(query_length, max_masks)
    places, masks = [], []
    for block, (text, body) in zip(
        block_ids, read_blocks(store, block_ids), strict=True
    ):
        for index, sentence in enumerate(text.sentences):
            place = pieces_of_sentence(body.offsets, sentence)
            pieces = body.ids[place][: query_length - 2]
            masked = draw(store.vocabulary, pieces, (seed, int(block), index))
            if not len(masked):
                continue
            places.append((sentence_id(block, index), block, place.start, place.stop))
            is_masked = np.zeros((2, query_length - 2), bool)
            is_masked[0, masked] = is_masked[1, masked[:max_masks]] = True
            masks.append(np.packbits(is_masked, axis=-1))
    columns = np.array(places, np.int64).reshape(-1, 4).T
    bits = np.array(masks, np.uint8).reshape(-1, 2, _num_bytes(query_length))
    named = dict(zip((SENTENCE_ID, BLOCK, FIRST, END), columns, strict=True))
    return as_rows(
        {**named, MASKED: bits[:, 0], SCORED: bits[:, 1]},
        {SENTENCE_ID: int64(), **layout.columns},
    )


def draw_tokens(
    vocabulary: WordPiece, pieces: Int[np.ndarray, " pieces"], key: Sequence[int | str]
) -> Int[np.ndarray, " masked"]:
    """Returns 15 % of the positions, rounded, at least one, drawn uniformly."""
    del vocabulary  # Parts of words are drawn like whole ones.
    if len(pieces) < 2:
        return np.zeros(0, np.int64)
    count = max(1, round(MASKED_FRACTION * len(pieces)))
    order = np.argsort(_uniforms(len(pieces), "token", *key), kind="stable")
    return order[:count]


def draw_spans(
    vocabulary: WordPiece, pieces: Int[np.ndarray, " pieces"], key: Sequence[int | str]
) -> Int[np.ndarray, " masked"]:
    """Returns the positions of spans of whole words; see `choose_spans`."""
    starts = np.flatnonzero(~vocabulary.is_inner[pieces])
    # The first piece begins a word, whatever it is; np.unique sorts.
    edges = np.unique(np.concatenate([[0], starts, [len(pieces)]]))
    lengths = np.diff(edges).tolist()
    uniforms = iter(_uniforms(2 * len(lengths), "span", *key).tolist())
    spans = choose_spans(lengths, uniforms)
    parts = [np.arange(edges[span.start], edges[span.stop]) for span in spans]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def span_length(uniform: float) -> int:
    """Returns a span length in words, from 1 to 10, for a uniform number in [0, 1).

    P(n) is proportional to 0.2 · 0.8^(n-1), with a mean of 3.8 (SpanBERT, §3.1).
    """
    return 1 + int(np.searchsorted(_LENGTH_CDF, uniform, side="right"))


def choose_spans(word_lengths: Sequence[int], uniforms: Iterator[float]) -> list[range]:
    """Returns spans of words that cover 15 % of the wordpieces, in the order drawn.

    The position of a span of drawn length is uniform over those where it overlaps no
    other span; where there is none, the span is as long as the longest free run. It
    ends early with the word that reaches the 15 %, or to leave one word unmasked.

    Args:
      word_lengths: wordpieces of each word of the sentence.
      uniforms: uniform numbers in [0, 1), two for each span.
    """
    wanted = MASKED_FRACTION * sum(word_lengths)
    is_free = np.ones(len(word_lengths), bool)
    masked, spans = 0, []
    while masked < wanted and is_free.sum() > 1:
        starts, length = _places(is_free, span_length(next(uniforms)))
        start = int(starts[int(next(uniforms) * len(starts))])
        end = start
        while end < start + length and masked < wanted and is_free.sum() > 1:
            masked += word_lengths[end]
            is_free[end] = False
            end += 1
        spans.append(range(start, end))
    return spans


def _places(
    is_free: Bool[np.ndarray, " words"], length: int
) -> tuple[Int[np.ndarray, " places"], int]:
    """Returns the possible starts of a span of free words, and its feasible length."""
    places = np.arange(len(is_free))
    last_taken = np.maximum.accumulate(np.where(is_free, -1, places))
    runs = places - last_taken  # Free words up to and including each.
    length = min(length, int(runs.max()))
    return places[runs >= length] - length + 1, length


def _uniforms(count: int, *key: int | str) -> Float64[np.ndarray, " count"]:
    """Returns `count` numbers like `documents.stable_uniform`, from one hash."""
    digest = hashlib.shake_128("\0".join(map(str, key)).encode()).digest(8 * count)
    return (np.frombuffer(digest, "<u8") >> np.uint64(11)) / (1 << 53)


def _num_bytes(query_length: int) -> int:
    """Returns the bytes that hold a bit for each wordpiece of a query."""
    return -(-(query_length - 2) // 8)
