"""Keeps the corpus's wordpieces on the devices, and builds candidates there.

It is the device counterpart of `candidates.py` and of the layouts in `data/blocks.py`:
search results become the input of the same step without a transfer to the host.
"""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from realm_jax.data.blocks import BlockStore
from realm_jax.index.candidates import GRAM_SIZE, TRIVIAL_SHARE, UNKNOWN
from realm_jax.index.device_search import gather_rows, place_rows
from realm_jax.types import NULL_BLOCK, Array, Candidates, Neighbours, PretrainBatch

_READ_BLOCKS = 1 << 16


@flax.struct.dataclass
class TokenTable:
    """Wordpieces of every block, sharded over the devices like the embeddings.

    Attributes:
      ids: title and body of each block, truncated to the lengths that models read and
        padded with 0.
      title_lengths: number of wordpieces of each title.
      body_lengths: number of wordpieces of each body.
    """

    ids: Int[Array, "row length"]
    title_lengths: Int[Array, " row"]
    body_lengths: Int[Array, " row"]


@dataclasses.dataclass(frozen=True)
class DocumentLayout:
    """Lengths of the models' inputs, and the special wordpieces in them.

    Attributes:
      document: wordpieces of the embedder's input.
      joined: wordpieces of the reader's input.
      cls: id of [CLS].
      sep: id of [SEP].
    """

    document: int
    joined: int
    cls: int
    sep: int


def place_tokens(store: BlockStore, layout: DocumentLayout, mesh: Mesh) -> TokenTable:
    """Places the blocks of a corpus on the devices.

    Args:
      store: the corpus.
      layout: lengths of the models' inputs, to which blocks are truncated.
      mesh: the devices.
    """
    rows = _Rows(store, layout.document - 3, layout.joined)
    count, dtype = store.num_blocks, store.vocabulary.id_dtype
    return TokenTable(
        ids=place_rows(rows.ids, count, (rows.width,), dtype, mesh),
        title_lengths=place_rows(rows.title_lengths, count, (), np.uint16, mesh),
        body_lengths=place_rows(rows.body_lengths, count, (), np.uint16, mesh),
    )


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
        block_ids, column = np.arange(start, stop), np.arange(self.width)
        titles = self.title_lengths(start, stop)[:, None]
        places = np.clip(column - titles, 0, self._longest_body)
        # One additional column of padding, to which positions beyond the body refer.
        bodies = self._store.body_ids(block_ids, self._longest_body)
        bodies = np.pad(bodies, ((0, 0), (0, 1)))
        title_ids = self._store.title_ids(block_ids, self.width)
        in_title = column < titles
        return np.where(in_title, title_ids, np.take_along_axis(bodies, places, 1))


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
    """Returns the candidates of masked sentences; see `candidates.pretrain_candidates`.

    Args:
      table: the blocks to which the neighbours' ids refer.
      neighbours: best first.
      batch: the masked sentences.
      num_candidates: candidates per example, including the null document at position 0.
      layout: lengths and special wordpieces.
      mesh: the devices of the table.
    """
    found = gather_rows(table, neighbours.ids, mesh)
    bodies = _bodies(found, layout.joined)
    trivial = find_trivial(
        neighbours.ids, bodies, restore_queries(batch), batch.source_block
    )
    kept = jnp.where(trivial, NULL_BLOCK, neighbours.ids)
    # A stable sort moves the kept blocks to the front in their order.
    order = jnp.argsort(kept == NULL_BLOCK, axis=1, stable=True)
    order = order[:, : num_candidates - 1]
    block_ids = jnp.take_along_axis(kept, order, axis=1)
    missing = num_candidates - 1 - block_ids.shape[1]
    block_ids = jnp.pad(
        block_ids, ((0, 0), (1, missing)), constant_values=NULL_BLOCK
    ).astype(jnp.int32)

    def of_chosen(array: Array) -> Array:
        index = order.reshape(*order.shape, *([1] * (array.ndim - 2)))
        chosen = jnp.take_along_axis(array, index, axis=1)
        chosen = jnp.pad(chosen, ((0, 0), (1, missing), *([(0, 0)] * (array.ndim - 2))))
        real = (block_ids != NULL_BLOCK).reshape(
            *block_ids.shape, *([1] * (array.ndim - 2))
        )
        return jnp.where(real, chosen, 0)

    documents: TokenTable = jax.tree.map(of_chosen, found)
    document_ids, document_segments = document_inputs(documents, layout)
    joined_ids, joined_segments = _joined_inputs(batch.query_ids, documents, layout)
    return Candidates(
        block_ids=block_ids,
        document_ids=document_ids,
        document_segment_ids=document_segments,
        joined_ids=joined_ids,
        joined_segment_ids=joined_segments,
        valid=(block_ids != NULL_BLOCK).at[:, 0].set(True),
    )


