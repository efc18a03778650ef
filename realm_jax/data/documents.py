"""Defines documents, parses records of files into them, and assigns them to splits.

A record that is not a document is a value too, `BadRecord` or `LeftOut`: the reader of
a corpus counts the records that were not used, and decides how many to tolerate. The
split of an article is a hash of its id, independent of order and of any list.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from realm_jax.data.records import (
    BadRecord,
    RecordError,
    clean_text,
    decode,
    json_object,
    shorten,
)
from realm_jax.data.salient_spans import Span

MAX_RECORD_BYTES = 1 << 24
"""Longest line or file, in bytes, read as one document; no real article is longer."""

GIVEN = "GIVEN"
"""Label of a span that a document provides without a label."""

NO_ARTICLE = "no article: a disambiguation page, list, index or outline"
"""The reason for leaving out a Wikipedia page that is not an article."""

# As in the authors' code (orqa/preprocessing/wiki_preprocessor.py).
_NO_ARTICLE_TITLE = re.compile(r"(?:List|Index|Outline) of .+|.*\(disambiguation\)")
TRAIN = "train"
VALIDATION = "validation"
VALIDATION_FRACTION = 0.01
"""Share of the articles that are held out from training."""


@dataclass(frozen=True)
class Document:
    """An article.

    Attributes:
      title: its title; may be empty.
      text: its text; one without any wordpiece is left out of the corpus.
      source_id: identifies the article; all its blocks share it.
      spans: salient spans in characters of `text`, or None to have them tagged.
      sentences: its sentences as characters [start, end) of `text`, in order and
        disjoint, or None to have the text split into sentences.
    """

    title: str
    text: str
    source_id: str
    spans: tuple[Span, ...] | None = None
    sentences: tuple[tuple[int, int], ...] | None = None


class LeftOut(NamedTuple):
    """A record that is intact, but excluded from a corpus.

    Attributes:
      reason: the rule that excludes it, worded the same for all such records.
    """

    where: str
    reason: str


Record = Document | BadRecord | LeftOut


class ByteRanges(NamedTuple):
    """Byte ranges [start, limit) of a UTF-8 text, with optional labels."""

    starts: Sequence[int] | np.ndarray
    limits: Sequence[int] | np.ndarray
    labels: Sequence[bytes] | np.ndarray | None = None


def is_article(title: str) -> bool:
    """Returns whether a Wikipedia page is an article, by its title.

    The rule is that of the authors' code: disambiguation pages and those that begin
    with "List of", "Index of" or "Outline of" are not articles.
    """
    return _NO_ARTICLE_TITLE.match(title) is None


def document_from_json(line: bytes, where: str) -> Document:
    """Reads an object with `text`, and optionally `title`, `id` and `spans`.

    Args:
      line: the object in UTF-8. `_id`, as BEIR has it, is the same as `id`. Without
        either, the title names the document, and the text one without a title: each of
        these is an article of its own. `spans` is a list of [start, end] or
        [start, end, label] in characters of the text. Other fields are ignored.
    """
    return document_from_fields(json_object(line, where), where)


def document_from_fields(fields: Mapping[str, Any], where: str) -> Document:
    """Converts a parsed object to a document; see `document_from_json`."""
    title, text = title_and_text(fields, where)
    spans = None
    if "spans" in fields:
        spans = _json_spans(fields["spans"], len(text), where)
    name = id_field(fields, where) or title
    if not name.strip() and text.strip():
        name = f"text-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return Document(title, text, name, spans)


def id_field(fields: Mapping[str, Any], where: str) -> str:
    """Returns the field `id`, or `_id`, a string or a number; "" if it is absent."""
    value = fields.get("id")
    value = fields.get("_id") if value is None else value
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise RecordError(
            where,
            "expected 'id' to be a string or a number, got "
            f"{shorten(json.dumps(value))}; correct the line.",
        )
    return clean_text(str(value))


def title_and_text(fields: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the fields `title`, "" if it is absent, and `text`; both may be empty."""
    title, text = fields.get("title"), fields.get("text")
    title = "" if title is None else title
    if not isinstance(title, str) or not isinstance(text, str):
        raise RecordError(
            where,
            "expected an object with a string 'text', and 'title' if it has one, got "
            f"{shorten(json.dumps(fields))}; correct the line.",
        )
    return clean_text(title), clean_text(text)


def document_from_bytes(
    title: bytes,
    text: bytes,
    where: str,
    *,
    spans: ByteRanges | None = None,
    sentences: ByteRanges | None = None,
) -> Document:
    """Converts UTF-8 texts and byte offsets to a document.

    Args:
      title: the title, which also identifies the document.
      spans: salient spans, not empty.
      sentences: in order and disjoint.
    """
    name, body = decode(title, "title", where), decode(text, "text", where)
    given = None if spans is None else _byte_spans(text, spans, where)
    if sentences is None:
        return Document(name, body, name, given)
    # An empty sentence can be dropped without losing text.
    ranges = _character_ranges(text, sentences, "sentence", where)
    parts = tuple((start, end) for start, end in ranges if start < end)
    if any(left[1] > right[0] for left, right in pairwise(parts)):
        raise RecordError(
            where, "expected sentences in order and disjoint; make the record anew."
        )
    return Document(name, body, name, given, parts)


