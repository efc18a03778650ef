"""Reads a folder of plain text, where each file *.txt at any depth is a document."""

import os
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from etils import epath

from realm_jax.data.documents import MAX_RECORD_BYTES, Document, Record, too_long
from realm_jax.data.records import RecordError, decode
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.source import SHARD_BYTES, Piece, Shard, pack


class TextFolder:
    """The files `*.txt` below a folder, in the order of their paths.

    The title is the file's name without `.txt`, the source id its path in the folder.
    """

    def __init__(
        self,
        folder: str,
        *,
        shard_bytes: int = SHARD_BYTES,
        max_file_bytes: int = MAX_RECORD_BYTES,
    ):
        """Lists a folder.

        Args:
          folder: a folder, local or on gs://.
          shard_bytes: approximate size of a shard, in bytes.
          max_file_bytes: larger files are bad records.

        Raises:
          BadInputError: it is not a folder, or has no text.
        """
        self._root = epath.Path(folder).expanduser()
        self._paths: Sequence[epath.Path] = files.find_below(
            folder, "text files (*.txt)", lambda name: name.endswith(".txt")
        )
        self._shard_bytes = shard_bytes
        self._max_file_bytes = max_file_bytes

    def fingerprint(self) -> str:
        """Returns a SHA-256 of the names and contents of the files."""
        parts = [
            part
            for path in self._paths
            for part in (self._source_id(path), files.sha256(path))
        ]
        return files.combined_sha256("text", parts)

    def prepare_shards(self, scratch: epath.PathLike) -> None:
        """Does nothing: files are read whole."""

    def shards(self) -> list[Shard]:
        """Returns shards of whole files."""
        return pack(map(files.whole_file, self._paths), self._shard_bytes)

    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order.

        Raises:
          BadInputError: while reading: a file has become shorter or is gone.
        """
        for piece in shard.pieces:
            if piece.size > self._max_file_bytes:
                yield too_long(piece.name, piece.size, self._max_file_bytes)
                continue
            try:
                yield self._document(piece)
            except RecordError as error:
                yield error.record

    def _document(self, piece: Piece) -> Document:
        content = b"".join(files.read_range(piece))
        text = decode(content, "text", piece.name).removeprefix("\ufeff")
        # Universal newlines, so that an empty line ends a paragraph on every system.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        source_id = self._source_id(epath.Path(piece.path))
        return Document(PurePosixPath(source_id).stem, text, source_id)

    def _source_id(self, path: epath.Path) -> str:
        name = os.fspath(path.relative_to(self._root))
        # File names may hold bytes that are not UTF-8.
        return os.fsencode(name).decode(errors="replace")
