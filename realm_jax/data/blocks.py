"""Reads the knowledge corpus on disk, with random access to blocks.

Blocks are not kept as Python objects. A store is a directory:

    corpus.json                  counts, fingerprints, size and checksum of every file
    vocab.txt                    the vocabulary the ids belong to
    ids.npy                      uint16 or uint32, see `WordPiece.id_dtype`: title and
                                 body of block 0, of block 1, ...
    offsets.npy                  int64: start of each block in `ids`, then the end
    title_lengths.npy            uint16: number of a block's ids that are its title
    hashes.npy                   uint8: 16-byte content hash of each block, for
                                 refreshes
    documents.npy                the documents in order, those without text, too: number
                                 of blocks of each, see `DOCUMENT`
    texts-NNNNN.array_record     JSON records: title, body, source, sentences, spans

Arrays are memory-mapped. `block_writer.py` makes stores; this file reads them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from array_record.python.array_record_module import ArrayRecordReader
from jaxtyping import Int, Int32, Int64

from realm_jax.data import layout
from realm_jax.data.salient_spans import Span
from realm_jax.data.store_files import (
    map_array,
    read_manifest,
    require_consecutive,
    require_sound,
)
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.types import NULL_BLOCK

FORMAT_VERSION = 2
INFO_FILE = "corpus.json"
VOCABULARY_FILE = "vocab.txt"
IDS_FILE = "ids.npy"
OFFSETS_FILE = "offsets.npy"
TITLE_LENGTHS_FILE = "title_lengths.npy"
HASHES_FILE = "hashes.npy"
DOCUMENTS_FILE = "documents.npy"
HASH_BYTES = 16
NO_TAGGER = "none"
"""Recorded as the tagger of a corpus of imported blocks."""

DOCUMENT = np.dtype(
    [("id_hash", f"V{HASH_BYTES}"), ("num_blocks", "<i4"), ("has_title", "?")]
)
"""A row of the documents: a hash of the id, the number of blocks, which follow those of
the row before, and whether the title is more than white space.

Changing the documents of a corpus requires them. The texts name the article of each
block, but not documents without text, nor the boundary between two of the same id."""

_OPEN_TEXT_FILES = 16
_TEXTS_AT_A_TIME = 4096
_INFO_FIELDS = {
    "num_blocks": int,
    "num_wordpieces": int,
    "chunk_length": int,
    "blocks_per_text_file": int,
    "fingerprint": str,
    "vocabulary_fingerprint": str,
    "lowercase": bool,
    "strip_accents": bool,
    "files": dict,
}


class BlockText(NamedTuple):
    """The text of a block; character positions count from the start of `body`.

    Attributes:
      body: the block's sentences as they appear in the article.
      sentences: [start, end) of each sentence, in order.
      spans: salient spans, in order, each inside one sentence.
    """

    title: str
    body: str
    source_id: str
    sentences: list[tuple[int, int]]
    spans: list[Span]


class StoredBlocks(NamedTuple):
    """Consecutive blocks as they are stored.

    Attributes:
      ids: wordpieces of title and body of the first block, of the second, ...
      ends: int64 [block], end of each block in `ids`.
      title_lengths: [block], number of a block's ids that are its title.
      hashes: uint8 [block, 16], see `BlockStore.content_hashes`.
      texts: the record of each block, see `encode_text`.
    """

    ids: np.ndarray
    ends: np.ndarray
    title_lengths: np.ndarray
    hashes: np.ndarray
    texts: list[bytes]


def text_file(index: int) -> str:
    """Returns the name of text file `index` of a store."""
    return f"texts-{index:05d}.array_record"


def encode_text(text: BlockText) -> bytes:
    """Returns the record of a block's text as UTF-8 JSON."""
    return json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()


