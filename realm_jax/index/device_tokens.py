"""Keeps the corpus's wordpieces on the devices, and builds candidates there.

Search results become the input of the same step without a transfer to the host. Blocks
are chosen and laid out by the functions that the host uses (`candidates.py`,
`data/layout.py`). Near-duplicates alone are found in another way: devices compare every
pair of grams, the host sorts them, a fifth of the work at the paper's lengths.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.data.layout import (
    Documents,
    body_inputs,
    document_inputs,
    joined_inputs,
)
from realm_jax.data.wordpiece import WordPiece
from realm_jax.index.candidates import (
    GRAM_SIZE,
    UNKNOWN,
    choose_blocks,
    is_trivial,
    restore_queries,
    valid_slots,
)
from realm_jax.index.device_search import gather_rows, place_rows, rows_shape
from realm_jax.types import Array, Candidates, Lengths, Neighbours, PretrainBatch

_READ_BLOCKS = 1 << 16


@flax.struct.dataclass
class TokenTable:
    """Wordpieces of every block, sharded over the devices like the embeddings.

    `ids` are title and body, truncated to the lengths that models read and padded with
    0.
    """

    ids: Int[Array, "row length"]
    title_lengths: Int[Array, " row"]
    body_lengths: Int[Array, " row"]


@dataclasses.dataclass(frozen=True)
class DocumentLayout:
    """Lengths of the embedder's and the reader's input, and ids of [CLS] and [SEP]."""

    document: int
    joined: int
    cls: int
    sep: int

    @classmethod
    def of(cls, lengths: Lengths, vocabulary: WordPiece) -> "DocumentLayout":
        """Returns the layout of models that read a corpus of this vocabulary."""
        return cls(lengths.document, lengths.joined, vocabulary.cls, vocabulary.sep)


def place_tokens(store: BlockStore, layout: DocumentLayout, mesh: Mesh) -> TokenTable:
    """Places the blocks of a corpus on the devices, cut to what the models read."""
    rows = _Rows(store, layout.document - 3, layout.joined)
    count, dtype = store.num_blocks, store.vocabulary.id_dtype
    return TokenTable(
        ids=place_rows(rows.ids, count, (rows.width,), dtype, mesh),
        title_lengths=place_rows(rows.title_lengths, count, (), np.uint16, mesh),
        body_lengths=place_rows(rows.body_lengths, count, (), np.uint16, mesh),
    )


def table_shapes(
    num_blocks: int, longest: int, dtype: Any, layout: DocumentLayout, mesh: Mesh
) -> TokenTable:
    """Returns what `place_tokens` returns, as shapes.

    `longest` is the wordpieces of the longest block, title and body, 0 for as many as
    the embedder reads; `dtype` is that of stored wordpieces. Blocks with more
    wordpieces than the layout has room for in titles and bodies may give a narrower
    table.
    """
    longest_title = layout.document - 3
    width = min(longest or longest_title, longest_title + layout.joined)
    lengths = rows_shape(num_blocks, (), np.uint16, mesh)
    return TokenTable(rows_shape(num_blocks, (width,), dtype, mesh), lengths, lengths)


class _Rows:
    """Rows of a corpus's token table: truncated title and body, concatenated."""

    def __init__(self, store: BlockStore, longest_title: int, longest_body: int):
        self._store = store
        self._longest_title = longest_title
        self._longest_body = longest_body
        self.width = max(
            int((self.title_lengths(*part) + self.body_lengths(*part)).max())
            for part in _parts(0, store.num_blocks)
        )

    def title_lengths(self, start: int, stop: int) -> np.ndarray:
        lengths = self._store.title_lengths(np.arange(start, stop))
        return np.minimum(lengths, self._longest_title)

    def body_lengths(self, start: int, stop: int) -> np.ndarray:
        lengths = self._store.body_lengths(np.arange(start, stop))
        return np.minimum(lengths, self._longest_body)

    def ids(self, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, self.width), self._store.vocabulary.id_dtype)
        for first, last in _parts(start, stop):
            rows[first - start : last - start] = self._ids(first, last)
        return rows

    def _ids(self, start: int, stop: int) -> np.ndarray:
        stored = self._store.documents(np.arange(start, stop))
        column = np.arange(self.width)
        titles = self.title_lengths(start, stop)[:, None]
        ends = titles + self.body_lengths(start, stop)[:, None]
        beyond_title = stored.title_lengths[:, None] + column - titles
        places = np.where(column < titles, column, beyond_title)
        inside = column < ends
        return np.where(inside, stored.take(np.where(inside, places, 0)), 0)


def _parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _READ_BLOCKS):
        yield first, min(first + _READ_BLOCKS, stop)


