"""Where the wordpieces of an answer stand in a sequence (distant supervision)."""

import numpy as np
from jaxtyping import Bool, Int


def answer_starts(
    ids: Int[np.ndarray, "batch item length"],
    answer_ids: Int[np.ndarray, "batch answer piece"],
) -> Bool[np.ndarray, "batch item answer length"]:
    """True where an answer begins in a sequence of the same row, whole.

    Args:
      ids: wordpieces, 0 where padded.
      answer_ids: wordpieces of each answer, 0 where unused; an answer of no piece
        begins nowhere.
    """
    batch, num_items, length = ids.shape
    num_pieces = answer_ids.shape[-1]
    padded = np.pad(ids, ((0, 0), (0, 0), (0, num_pieces - 1)))
    wanted = answer_ids[:, None, :, :]
    # First pieces first: they leave few places at which to look for the rest.
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
    """True for the spans that are an answer, numbered as in `models.span_reader`.

    Args:
      ids: joined wordpieces; matches in the question are masked by the reader, whose
        valid spans lie in the body.
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
