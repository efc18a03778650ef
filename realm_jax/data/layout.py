"""Arranges wordpieces as the models' inputs, on the host and on devices alike.

The functions compute with the array module that they are given, NumPy or jax.numpy, and
read the wordpieces through `Documents.take`, from files or from arrays on devices.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

from realm_jax.types import Array

A = TypeVar("A", np.ndarray, Array)
"""NumPy arrays where all that a function is given are, else of either module."""

NULL_DOCUMENT_LENGTH = 3
"""Wordpieces of the null document, `[CLS] [SEP] [SEP]`."""


class Documents(NamedTuple, Generic[A]):
    """Titles and bodies, wherever their wordpieces are stored.

    Attributes:
      take: returns the wordpieces at places [*dims, length], counted from the first one
        of each title; the body follows its title. What it returns for a place outside
        of a document does not matter.
    """

    take: Callable[[Int[A, "*dims length"]], Int[A, "*dims length"]]
    title_lengths: Int[A, "*dims"]
    body_lengths: Int[A, "*dims"]


def consecutive(
    pieces: Int[np.ndarray, " piece"],
    starts: Int[np.ndarray, "*dims"],
    title_lengths: Int[np.ndarray, "*dims"],
    body_lengths: Int[np.ndarray, "*dims"],
) -> Documents[np.ndarray]:
    """Returns documents that follow one another in one array, perhaps a mapped file.

    Args:
      pieces: wordpieces, at least one.
      starts: the first wordpiece of each title.
    """

    def take(places: Int[np.ndarray, "*dims length"]) -> np.ndarray:
        return pieces.take(starts[..., None] + places, mode="clip")

    return Documents(take, title_lengths, body_lengths)


def from_lists(
    titles: Sequence[Int[np.ndarray, " piece"]],
    bodies: Sequence[Int[np.ndarray, " piece"]],
    shape: tuple[int, ...] = (-1,),
) -> Documents[np.ndarray]:
    """Returns one document per title and body of the same place.

    Args:
      shape: dimensions of the documents, in row-major order.
    """
    title_lengths = np.array([len(title) for title in titles], np.int64)
    body_lengths = np.array([len(body) for body in bodies], np.int64)
    starts = np.cumsum(title_lengths + body_lengths) - title_lengths - body_lengths
    parts = [part for pair in zip(titles, bodies, strict=True) for part in pair]
    # A last one, for an array that is not empty.
    pieces = np.concatenate([*parts, np.zeros(1, np.int32)])
    return consecutive(
        pieces,
        starts.reshape(shape),
        title_lengths.reshape(shape),
        body_lengths.reshape(shape),
    )


def parts_of_bodies(
    documents: Documents[np.ndarray],
    first: Int[np.ndarray, "*dims"],
    end: Int[np.ndarray, "*dims"],
) -> Documents[np.ndarray]:
    """Returns the wordpieces [first, end) of each body, as bodies without titles."""

    def take(places: Int[np.ndarray, "*dims length"]) -> np.ndarray:
        return documents.take((documents.title_lengths + first)[..., None] + places)

    return Documents(take, np.zeros_like(documents.title_lengths), end - first)


def without_parts(
    documents: Documents[np.ndarray],
    first: Int[np.ndarray, "*dims"],
    end: Int[np.ndarray, "*dims"],
) -> Documents[np.ndarray]:
    """Returns the documents without the wordpieces [first, end) of each body."""
    start = (documents.title_lengths + first)[..., None]
    removed = end - first

    def take(places: Int[np.ndarray, "*dims length"]) -> np.ndarray:
        return documents.take(places + removed[..., None] * (places >= start))

    bodies = documents.body_lengths - removed
    return Documents(take, documents.title_lengths, bodies)


def query_inputs(
    sentences: Documents[A], length: int, cls: int, sep: int, xp: ModuleType
) -> Int[A, "*dims length"]:
    """Returns `[CLS] x [SEP]`, int32 ids padded with 0.

    Args:
      sentences: x is the body; what does not fit is truncated.
      length: wordpieces per row, at least 3.
    """
    last = xp.minimum(sentences.body_lengths, length - 2)[..., None] + 1
    column = xp.arange(length)
    inside = (column > 0) & (column < last)
    titles = sentences.title_lengths[..., None]
    places = xp.where(inside, titles + column - 1, 0)
    ids = xp.where(inside, sentences.take(places), 0)
    ids = xp.where(column == 0, cls, ids)
    return xp.where(column == last, sep, ids).astype(xp.int32)


def document_inputs(
    documents: Documents[A], length: int, cls: int, sep: int, xp: ModuleType
) -> tuple[Int[A, "*dims length"], Int[A, "*dims length"]]:
    """Returns the embedder's input, `[CLS] title [SEP] body [SEP]`.

    The title comes first and the body takes the remaining space; what does not fit is
    truncated, but the last [SEP] is always kept. Ids are padded with 0; segments are 0
    for the title and padding, 1 for the body and the [SEP] behind it.

    Args:
      documents: titles and bodies; the null document has neither.
      length: wordpieces per row, at least 3.
    """
    stored_titles = documents.title_lengths[..., None]
    titles = xp.minimum(stored_titles, length - 3)
    bodies = xp.minimum(documents.body_lengths[..., None], length - 3 - titles)
    column = xp.arange(length)
    first, last = titles + 2, titles + 2 + bodies
    in_title = (column > 0) & (column <= titles)
    in_body = (column >= first) & (column < last)
    body_places = xp.where(in_body, stored_titles + column - first, 0)
    places = xp.where(in_title, column - 1, body_places)
    ids = xp.where(in_title | in_body, documents.take(places), 0)
    ids = xp.where(column == 0, cls, ids)
    ids = xp.where((column == first - 1) | (column == last), sep, ids)
    segments = (column >= first) & (column <= last)
    return ids.astype(xp.int32), segments.astype(xp.int32)


def joined_inputs(
    documents: Documents[A],
    query_ids: Int[A, "*batch query"],
    length: int,
    sep: int,
    xp: ModuleType,
) -> tuple[Int[A, "*batch candidate length"], Int[A, "*batch candidate length"]]:
    """Returns the reader's input, `[CLS] x [SEP] body [SEP]`, without the title.

    Segments are 0 for the query and padding, 1 for the body and the [SEP] behind it.

    Args:
      documents: the candidates of each query, [*batch, candidate].
      query_ids: `[CLS] x [SEP]`, padded with 0 at the end.
      length: wordpieces per row, more than those of a query row. The query is never
        truncated; the body is cut to the remaining space.
    """
    first = (query_ids != 0).sum(axis=-1)[..., None, None]
    bodies = xp.minimum(documents.body_lengths[..., None], length - 1 - first)
    last = first + bodies
    column = xp.arange(length)
    in_body = (column >= first) & (column < last)
    titles = documents.title_lengths[..., None]
    places = xp.where(in_body, titles + column - first, 0)
    padding = [(0, 0)] * (query_ids.ndim - 1) + [(0, length - query_ids.shape[-1])]
    queries = xp.pad(query_ids, padding)[..., None, :]
    ids = xp.where(in_body, documents.take(places), queries)
    ids = xp.where(column == last, sep, ids)
    segments = (column >= first) & (column <= last)
    return ids.astype(xp.int32), segments.astype(xp.int32)


def body_inputs(
    documents: Documents[A], length: int, xp: ModuleType
) -> Int[A, "*dims length"]:
    """Returns int32 bodies without special wordpieces, truncated or padded with 0."""
    column = xp.arange(length)
    inside = column < documents.body_lengths[..., None]
    places = xp.where(inside, documents.title_lengths[..., None] + column, 0)
    return xp.where(inside, documents.take(places), 0).astype(xp.int32)
