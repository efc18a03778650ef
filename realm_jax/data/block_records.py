"""Makes a corpus of blocks that others have cut, in their order.

The published REALM and ORQA models have their blocks in `blocks.tfr`, TFRecords of a
text each; `transformers` keeps the same as `block_records.npy`, a pickle. Neither is
held in memory, and the pickle is not run: of its operations only those of a list of
byte strings are accepted, and the strings are taken one after the other.
"""

import itertools
import os
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from realm_jax.data.block_writer import Block, BlockWriter
from realm_jax.data.blocks import NO_TAGGER, BlockStore, BlockText
from realm_jax.data.chunking import split_sentences
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

RECORDS_FILE = "block_records.npy"
CHUNK_LENGTH = 288
"""Wordpieces that the published blocks were cut to."""

_LARGEST_RECORD = 1 << 20
_RECORDS_AT_ONCE = 512
_CRC_MASK = 0xA282EAD8
_STRINGS = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_OF_LISTS = ("MARK", "APPEND", "APPENDS", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT")


def read_records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file, `.npy` or TFRecords."""
    try:
        with path.open("rb") as file:
            read = _of_npy if path.suffix == ".npy" else _of_tfrecords
            yield from read(_Bounded(file))
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected the texts of blocks in {path}, TFRecords or {RECORDS_FILE}, but "
            f"{error}; fetch it again"
        ) from error


def write_corpus(
    directory: str,
    blocks: Path,
    vocabulary: WordPiece,
    titles: Path | None = None,
) -> BlockStore:
    """Writes a corpus in which block i is record i, and opens it.

    Args:
      titles: a title for each text, in a file of the same kind; None for none.
    """
    records = ((b"", text) for text in read_records(blocks))
    if titles is not None:
        records = itertools.zip_longest(read_records(titles), read_records(blocks))
    with BlockWriter(directory, vocabulary, CHUNK_LENGTH) as writer:
        while batch := list(itertools.islice(records, _RECORDS_AT_ONCE)):
            if None in batch[-1]:
                raise BadInputError(
                    f"expected a title in {titles} for each text of {blocks}, got "
                    "another number; give the file that belongs to it"
                )
            for block in _blocks(batch, vocabulary, writer.num_blocks):
                writer.add(block)
        writer.metadata |= {"source": source_of(blocks, titles), "tagger": NO_TAGGER}
    return BlockStore.open(directory)


def source_of(blocks: Path, titles: Path | None) -> str:
    """Returns what a corpus records of the files that it was made of."""
    files = [path for path in (blocks, titles) if path is not None]
    return " ".join(f"{path.name}:{os.path.getsize(path)}" for path in files)


def _blocks(
    records: list[tuple[bytes, bytes]], vocabulary: WordPiece, first: int
) -> Iterator[Block]:
    texts = [[part.decode("utf-8", "replace") for part in record] for record in records]
    titles, bodies = zip(*texts, strict=True)
    ids = map(vocabulary.ids_batch, (titles, bodies))
    made = zip(titles, bodies, *ids, strict=True)
    for number, (title, body, title_ids, body_ids) in enumerate(made, start=first):
        sentences = split_sentences(body, vocabulary.tokenize_chinese_chars)
        text = BlockText(title, body, title or str(number), sentences, [])
        yield Block(title_ids, body_ids, text)


class _Bounded:
    """A file of which no more is read, or allocated, than there is."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.tell, self.readline = file.tell, lambda: file.readline(_LARGEST_RECORD)

    def read(self, count: int = -1) -> bytes:
        """Returns the next bytes, fewer at the end."""
        rest = self.size - self._file.tell()
        count = rest if count < 0 else min(count, rest)
        if count > _LARGEST_RECORD:
            raise ValueError(f"a record has {count:,} bytes")
        return self._file.read(count)


def _of_tfrecords(file: _Bounded) -> Iterator[bytes]:
    for number in itertools.count():
        header = file.read(12)
        if not header:
            return
        length = int.from_bytes(header[:8], "little")
        if len(header) < 12 or _masked_crc(header[:8]) != header[8:]:
            raise ValueError(f"record {number} is none")
        record, checksum = file.read(length), file.read(4)
        if len(record) != length or _masked_crc(record) != checksum:
            raise ValueError(f"record {number} is damaged")
        yield record


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    rotated = (crc >> 15 | crc << 17) + _CRC_MASK
    return (rotated & 0xFFFFFFFF).to_bytes(4, "little")


def _of_npy(file: Any) -> Iterator[bytes]:
    version = np.lib.format.read_magic(file)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"its version is {version}")
    shape, _, dtype = read_header(file)
    if len(shape) != 1 or not dtype.hasobject:
        raise ValueError(f"it has {dtype} of shape {shape}, and no list of texts")
    count = 0
    for record in _strings(file):
        count += 1
        yield record
    if count != shape[0]:
        raise ValueError(f"it has {count:,} of its {shape[0]:,} texts")


def _strings(file: Any) -> Iterator[bytes]:
    """Yields the strings of the list in a pickle of an array."""
    in_list = False
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "EMPTY_LIST" and not in_list:
            in_list = True
        elif in_list and operation.name in _STRINGS:
            yield bytes(argument or b"")
        elif in_list and operation.name not in _OF_LISTS:
            if operation.name in ("TUPLE", "TUPLE3"):
                return
            raise ValueError(f"its list has {operation.name}, and not only texts")
