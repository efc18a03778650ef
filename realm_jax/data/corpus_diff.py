"""Applies changes to a corpus: documents added, replaced and deleted.

A change is a line of JSON, a document with its `id` or `{"id": ..., "deleted": true}`.
New blocks are made as for any corpus. This module puts them in place of the old ones: a
document that replaces another takes its position, and new documents are appended in the
order given.

An id names an article, which may be several records of a source. They are replaced and
deleted together, and the replacement takes the position of the first of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from realm_jax.data.block_writer import BlockWriter
from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import Document, document_from_fields, id_field
from realm_jax.data.records import RecordError, json_object, shorten

# Work can be stopped between two batches of documents.
_DOCUMENTS_AT_ONCE = 1 << 12


class Deletion(Document):
    """A document to be deleted, represented without title and text."""


def change_from_json(line: bytes, where: str) -> Document:
    """Reads a document with an `id`, or the `Deletion` of one.

    Args:
      line: an object in UTF-8: `id`, and either `"deleted": true` or what
        `document_from_json` reads.
    """
    fields = json_object(line, where)
    deleted = fields.get("deleted", False)
    if not id_field(fields, where) or not isinstance(deleted, bool):
        raise RecordError(
            where,
            "expected an 'id' with 'text' or with 'deleted': true, got "
            f"{shorten(json.dumps(fields))}; correct the line.",
        )
    if deleted:
        return Deletion("", "", id_field(fields, where))
    return document_from_fields(fields, where)


@dataclass(frozen=True)
class Changes:
    """Changes to a corpus, in the order given.

    Attributes:
      rows: table rows of the documents, see `blocks.DOCUMENT`; a deletion has a
        row without blocks. Ids are unique.
      store: the blocks of the rows, or None if there are none.
    """

    rows: np.ndarray
    deleted: np.ndarray
    store: BlockStore | None

    def find(self, documents: np.ndarray) -> "Places":
        """Returns the positions of the changed documents in a corpus's table."""
        order = np.argsort(self.rows["id_hash"], kind="stable")
        wanted, hashes = self.rows["id_hash"][order], documents["id_hash"]
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found = np.flatnonzero(wanted[places] == hashes)
        return Places(found, order[places[found]])


@dataclass(frozen=True)
class Places:
    """Documents of a corpus that are changed.

    Attributes:
      documents: int64 [match], their positions in the corpus's table, ascending.
      changes: int64 [match], the index of the change that applies to each.
    """

    documents: np.ndarray
    changes: np.ndarray


def write_changed(
    writer: BlockWriter,
    corpus: BlockStore,
    documents: np.ndarray,
    changes: Changes,
    places: Places,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes a corpus with changes applied, by copying blocks; none are computed.

    Args:
      writer: the writer of the new version; both versions share its vocabulary.
      documents: its table.
      places: positions of the changed documents in the table.
      progress: called with the number of blocks written so far.
    """
    ends = np.cumsum(changes.rows["num_blocks"], dtype=np.int64)
    starts = np.append(0, np.cumsum(documents["num_blocks"], dtype=np.int64))

    def put(change: int) -> None:
        row = changes.rows[change : change + 1]
        if changes.store is not None:
            start = int(ends[change] - row["num_blocks"][0])
            writer.copy(changes.store, start, int(ends[change]))
        writer.add_documents(row)

    def keep(first: int, stop: int) -> None:
        for at in range(first, stop, _DOCUMENTS_AT_ONCE):
            end = min(at + _DOCUMENTS_AT_ONCE, stop)
            writer.copy(corpus, int(starts[at]), int(starts[end]))
            writer.add_documents(documents[at:end])
            progress(writer.num_blocks)

    seen = np.zeros(len(changes.rows), bool)
    kept = 0
    for document, change in zip(
        places.documents.tolist(), places.changes.tolist(), strict=True
    ):
        keep(kept, document)
        kept = document + 1
        if not (changes.deleted[change] or seen[change]):
            put(change)
        seen[change] = True
    keep(kept, len(documents))
    for change in np.flatnonzero(~(seen | changes.deleted)).tolist():
        put(change)