def decode_text(record: bytes) -> BlockText:
    """Inverts `encode_text`."""
    title, body, source_id, sentences, spans = json.loads(record)
    return BlockText(
        title=title,
        body=body,
        source_id=source_id,
        sentences=[(start, end) for start, end in sentences],
        spans=[Span(*span) for span in spans],
    )


class BlockStore:
    """A corpus of blocks, opened for reading.

    Attributes:
      num_blocks: number of blocks; their ids are 0 to num_blocks - 1.
      chunk_length: wordpieces a block was packed to, title and special pieces
        included; a single longer sentence exceeds it.
      fingerprint: SHA-256 (hex) of vocabulary, ids, titles and texts. Spans are left
        out, so that tagging the corpus again does not invalidate an index.
      content_hashes: uint8 [block, 16], a hash of title and body. A block that occurs
        in two corpora has the same hash in both, whatever its id.
    """

    def __init__(self, directory: Path, info: dict[str, Any], vocabulary: WordPiece):
        """Use `BlockStore.open`."""
        self.directory = directory
        self.info = info
        self.vocabulary = vocabulary
        self.num_blocks: int = info["num_blocks"]
        self.chunk_length: int = info["chunk_length"]
        self.fingerprint: str = info["fingerprint"]

        def mapped(name: str, dtype: npt.DTypeLike, size: int) -> np.ndarray:
            return map_array(directory / name, dtype, (size,))

        self._ids = mapped(IDS_FILE, vocabulary.id_dtype, info["num_wordpieces"])
        self._offsets = mapped(OFFSETS_FILE, np.int64, self.num_blocks + 1)
        self._title_lengths = mapped(TITLE_LENGTHS_FILE, np.uint16, self.num_blocks)
        require_consecutive(
            directory / OFFSETS_FILE,
            self._offsets,
            len(self._ids),
            "blocks",
            shortest=self._title_lengths,
            of_shortest=f" or {TITLE_LENGTHS_FILE}",
        )
        hashes = mapped(HASHES_FILE, np.uint8, self.num_blocks * HASH_BYTES)
        self.content_hashes = hashes.reshape(-1, HASH_BYTES)
        # One cache per store, so that the files are closed with the store.
        self._text_reader = lru_cache(_OPEN_TEXT_FILES)(self._open_text_file)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, verify: bool = False
    ) -> "BlockStore":
        """Opens a store after checking that its files exist and have the right size.

        Where blocks and titles begin and end is compared, too: the only arrays that are
        read, ten bytes a block.

        Args:
          verify: whether every byte is read and checksums are compared, too.
        """
        directory = Path(directory)
        info = read_info(directory)
        require_sound(directory, info["files"], contents=verify)
        per_file = info["blocks_per_text_file"]
        if not 0 < per_file <= np.iinfo(np.int64).max:
            raise BadInputError(
                f"expected the number of blocks in a text file in "
                f"{directory / INFO_FILE}, got {per_file}; prepare the corpus again."
            )
        vocabulary = WordPiece.load(
            directory / VOCABULARY_FILE,
            **tokenizer_settings(info),
        )
        if vocabulary.fingerprint != info["vocabulary_fingerprint"]:
            raise BadInputError(
                f"expected the vocabulary {info['vocabulary_fingerprint'][:12]} in "
                f"{directory / VOCABULARY_FILE}, got {vocabulary.fingerprint[:12]}; "
                "prepare the corpus again."
            )
        return cls(directory, info, vocabulary)

    def verify(self) -> None:
        """Reads every byte of the store and compares checksums."""
        require_sound(self.directory, self.info["files"], contents=True)

    def documents(
        self, block_ids: Int[np.ndarray, "*batch"]
    ) -> layout.Documents[np.ndarray]:
        """Returns the blocks' wordpieces and lengths; -1 has none."""
        starts, titles, bodies = self._places(block_ids)
        return layout.consecutive(self._ids, starts, titles, bodies)

    def document_ids(
        self, block_ids: Int[np.ndarray, "*batch"], length: int
    ) -> tuple[
        Int32[np.ndarray, "*batch document"], Int32[np.ndarray, "*batch document"]
    ]:
        """Returns the embedder's input; see `layout.document_inputs`.

        The null document (-1) is `[CLS] [SEP] [SEP]`.
        """
        if length < 3:
            raise BadInputError(
                f"expected room for [CLS] [SEP] [SEP], got a document length of "
                f"{length}; raise it to 3 or more."
            )
        return layout.document_inputs(
            self.documents(block_ids),
            length,
            self.vocabulary.cls,
            self.vocabulary.sep,
            np,
        )

    def joined_ids(
        self,
        query_ids: Int[np.ndarray, "*batch query"],
        block_ids: Int[np.ndarray, "*batch candidate"],
        length: int,
    ) -> tuple[
        Int32[np.ndarray, "*batch candidate joined"],
        Int32[np.ndarray, "*batch candidate joined"],
    ]:
        """Returns the reader's input; see `layout.joined_inputs`.

        The null document (-1) has no body.
        """
        query_ids = np.asarray(query_ids)
        if length <= query_ids.shape[-1]:
            raise BadInputError(
                f"expected a joined length above the query length "
                f"{query_ids.shape[-1]}, got {length}; raise it."
            )
        documents = self.documents(block_ids)
        return layout.joined_inputs(
            documents, query_ids, length, self.vocabulary.sep, np
        )

    def body_ids(
        self, block_ids: Int[np.ndarray, "*batch"], length: int
    ) -> Int32[np.ndarray, "*batch length"]:
        """Returns bodies without title or special pieces, truncated or padded."""
        return layout.body_inputs(self.documents(block_ids), length, np)

    def consecutive_bodies(
        self, block_ids: Int[np.ndarray, " block"], length: int
    ) -> tuple[Int[np.ndarray, " piece"], Int64[np.ndarray, " block"]]:
        """Returns the bodies of `body_ids` one after the other, without padding.

        For thousands of bodies, of which a padded array would be several times as slow.
        Each is followed by a 0; the places of these zeros are returned, too.
        """
        starts, titles, bodies = self._places(block_ids)
        lengths = np.minimum(bodies, length)
        ends = np.cumsum(lengths + 1) - 1
        places = np.repeat(starts + titles + lengths - ends, lengths + 1)
        places += np.arange(len(places))
        ids = self._ids.take(places, mode="clip")
        ids[ends] = 0
        return ids, ends

    def body_lengths(
        self, block_ids: Int[np.ndarray, "*batch"]
    ) -> Int64[np.ndarray, "*batch"]:
        """Returns the number of wordpieces in each body; the null document has 0."""
        return self.documents(block_ids).body_lengths

    def title_lengths(
        self, block_ids: Int[np.ndarray, "*batch"]
    ) -> Int64[np.ndarray, "*batch"]:
        """Returns the number of wordpieces in each title; the null document has 0."""
        return self.documents(block_ids).title_lengths

    def text(self, block_id: int) -> BlockText:
        """Returns the text of one block; the null document has none."""
        return self.texts([block_id])[0]

    def texts(self, block_ids: Sequence[int] | np.ndarray) -> list[BlockText]:
        """Returns the texts of blocks in the given order; see `text`."""
        rows = np.asarray(block_ids, np.int64).reshape(-1)
        _check_ids(rows, 0, self.num_blocks)
        return [decode_text(record) for record in self._records(rows)]

    def iter_texts(
        self, block_ids: Int[np.ndarray, " block"] | None = None
    ) -> Iterator[BlockText]:
        """Yields the texts of blocks, by default of all, without keeping them."""
        rows = np.arange(self.num_blocks) if block_ids is None else block_ids
        for start in range(0, len(rows), _TEXTS_AT_A_TIME):
            yield from self.texts(rows[start : start + _TEXTS_AT_A_TIME])

    def stored(self, start: int, stop: int) -> StoredBlocks:
        """Returns the blocks [start, stop), at least one, as they are stored."""
        rows = np.arange(start, stop)
        _check_ids(rows, 0, self.num_blocks)
        edges = np.asarray(self._offsets[start : stop + 1])
        return StoredBlocks(
            ids=self._ids[edges[0] : edges[-1]],
            ends=edges[1:] - edges[0],
            title_lengths=self._title_lengths[start:stop],
            hashes=self.content_hashes[start:stop],
            texts=self._records(rows),
        )

    def _places(
        self, block_ids: Int[np.ndarray, "*batch"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns starts, title lengths and body lengths; -1 has no wordpieces."""
        rows = np.asarray(block_ids, np.int64)
        _check_ids(rows, NULL_BLOCK, self.num_blocks)
        real = rows != NULL_BLOCK
        rows = np.where(real, rows, 0)
        starts = self._offsets[rows]
        titles = self._title_lengths[rows].astype(np.int64)
        bodies = self._offsets[rows + 1] - starts - titles
        return starts, np.where(real, titles, 0), np.where(real, bodies, 0)

    def _records(self, rows: np.ndarray) -> list[bytes]:
        per_file = self.info["blocks_per_text_file"]
        records: list[bytes] = [b""] * len(rows)
        for index in np.unique(rows // per_file):
            wanted = np.flatnonzero(rows // per_file == index)
            found = self._read_records(int(index), rows[wanted] % per_file)
            for position, record in zip(wanted, found, strict=True):
                records[position] = record
        return records

    def _read_records(self, index: int, positions: np.ndarray) -> list[bytes]:
        try:
            return self._text_reader(index).read(positions.tolist())
        except (RuntimeError, ValueError, IndexError) as error:
            raise BadInputError(
                f"expected block texts in {self.directory / text_file(index)}, but it "
                f"cannot be read ({error}); prepare the corpus again."
            ) from error

    def _open_text_file(self, index: int) -> ArrayRecordReader:
        return ArrayRecordReader(
            str(self.directory / text_file(index)),
            options="readahead_buffer_size:0",  # Random access.
            file_reader_buffer_size=1 << 15,
        )


def read_info(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a store's corpus.json."""
    return read_manifest(
        Path(directory) / INFO_FILE, FORMAT_VERSION, "a prepared corpus", _INFO_FIELDS
    )


def read_documents(store: BlockStore) -> np.ndarray:
    """Returns the rows of a corpus, mapped into memory."""
    if DOCUMENTS_FILE not in store.info["files"]:
        if store.info.get("tagger") == NO_TAGGER:
            raise BadInputError(
                f"expected a corpus that `realm prepare` has made in "
                f"{store.directory}, got imported blocks, which belong to no "
                "documents; import the changed blocks into another folder."
            )
        raise BadInputError(
            f"expected {DOCUMENTS_FILE} in {store.directory}, which says where its "
            "documents are, but it was prepared before there was such a file; remove "
            "the corpus and prepare it again, which keeps its fingerprint."
        )
    path = store.directory / DOCUMENTS_FILE
    return map_array(path, DOCUMENT, (store.info.get("num_documents"),))


def tokenizer_settings(info: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the `WordPiece.settings` of a store with this corpus.json."""
    return {
        "lowercase": info["lowercase"],
        "strip_accents": info["strip_accents"],
        # Older stores do not say it. The fingerprint tells whether it is right.
        "tokenize_chinese_chars": info.get("tokenize_chinese_chars") is not False,
    }


def _check_ids(rows: np.ndarray, lowest: int, num_blocks: int) -> None:
    if rows.size and not (rows.min() >= lowest and rows.max() < num_blocks):
        wrong = rows[(rows < lowest) | (rows >= num_blocks)][0]
        raise BadInputError(
            f"expected block ids from {lowest} to {num_blocks - 1}, got {wrong}; do "
            "these ids come from another corpus?"
        )