def pretrain_candidates(
    table: TokenTable,
    neighbours: Neighbours,
    batch: PretrainBatch,
    *,
    num_candidates: int,
    layout: DocumentLayout,
    mesh: Mesh,
) -> Candidates:
    """Returns the candidates of masked sentences, with the null document at position 0.

    See `candidates.pretrain_candidates`.
    """
    found = gather_rows(table, neighbours.ids, mesh)
    bodies = body_inputs(documents(found), layout.joined, jnp)
    trivial = find_trivial(
        neighbours.ids, bodies, restore_queries(batch, jnp), batch.source_block
    )
    block_ids, places = choose_blocks(
        neighbours.ids, trivial, num_candidates, include_null=True, xp=jnp
    )

    def of_chosen(array: Array) -> Array:
        dims = (..., *[None] * (array.ndim - 2))
        chosen = jnp.take_along_axis(array, jnp.maximum(places, 0)[dims], axis=1)
        return jnp.where((places >= 0)[dims], chosen, 0)

    chosen = documents(jax.tree.map(of_chosen, found))
    document_ids, document_segments = embedder_inputs(chosen, layout)
    joined_ids, joined_segments = joined_inputs(
        chosen, batch.query_ids, layout.joined, layout.sep, jnp
    )
    return Candidates(
        block_ids=block_ids,
        document_ids=document_ids,
        document_segment_ids=document_segments,
        joined_ids=joined_ids,
        joined_segment_ids=joined_segments,
        valid=valid_slots(block_ids, True, jnp),
    )


def documents(rows: TokenTable) -> Documents[Array]:
    """Returns rows of the table, in any shape; zeros are the null document."""

    def take(places: Int[Array, "*dims length"]) -> Array:
        return jnp.take_along_axis(rows.ids, places, axis=-1, mode="clip")

    return Documents(take, rows.title_lengths, rows.body_lengths)


def embedder_inputs(
    documents: Documents[Array], layout: DocumentLayout
) -> tuple[Int[Array, "*dims document"], Int[Array, "*dims document"]]:
    """Returns `[CLS] title [SEP] body [SEP]` and segments, see `document_inputs`."""
    return document_inputs(documents, layout.document, layout.cls, layout.sep, jnp)


def find_trivial(
    block_ids: Int[Array, "batch neighbour"],
    bodies: Int[Array, "batch neighbour length"],
    restored_ids: Int[Array, "batch query"],
    source_block: Int[Array, " batch"],
) -> Bool[Array, "batch neighbour"]:
    """Marks blocks that reveal the query's sentence; see `candidates.find_trivial`."""
    # [CLS] and the last [SEP] are not part of the sentence.
    lengths = (restored_ids != 0).sum(axis=1) - 2
    sentences = restored_ids[:, 1:]

    def shares(of_all: Int[Array, "batch length"]) -> Float[Array, " batch"]:
        return jax.vmap(_share_of_grams)(sentences, lengths, of_all)

    # One neighbour at a time, to bound the memory for [query, body] matrices.
    by_neighbour = jax.lax.map(shares, jnp.moveaxis(bodies, 1, 0))
    return is_trivial(block_ids, by_neighbour.T, source_block)


def _share_of_grams(
    sentence: Int[Array, " query"], length: Array, body: Int[Array, " length"]
) -> Array:
    size = jnp.minimum(GRAM_SIZE, length)

    def equal_grams(left: Array, right: Array) -> Bool[Array, "left right"]:
        """Marks (i, j) where the gram at i of `left` equals that at j of `right`."""
        equal = left[:, None] == right[None, :]
        padded = jnp.pad(equal, ((0, GRAM_SIZE), (0, GRAM_SIZE)))
        runs = jnp.ones_like(equal)
        for offset in range(GRAM_SIZE):
            shifted = padded[offset : offset + len(left), offset : offset + len(right)]
            runs &= shifted | (offset >= size)
        return runs

    places = jnp.arange(len(sentence))
    known = jnp.where(places < length, sentence != UNKNOWN, False)
    padded = jnp.pad(known, (0, GRAM_SIZE))
    whole = jnp.ones_like(known)
    for offset in range(GRAM_SIZE):
        whole &= padded[offset : offset + len(known)] | (offset >= size)
    whole &= places <= length - size
    # Only the first occurrence of a gram counts.
    earlier = places[:, None] > places[None, :]
    repeats = (equal_grams(sentence, sentence) & earlier & whole[None, :]).any(axis=1)
    wanted = whole & ~repeats & (size > 0)
    in_body = jnp.arange(len(body)) <= len(body) - size
    held = (equal_grams(sentence, body) & in_body[None, :]).any(axis=1)
    return (wanted & held).sum() / jnp.maximum(wanted.sum(), 1)
