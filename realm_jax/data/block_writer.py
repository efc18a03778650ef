"""Writes block stores as a stream, deterministically and atomically."""

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from realm_jax.data import blocks
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.documents import Document
from realm_jax.data.store_files import new_folder, require_free, write_header
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.manifests import file_records, seal
from realm_jax.storage import file_stat

# Records packed 16 at a time take half the space, and reading one costs the same.
_TEXT_OPTIONS = "group_size:16"
_BLOCKS_PER_TEXT_FILE = 1 << 16
_MAX_TITLE_LENGTH = 65_535
_COPIED_AT_ONCE = 1 << 12


class EmptyCorpusError(BadInputError):
    """Raised when there is no block to write."""


@dataclass(frozen=True)
class Block:
    """A block to be written.

    Attributes:
      title_ids: wordpieces of the title, without special pieces.
      body_ids: wordpieces of the body, without special pieces.
    """

    title_ids: np.ndarray
    body_ids: np.ndarray
    text: BlockText


def write_blocks(
    directory: str | os.PathLike[str],
    blocks_to_write: Iterable[Block],
    *,
    vocabulary: WordPiece,
    chunk_length: int,
) -> BlockStore:
    """Writes a store of the given blocks, in the order of their ids, and opens it."""
    with BlockWriter(directory, vocabulary, chunk_length) as writer:
        for block in blocks_to_write:
            writer.add(block)
    return BlockStore.open(directory)


