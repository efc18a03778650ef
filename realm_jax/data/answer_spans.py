"""Locates the answers to a question in a sequence (distant supervision).

Text answers are matched as wordpieces, in arrays. Answers that are regular expressions
are matched in the text that the wordpieces were made from.

What begins or ends inside a word is no answer: "bat" is none in "bat ##man". There are
two rules of where words end, and each is used where it can be:

- Of spans, `words.piece_edges`, by the text. Only such spans are given as answers, so
  only they are labelled as right (`index/answer_labels.py`).
- Of blocks, `words.continues_word`, by wordpieces alone, for thousands of blocks a
  question. A hyphen, an apostrophe or a comma separates words here: "Jean-Paul" holds
  the answer "Paul", though no span in it is right. So it is for recall
  (`metrics.answers.has_answer`), which also passes over articles and punctuation: the
  answer "the Beatles" is found in "Beatles sang".

For patterns there is one rule, `metrics.answers.has_pattern`. ORQA's own is looser: a
span is any run of the answer's wordpieces, a block any text with the answer's
characters in it.

Both compare spellings as `words.py` makes them, so that what is labelled as
right counts as right.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.words import canonical_text


def answer_starts(
    ids: Int[np.ndarray, "batch item length"],
    answer_ids: Int[np.ndarray, "batch answer piece"],
    continues_word: Bool[np.ndarray, " vocab"],
) -> Bool[np.ndarray, "batch item answer length"]:
    """Marks the positions at which a complete answer of the same row begins.

    Args:
      ids: wordpieces, 0 where padded. A word that is cut off at the end of a row ends
        there.
      answer_ids: wordpieces of each answer, 0 where unused; an answer without pieces
        matches nowhere.
      continues_word: for each wordpiece, whether it prevents an answer from ending
        before it (`words.continues_word`).
    """
    batch, num_items, length = ids.shape
    num_pieces = answer_ids.shape[-1]
    padded = np.pad(ids, ((0, 0), (0, 0), (0, num_pieces)))
    wanted = answer_ids[:, None, :, :]
    # Compare first pieces first: few positions are left to compare in full.
    found = (ids[:, :, None, :] == wanted[..., :1]) & (wanted[..., :1] != 0)
    # Along one axis NumPy skips what is False quickly; along several it does not.
    rows = np.unravel_index(np.flatnonzero(found), found.shape)
    b, item, answer, start = rows
    windows = padded[b[:, None], item[:, None], start[:, None] + np.arange(num_pieces)]
    pieces = answer_ids[b, answer]
    equal = ((windows == pieces) | (pieces == 0)).all(axis=-1)
    following = padded[b, item, start + (pieces != 0).sum(axis=-1)]
    found[rows] = equal & ~continues_word[following]
    assert found.shape == (batch, num_items, answer_ids.shape[1], length)
    return found


def answer_spans(
    ids: Int[np.ndarray, "batch item length"],
    answer_ids: Int[np.ndarray, "batch answer piece"],
    continues_word: Bool[np.ndarray, " vocab"],
    max_span: int,
) -> Bool[np.ndarray, "batch item span"]:
    """Marks the spans that are an answer, numbered as in `models.span_reader`.

    Args:
      ids: joined wordpieces; matches in the question are masked out by the reader,
        which only admits spans of the body.
    """
    starts = answer_starts(ids, answer_ids, continues_word)
    widths = (answer_ids != 0).sum(axis=-1)
    spans = np.zeros((*ids.shape, max_span), bool)
    b, item, answer, start = np.nonzero(starts)
    width = widths[b, answer]
    short = width <= max_span
    spans[b[short], item[short], start[short], width[short] - 1] = True
    return spans.reshape(*ids.shape[:2], -1)


def pattern_spans(
    text: str,
    offsets: Int[np.ndarray, "piece 2"],
    begins_word: Bool[np.ndarray, " piece"],
    ends_word: Bool[np.ndarray, " piece"],
    patterns: Sequence[re.Pattern[str]],
    max_span: int,
) -> Bool[np.ndarray, "piece width"]:
    """Marks the spans whose text is a correct answer, by first piece and width - 1.

    A span is correct if `metrics.answers.regex_match` accepts its characters, so that
    training and scoring agree; if it begins and ends with a word; and if the match
    reaches its last word: where "Paris" matches, "Paris, the capital" does not count.
    """
    num_pieces = len(offsets)
    begins_part = begins_word | np.append(True, ends_word[:-1])[:num_pieces]
    last_begins = np.maximum.accumulate(np.where(begins_part, offsets[:, 0], 0))
    spans = np.zeros((num_pieces, max_span), bool)
    for first in np.flatnonzero(begins_word):
        begin = offsets[first, 0]
        for last in range(first, min(first + max_span, num_pieces)):
            if not ends_word[last]:
                continue
            answer = canonical_text(text[begin : offsets[last, 1]])
            before_last = len(canonical_text(text[begin : last_begins[last]]))
            spans[first, last - first] = any(
                match.end() > before_last
                for pattern in patterns
                if (match := pattern.match(answer))
            )
    return spans