def restore_queries(batch: PretrainBatch) -> Int[Array, "batch query"]:
    """Returns the queries with the scored masks restored; other masks become -1."""
    scored = batch.mask_weights > 0
    present = jnp.take_along_axis(batch.query_ids, batch.mask_positions, axis=1)
    first = jnp.argmax(scored, axis=1)[:, None]
    mask_id = jnp.take_along_axis(present, first, axis=1)
    mask_id = jnp.where(scored.any(axis=1, keepdims=True), mask_id, UNKNOWN)
    rows = jnp.arange(len(batch.query_ids))[:, None]
    # Unused positions are 0, where the existing [CLS] is written back.
    restored = (
        jnp.asarray(batch.query_ids)
        .at[rows, batch.mask_positions]
        .set(jnp.where(scored, batch.mask_ids, present))
    )
    return jnp.where(restored == mask_id, UNKNOWN, restored)


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

    def repeated(of_all: Int[Array, "batch length"]) -> Bool[Array, " batch"]:
        return jax.vmap(_share_of_grams)(sentences, lengths, of_all) >= TRIVIAL_SHARE

    # One neighbour at a time, to bound the memory for [query, body] matrices.
    shares = jax.lax.map(repeated, jnp.moveaxis(bodies, 1, 0))
    from_source = block_ids == source_block[:, None]
    return (from_source | shares.T) & (block_ids != NULL_BLOCK)


def _share_of_grams(
    sentence: Int[Array, " query"], length: Array, body: Int[Array, " length"]
) -> Array:
    """Returns the share of the sentence's distinct grams that the body contains."""
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


def _bodies(found: TokenTable, length: int) -> Int[Array, "*dims length"]:
    column = jnp.arange(length)
    inside = column < found.body_lengths[..., None]
    places = jnp.where(inside, found.title_lengths[..., None] + column, 0)
    return jnp.where(inside, jnp.take_along_axis(found.ids, places, axis=-1), 0)


def document_inputs(
    documents: TokenTable, layout: DocumentLayout
) -> tuple[Int[Array, "*dims document"], Int[Array, "*dims document"]]:
    """Returns `[CLS] title [SEP] body [SEP]` and segments, as `BlockStore` does.

    Args:
      documents: rows of the table, in any shape; zeros are the null document.
      layout: length and special wordpieces.
    """
    length = layout.document
    column = jnp.arange(length)
    stored_titles = documents.title_lengths[..., None]
    titles = jnp.minimum(stored_titles, length - 3)
    bodies = jnp.minimum(documents.body_lengths[..., None], length - 3 - titles)
    first, last = titles + 2, titles + bodies + 2
    in_title = (column > 0) & (column <= titles)
    in_body = (column >= first) & (column < last)
    places = jnp.where(in_title, column - 1, 0)
    places = jnp.where(in_body, stored_titles + column - first, places)
    ids = jnp.where(
        in_title | in_body, jnp.take_along_axis(documents.ids, places, axis=-1), 0
    )
    ids = jnp.where(column == 0, layout.cls, ids)
    ids = jnp.where((column == titles + 1) | (column == last), layout.sep, ids)
    segments = (column >= first) & (column <= last)
    return ids.astype(jnp.int32), segments.astype(jnp.int32)


def _joined_inputs(
    query_ids: Int[Array, "batch query"], documents: TokenTable, layout: DocumentLayout
) -> tuple[Int[Array, "batch candidate joined"], Int[Array, "batch candidate joined"]]:
    length = layout.joined
    column = jnp.arange(length)
    queries = jnp.pad(query_ids, ((0, 0), (0, length - query_ids.shape[1])))
    first = (query_ids != 0).sum(axis=1)[:, None, None]
    bodies = jnp.minimum(documents.body_lengths[..., None], length - 1 - first)
    last = first + bodies
    in_body = (column >= first) & (column < last)
    places = jnp.where(in_body, documents.title_lengths[..., None] + column - first, 0)
    body_ids = jnp.take_along_axis(documents.ids, places, axis=-1)
    ids = jnp.where(in_body, body_ids, queries[:, None, :])
    ids = jnp.where(column == last, layout.sep, ids)
    segments = (column >= first) & (column <= last)
    return ids.astype(jnp.int32), segments.astype(jnp.int32)