def too_long(where: str, length: int, max_bytes: int) -> BadRecord:
    """Returns the record of a line or file that is longer than any document."""
    return BadRecord(
        where,
        f"expected at most {max_bytes:,} bytes, got {length:,}; split the text into "
        "documents.",
    )


def _json_spans(value: Any, length: int, where: str) -> tuple[Span, ...]:
    entries = value if isinstance(value, list) else [value]
    if not all(_is_span(entry, length) for entry in entries):
        raise RecordError(
            where,
            "expected 'spans' to be a list of [start, end] or [start, end, label] "
            f"within the {length} characters of the text, got "
            f"{shorten(json.dumps(value))}; correct the line.",
        )
    return tuple(
        Span(entry[0], entry[1], clean_text(entry[2]) if len(entry) > 2 else GIVEN)
        for entry in entries
    )


def _is_span(entry: Any, length: int) -> bool:
    match entry:
        case [int(start), int(end)] | [int(start), int(end), str()]:
            # In Python, bool is a subclass of int.
            return type(start) is type(end) is int and 0 <= start < end <= length
        case _:
            return False


def _byte_spans(text: bytes, spans: ByteRanges, where: str) -> tuple[Span, ...]:
    ranges = _character_ranges(text, spans, "span", where)
    if any(start == end for start, end in ranges):
        raise RecordError(where, "expected no empty span; make the record anew.")
    if spans.labels is None or not len(spans.labels):
        return tuple(Span(start, end, GIVEN) for start, end in ranges)
    labels = [decode(label, "type of a span", where) for label in spans.labels]
    if len(labels) != len(ranges):
        raise RecordError(
            where,
            f"expected as many types as spans, got {len(labels)} for {len(ranges)}; "
            "make the record anew.",
        )
    return tuple(
        Span(start, end, label)
        for (start, end), label in zip(ranges, labels, strict=True)
    )


def _character_ranges(
    text: bytes, ranges: ByteRanges, what: str, where: str
) -> list[tuple[int, int]]:
    starts = np.asarray(ranges.starts, np.int64)
    limits = np.asarray(ranges.limits, np.int64)
    if starts.shape != limits.shape:
        raise RecordError(
            where,
            f"expected a start and a limit of every {what}, got {len(starts)} and "
            f"{len(limits)}; make the record anew.",
        )
    if not len(starts):
        return []
    # A character begins at every byte that is not a continuation byte, and the end of
    # the text is a boundary too.
    begins = np.append((np.frombuffer(text, np.uint8) & 0xC0) != 0x80, True)
    outside = (starts < 0) | (starts > limits) | (limits > len(text))
    inside = ~(begins[starts * ~outside] & begins[limits * ~outside])
    if wrong := np.flatnonzero(outside | inside).tolist():
        start, limit = starts[wrong[0]], limits[wrong[0]]
        raise RecordError(
            where,
            f"expected every {what} to be whole characters within the {len(text)} "
            f"bytes of the text, got [{start}, {limit}); make the record anew.",
        )
    characters = np.cumsum(begins) - 1
    return list(
        zip(characters[starts].tolist(), characters[limits].tolist(), strict=True)
    )


def stable_uniform(*key: int | str) -> float:
    """Returns a pseudorandom number in [0, 1) that depends on `key` alone.

    It is the same on every machine and in every version of Python and NumPy.
    """
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    # 53 bits are exact in a float; all 64 could round up to 1.0.
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_held_out(source_id: str, fraction: float = VALIDATION_FRACTION) -> bool:
    """Returns whether an article belongs to the validation split.

    All blocks of an article are in the same split. A larger fraction holds out a
    superset of the articles that a smaller one does.
    """
    return stable_uniform("validation", source_id) < fraction


def share_of_at_least_one(source_ids: Iterable[str], fraction: float) -> float:
    """Returns the fraction that holds out `fraction` of articles, and at least one.

    It is `fraction` itself unless that would hold out none of them: then the article
    that a growing fraction would hold out first is held out alone. 0 stays 0. Ids are
    read up to the first that is held out.
    """
    first = 1.0
    for source_id in source_ids:
        first = min(first, stable_uniform("validation", source_id))
        if first < fraction:
            break
    return math.nextafter(first, 1.0) if 0 < fraction <= first else fraction


def held_out(
    source_ids: Iterable[str], fraction: float = VALIDATION_FRACTION
) -> Bool[np.ndarray, " block"]:
    """Returns `is_held_out` of each article id."""
    return np.array([is_held_out(source, fraction) for source in source_ids], bool)
