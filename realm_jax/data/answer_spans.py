"""Locates the answers to a question in a sequence (distant supervision).

Text answers are matched as wordpieces, in arrays. Answers that are regular expressions
are matched in the text that the wordpieces were made from.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.features import pieces_of_span


def answer_starts(
    ids: Int[np.ndarray, "batch item length"],
    answer_ids: Int[np.ndarray, "batch answer piece"],
) -> Bool[np.ndarray, "batch item answer length"]:
    """Marks the positions at which a complete answer of the same row begins.

    Args:
      ids: wordpieces, 0 where padded.
      answer_ids: wordpieces of each answer, 0 where unused; an answer without pieces
        matches nowhere.
    """
    batch, num_items, length = ids.shape
    num_pieces = answer_ids.shape[-1]
    padded = np.pad(ids, ((0, 0), (0, 0), (0, num_pieces - 1)))
    wanted = answer_ids[:, None, :, :]
    # Compare first pieces first: few positions are left to compare in full.
    found = (ids[:, :, None, :] == wanted[..., :1]) & (wanted[..., :1] != 0)
    rows = np.nonzero(found)
    b, item, answer, start = rows
    windows = padded[b[:, None], item[:, None], start[:, None] + np.arange(num_pieces)]
    pieces = answer_ids[b, answer]
    whole = ((windows == pieces) | (pieces == 0)).all(axis=-1)
    found[rows] = whole
    assert found.shape == (batch, num_items, answer_ids.shape[1], length)
    return found


def answer_spans(
    ids: Int[np.ndarray, "batch item length"],
    answer_ids: Int[np.ndarray, "batch answer piece"],
    max_span: int,
) -> Bool[np.ndarray, "batch item span"]:
    """Marks the spans that are an answer, numbered as in `models.span_reader`.

    Args:
      ids: joined wordpieces; matches in the question are masked out by the reader,
        which only admits spans of the body.
      answer_ids: as in `answer_starts`.
      max_span: wordpieces of the longest span.
    """
    starts = answer_starts(ids, answer_ids)
    widths = (answer_ids != 0).sum(axis=-1)
    spans = np.zeros((*ids.shape, max_span), bool)
    b, item, answer, start = np.nonzero(starts)
    width = widths[b, answer]
    short = width <= max_span
    spans[b[short], item[short], start[short], width[short] - 1] = True
    return spans.reshape(*ids.shape[:2], -1)


def holds_pattern(
    text: str,
    offsets: Int[np.ndarray, "piece 2"],
    begins_word: Bool[np.ndarray, " piece"],
    patterns: Sequence[re.Pattern[str]],
) -> bool:
    """Returns whether a pattern matches a text starting at the beginning of a word.

    A match inside a word does not count ("ten" in "written"). It may end inside a word,
    because patterns are often stems ("manufactur").

    Args:
      text: the body of a block.
      offsets: the characters [start, end) of its wordpieces.
      begins_word: False for the pieces that continue a word.
      patterns: of the answers.
    """
    for pattern in patterns:
        for match in pattern.finditer(text):
            pieces = pieces_of_span(offsets, match.span())
            if (
                pieces.start < pieces.stop
                and begins_word[pieces.start]
                and offsets[pieces.start, 0] >= match.start()
            ):
                return True
    return False


def pattern_spans(
    text: str,
    offsets: Int[np.ndarray, "piece 2"],
    begins_word: Bool[np.ndarray, " piece"],
    patterns: Sequence[re.Pattern[str]],
    max_span: int,
) -> Bool[np.ndarray, "piece width"]:
    """Marks the spans whose text is a correct answer, by first piece and width - 1.

    A span is correct if `metrics.answers.regex_match` accepts its characters, so that
    training and scoring agree; if it begins at the beginning of a word; and if the
    match reaches its last piece: where "Paris" matches, "Paris, the capital" does not
    count.

    Args:
      text: the body of a block.
      offsets: the characters [start, end) of its wordpieces.
      begins_word: False for the pieces that continue a word.
      patterns: of the answers.
      max_span: wordpieces of the longest span.
    """
    num_pieces = len(offsets)
    spans = np.zeros((num_pieces, max_span), bool)
    for first in np.flatnonzero(begins_word):
        begin = offsets[first, 0]
        for last in range(first, min(first + max_span, num_pieces)):
            answer = text[begin : offsets[last, 1]]
            last_begins = offsets[last, 0] - begin
            spans[first, last - first] = any(
                match.end() > last_begins
                for pattern in patterns
                if (match := pattern.match(answer))
            )
    return spans
