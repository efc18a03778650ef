"""Examples as lines of text, so that a person reads what the model reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio

from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import pieces_of_span
from realm_jax.data.wordpiece import MASK, WordPiece

Mark = Callable[[str], str]
"""Makes a mask, an answer or a span stand out, e.g. by colour."""


class Origin(NamedTuple):
    """Where examples come from.

    Attributes:
      vocabulary: the tokenizer of their wordpieces, if known.
      store: the corpus they are made of, if it is one.
      features: what SeqIO knows of their features.
    """

    vocabulary: WordPiece | None
    store: BlockStore | None
    features: Mapping[str, Any]


def describe(example: Mapping[str, Any], origin: Origin, mark: Mark = str) -> list[str]:
    """Returns an example as lines, each beginning with what it is.

    Masked sentences have `[MASK]` where the model sees it, and a second time with the
    answers in brackets; pairs and blocks have title and body, blocks with the spans of
    the corpus in brackets; questions have the answers that the reader can find. Of
    other examples every feature is a line.

    Args:
      example: NumPy arrays by name.
      origin: where it comes from.
      mark: applied to every `[MASK]` and to what stands in brackets.
    """
    names, (vocabulary, store, features) = example.keys(), origin
    if vocabulary is not None:
        if {"query_ids", "mask_positions", "mask_ids", "mask_weights"} <= names:
            return _masked(example, vocabulary, store, mark)
        if {"query_ids", "document_ids", "document_segment_ids"} <= names:
            return [
                f"query     {_row(example['query_ids'], vocabulary)}",
                *_document(example, vocabulary),
                *_from(example.get("block_ids", -1), store),
            ]
        if {"block_id", "document_ids", "document_segment_ids"} <= names:
            return _block(example, vocabulary, store, mark)
        if {"question_ids", "answer_ids"} <= names:
            return _question(example, vocabulary, mark)
    width = max(9, *map(len, names))
    return [
        f"{name:<{width}} {_any(value, features.get(name))}"
        for name, value in example.items()
    ]


def _masked(
    example: Mapping[str, Any],
    vocabulary: WordPiece,
    store: BlockStore | None,
    mark: Mark,
) -> list[str]:
    query = example["query_ids"]
    scored = example["mask_weights"] > 0
    filled = query.copy()
    filled[example["mask_positions"][scored]] = example["mask_ids"][scored]
    runs = _runs(example["mask_positions"][scored].tolist())
    unscored = int((filled == vocabulary.mask).sum())
    lines = [
        f"query     {_row(query, vocabulary).replace(MASK, mark(MASK))}",
        f"answers   {_bracketed(filled, runs, vocabulary, mark)}",
    ]
    if unscored:
        lines.append(f"          ({unscored} more masked, and not scored)")
    return [*lines, *_from(example.get("source_block", -1), store)]


def _block(
    example: Mapping[str, Any],
    vocabulary: WordPiece,
    store: BlockStore | None,
    mark: Mark,
) -> list[str]:
    block = int(example["block_id"])
    lines = _document(example, vocabulary)
    if store is not None:
        text = store.text(block)
        offsets = vocabulary.encode(text.body).offsets
        body = _parts(example, vocabulary)[1]
        spans = [pieces_of_span(offsets, (start, end)) for start, end, _ in text.spans]
        runs = [(s.start, s.stop) for s in spans if s.start < s.stop <= len(body)]
        lines[1] = f"body      {_bracketed(body, runs, vocabulary, mark)}"
    return [*lines, f"from      block {block}"]


def _question(
    example: Mapping[str, Any], vocabulary: WordPiece, mark: Mark
) -> list[str]:
    answers = [vocabulary.decode(answer) for answer in example["answer_ids"]]
    for pattern in example.get("answer_patterns", ()):
        answers.append("".join(map(chr, pattern[pattern > 0].tolist())))
    found = [mark(f"[{answer}]") for answer in answers if answer]
    return [
        f"question  {_row(example['question_ids'], vocabulary)}",
        f"answers   {' '.join(found) or '(none that the reader can find)'}",
    ]


def _document(example: Mapping[str, Any], vocabulary: WordPiece) -> list[str]:
    title, body = _parts(example, vocabulary)
    return [
        f"title     {vocabulary.decode(title)}",
        f"body      {vocabulary.decode(body)}",
    ]


def _parts(
    example: Mapping[str, Any], vocabulary: WordPiece
) -> tuple[np.ndarray, np.ndarray]:
    """Returns title and body of `[CLS] title [SEP] body [SEP]`."""
    ids, segments = example["document_ids"], example["document_segment_ids"]
    is_special = (ids == vocabulary.cls) | (ids == vocabulary.sep)
    kept = (ids != vocabulary.pad) & ~is_special
    return ids[kept & (segments == 0)], ids[kept & (segments == 1)]


def _from(block: Any, store: BlockStore | None) -> list[str]:
    if int(block) < 0:
        return []
    title = "" if store is None else f", {store.text(int(block)).title!r}"
    return [f"from      block {int(block)}{title}"]


def _row(ids: np.ndarray, vocabulary: WordPiece) -> str:
    """Returns the text between `[CLS]` and `[SEP]`."""
    return vocabulary.decode(ids[ids != vocabulary.pad][1:-1])


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ascending positions as stretches [start, end)."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def _bracketed(
    ids: np.ndarray, runs: Iterable[tuple[int, int]], vocabulary: WordPiece, mark: Mark
) -> str:
    """Returns the text of a row with the stretches in brackets."""
    special = (vocabulary.pad, vocabulary.cls, vocabulary.sep)

    def text(start: int, end: int) -> str:
        return vocabulary.decode(i for i in ids[start:end] if i not in special)

    parts, place = [], 0
    for start, end in runs:
        parts += [text(place, start), mark(f"[{text(start, end)}]")]
        place = end
    return " ".join(part for part in (*parts, text(place, len(ids))) if part)


def _any(value: Any, feature: Any) -> str:
    """Returns a feature of a task of any kind as text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    value = np.asarray(value)
    if value.dtype == object:
        return " | ".join(text.decode(errors="replace") for text in value.ravel())
    vocabulary = getattr(feature, "vocabulary", None)
    is_text = value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    if is_text and not isinstance(vocabulary, seqio.PassThroughVocabulary | None):
        return vocabulary.decode(value.tolist())
    return np.array2string(value, threshold=24, edgeitems=8).replace("\n", " ")