class BlockWriter:
    """Writes blocks one after another; memory grows by 26 bytes per block.

    A context manager. The directory appears when the context ends without an
    exception; otherwise nothing is left behind.

    Attributes:
      metadata: JSON values for corpus.json; may be added until the context ends.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        vocabulary: WordPiece,
        chunk_length: int,
    ):
        """Prepares a writer; files are created when the context is entered.

        Args:
          directory: where the store will appear; must be absent or empty.
          vocabulary: the tokenizer of the wordpieces; it is copied into the store.
        """
        self.metadata: dict[str, Any] = {}
        self._directory = Path(directory)
        self._vocabulary = vocabulary
        self._chunk_length = chunk_length
        self._offsets = array("q", [0])
        self._title_lengths = array("H")
        self._hashes = bytearray()
        self._documents = bytearray()
        self._num_sentences = 0
        self._num_spans = 0
        self._fingerprint = hashlib.sha256(vocabulary.fingerprint.encode())
        self._text_writer = None
        require_free(self._directory)

    def __enter__(self) -> "BlockWriter":
        with contextlib.ExitStack() as stack:
            folder = new_folder(self._directory, "the corpus")
            self._partial = stack.enter_context(folder)
            ids_file = (self._partial / blocks.IDS_FILE).open("wb")
            self._ids_file = stack.enter_context(ids_file)
            write_header(self._ids_file, self._vocabulary.id_dtype, (), 0)
            stack.callback(self._drop_text_file)
            self._unfinished = stack.pop_all()
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        with self._unfinished:
            if exception is not None:
                raise exception
            self._finish()

    def add(self, block: Block) -> None:
        """Appends a block; its id is the number of blocks before it."""
        if len(block.title_ids) > _MAX_TITLE_LENGTH:
            raise BadInputError(
                f"expected titles of at most {_MAX_TITLE_LENGTH} wordpieces, got "
                f"{len(block.title_ids)} in {block.text.source_id!r}; shorten it."
            )
        ids = np.concatenate([block.title_ids, block.body_ids])
        ids = ids.astype(self._vocabulary.id_dtype)
        title_length = len(block.title_ids)
        content = content_hash(title_length, ids)
        record = blocks.encode_text(block.text)
        self._append(title_length, ids.tobytes(), content, record, block.text)

    def copy(self, source: BlockStore, start: int, stop: int) -> None:
        """Appends the blocks [start, stop) of another store unchanged."""
        width = self._vocabulary.id_dtype.itemsize
        for first in range(start, stop, _COPIED_AT_ONCE):
            stored = source.stored(first, min(first + _COPIED_AT_ONCE, stop))
            ids, begin = stored.ids.tobytes(), 0
            for end, title_length, content, record in zip(
                (stored.ends * width).tolist(),
                stored.title_lengths.tolist(),
                map(bytes, stored.hashes),
                stored.texts,
                strict=True,
            ):
                text = json.loads(record)
                self._append(title_length, ids[begin:end], content, record, text)
                begin = end

    def add_documents(self, rows: np.ndarray) -> None:
        """Appends the rows of the documents whose blocks were added.

        See `document_rows`.
        """
        self._documents += rows.tobytes()

    @property
    def documents(self) -> np.ndarray:
        """The document rows added so far, see `blocks.DOCUMENT`."""
        return np.frombuffer(bytes(self._documents), blocks.DOCUMENT)

    @property
    def num_blocks(self) -> int:
        """The number of blocks added so far."""
        return len(self._title_lengths)

    def _append(
        self,
        title_length: int,
        ids: bytes,
        content: bytes,
        record: bytes,
        text: Sequence[Any],
    ) -> None:
        """Appends a block: its wordpieces, their hash, its text record and fields."""
        if self.num_blocks % _BLOCKS_PER_TEXT_FILE == 0:
            self._open_text_file(self.num_blocks // _BLOCKS_PER_TEXT_FILE)
        self._hashes += content
        self._ids_file.write(ids)
        self._text_writer.write(record)
        width = self._vocabulary.id_dtype.itemsize
        self._offsets.append(self._offsets[-1] + len(ids) // width)
        self._title_lengths.append(title_length)
        title, body, source_id, sentences, spans = text
        self._num_sentences += len(sentences)
        self._num_spans += len(spans)
        named = [title_length, title, body, source_id]
        self._fingerprint.update(json.dumps(named).encode())
        self._fingerprint.update(ids)

    def _open_text_file(self, index: int) -> None:
        self._close_text_file()
        path = self._partial / blocks.text_file(index)
        self._text_writer = ArrayRecordWriter(str(path), _TEXT_OPTIONS)

    def _close_text_file(self) -> None:
        if self._text_writer is not None:
            self._text_writer.close()
            self._text_writer = None

    def _finish(self) -> None:
        if self.num_blocks == 0:
            raise EmptyCorpusError(
                f"expected text for the corpus {self._directory}, got no block at all; "
                "check that the source has documents with text."
            )
        self._close_text_file()
        self._ids_file.seek(0)
        id_dtype, num_ids = self._vocabulary.id_dtype, self._offsets[-1]
        write_header(self._ids_file, id_dtype, (), num_ids)
        self._ids_file.close()
        np.save(self._partial / blocks.OFFSETS_FILE, np.array(self._offsets, np.int64))
        np.save(
            self._partial / blocks.TITLE_LENGTHS_FILE,
            np.array(self._title_lengths, np.uint16),
        )
        np.save(
            self._partial / blocks.HASHES_FILE, np.frombuffer(self._hashes, np.uint8)
        )
        if self._documents:
            np.save(self._partial / blocks.DOCUMENTS_FILE, self.documents)
        self._vocabulary.save(self._partial / blocks.VOCABULARY_FILE)
        (self._partial / blocks.INFO_FILE).write_bytes(seal(self._info()))

    def _info(self) -> dict[str, Any]:
        stats = {path.name: file_stat(path) for path in self._partial.iterdir()}
        return {
            **self.metadata,
            "format_version": blocks.FORMAT_VERSION,
            "num_blocks": self.num_blocks,
            "num_wordpieces": self._offsets[-1],
            "num_sentences": self._num_sentences,
            "num_spans": self._num_spans,
            "chunk_length": self._chunk_length,
            **self._vocabulary.settings,
            "vocabulary_fingerprint": self._vocabulary.fingerprint,
            "fingerprint": self._fingerprint.hexdigest(),
            "blocks_per_text_file": _BLOCKS_PER_TEXT_FILE,
            "num_duplicate_blocks": self._num_duplicates(),
            "files": file_records(stats),
        }

    def _num_duplicates(self) -> int:
        """Returns the number of blocks with the title and body of an earlier one."""
        hashes = np.frombuffer(self._hashes, f"V{blocks.HASH_BYTES}")
        return len(hashes) - len(np.unique(hashes))

    def _drop_text_file(self) -> None:
        # The disk that made us give up may still be full.
        with contextlib.suppress(RuntimeError):
            self._close_text_file()


def content_hash(title_length: int, ids: np.ndarray) -> bytes:
    """Returns a 16-byte hash of the title and body wordpieces of a block."""
    digest = hashlib.blake2b(digest_size=blocks.HASH_BYTES)
    digest.update(title_length.to_bytes(4, "little"))
    digest.update(ids.tobytes())
    return digest.digest()


def document_rows(
    documents: Sequence[Document], num_blocks: Sequence[int]
) -> np.ndarray:
    """Returns the table rows of documents and the number of blocks from each."""
    hashes = (
        hashlib.blake2b(d.source_id.encode(), digest_size=blocks.HASH_BYTES).digest()
        for d in documents
    )
    titled = (bool(document.title.strip()) for document in documents)
    rows = list(zip(hashes, num_blocks, titled, strict=True))
    return np.array(rows, blocks.DOCUMENT)
