"""Lists the documents of a corpus in order, with the number of blocks from each.

The texts of a corpus name the article of each block. They do not list documents without
text, nor the boundary between two documents of the same id; changing the documents of a
corpus requires both.

The table is `documents.npy` of a block store, 21 bytes per document.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from realm_jax.data.blocks import DOCUMENTS_FILE, BlockStore
from realm_jax.data.documents import Document
from realm_jax.data.store_files import map_array
from realm_jax.errors import BadInputError

_HASH_BYTES = 16
DOCUMENT = np.dtype(
    [("id_hash", f"V{_HASH_BYTES}"), ("num_blocks", "<i4"), ("has_title", "?")]
)
"""A row: a hash of the id, the number of blocks, which follow those of the row before,
and whether the title is more than white space."""


def document_rows(
    documents: Sequence[Document], num_blocks: Sequence[int]
) -> np.ndarray:
    """Returns the table rows of documents and the number of blocks from each."""
    return np.array(
        [
            (_id_hash(document.source_id), count, bool(document.title.strip()))
            for document, count in zip(documents, num_blocks, strict=True)
        ],
        DOCUMENT,
    )


def read_documents(store: BlockStore) -> np.ndarray:
    """Returns the rows of a corpus, mapped into memory."""
    if DOCUMENTS_FILE not in store.info["files"]:
        raise BadInputError(
            f"expected {DOCUMENTS_FILE} in {store.directory}, which says where its "
            "documents are, but it was prepared before there was such a file; remove "
            "the corpus and prepare it again, which keeps its fingerprint."
        )
    path = store.directory / DOCUMENTS_FILE
    return map_array(path, DOCUMENT, (store.info.get("num_documents"),))


def _id_hash(source_id: str) -> bytes:
    return hashlib.blake2b(source_id.encode(), digest_size=_HASH_BYTES).digest()
