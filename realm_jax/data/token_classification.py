"""Converts wordpiece labels in the BIO scheme of CoNLL-2003 to spans of text.

`B-PER` begins a name of type PER, `I-PER` continues one, `O` is outside. In the
original scheme (IOB1) `I-` begins a name too, and `B-` only separates two neighbours of
one type; both schemes are accepted.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from realm_jax.data.salient_spans import Span, bare_name
from realm_jax.data.wordpiece import Encoding
from realm_jax.errors import BadInputError

OUTSIDE = "O"
_LABEL = re.compile(r"O|[BI]-.+")
# Quantities of OntoNotes and of Korean corpora (KLUE), and their dates, which are found
# by the pattern instead: see `salient_spans.ENTITY_LABELS`.
_NOT_SALIENT = (
    *("CARDINAL", "ORDINAL", "PERCENT", "MONEY", "QUANTITY", "TIME", "DATE"),
    *("DT", "TI", "QT"),
)


def check_labels(labels: Sequence[str], where: str) -> None:
    """Checks that labels are in the BIO scheme.

    Raises:
      BadInputError: a label is none of O, B-…, I-…, or all are O.
    """
    wrong = [label for label in labels if not _LABEL.fullmatch(label)]
    if wrong or set(labels) <= {OUTSIDE}:
        raise BadInputError(
            f"expected labels as in CoNLL-2003 (O, B-PER, I-PER, …) in {where}, got "
            f"{', '.join(wrong or labels) or 'none'}; give a checkpoint that was "
            "trained to find names, with its labels in id2label."
        )


def word_spans(
    text: str,
    encoding: Encoding,
    is_inner: Bool[np.ndarray, " pieces"],
    labels: Sequence[str],
) -> list[Span]:
    """Returns the names in a text: in order, disjoint, not empty.

    The first wordpiece of a word determines the label of the word. Words are those of
    BERT, which in Korean include the particles.

    Args:
      text: the text.
      encoding: its wordpieces.
      is_inner: True for the wordpieces that continue a word.
      labels: the label of each wordpiece.
    """
    spans: list[Span] = []
    kind_before = None
    for (start, end), inner, label in zip(
        encoding.offsets.tolist(), is_inner.tolist(), labels, strict=True
    ):
        if inner and spans and kind_before is not None:
            spans[-1] = spans[-1]._replace(end=end)
        if inner:
            continue
        begins, _, kind = label.partition("-")
        if label == OUTSIDE:
            kind_before = None
        elif begins == "I" and kind == kind_before:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(Span(start, end, kind))
            kind_before = kind
    found = [
        Span(*bare_name(text, start, end), kind)
        for start, end, kind in spans
        if kind not in _NOT_SALIENT
    ]
    return [span for span in found if span.start < span.end]


def windows(is_inner: Bool[np.ndarray, " pieces"], room: int) -> list[slice]:
    """Splits wordpieces into consecutive windows of at most `room` pieces.

    The windows cover all pieces, and begin at a word boundary unless a word is longer
    than a window.
    """
    cuts, start = [], 0
    while len(is_inner) - start > room:
        begins = np.flatnonzero(~is_inner[start + 1 : start + room + 1])
        end = start + 1 + int(begins[-1]) if len(begins) else start + room
        cuts.append(slice(start, end))
        start = end
    return [*cuts, slice(start, len(is_inner))] if start < len(is_inner) else cuts
