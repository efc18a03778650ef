"""Reads a folder of text, where each file at any depth is a document.

A plain file is one *.txt. A folder of any text has Markdown too, and either gzipped.

Of Markdown, the prose is read: paragraphs and lists. Headings, code, tables, HTML,
images and the syntax of links are left out, which are no sentences. CommonMark's own
parser finds them.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from etils import epath
from markdown_it import MarkdownIt
from markdown_it.token import Token

from realm_jax.data.documents import MAX_RECORD_BYTES, Document, Record, too_long
from realm_jax.data.records import RecordError, decode
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.source import (
    SHARD_BYTES,
    DocumentSource,
    Piece,
    Shard,
    pack,
    parsed,
)

_TEXT = re.compile(r"\.txt\Z")
_TEXT_OR_MARKDOWN = re.compile(r"\.(?:txt|md|markdown)(?:\.gz)?\Z")
_MARKDOWN = re.compile(r"\.(?:md|markdown)(?:\.gz)?\Z")
_PARSER = MarkdownIt("commonmark").enable("table")

# YAML between two lines of dashes, as static site generators have it.
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_BREAKS = ("softbreak", "hardbreak")


class TextFolder(DocumentSource):
    """The files `*.txt` below a folder, in the order of their paths.

    The title is the file's name without `.txt`, the source id its path in the folder.
    """

    _kind = "text"
    _described = "text files (*.txt)"
    _suffix = _TEXT

    def __init__(
        self,
        folder: str,
        *,
        shard_bytes: int = SHARD_BYTES,
        max_file_bytes: int = MAX_RECORD_BYTES,
    ):
        """Lists a folder.

        Args:
          max_file_bytes: larger files are bad records.
        """
        self._root = epath.Path(folder).expanduser()
        self._paths: Sequence[epath.Path] = files.find_below(
            folder, self._described, lambda name: bool(self._suffix.search(name))
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
        return files.combined_sha256(self._kind, parts)

    def shards(self) -> list[Shard]:
        """Returns shards of whole files."""
        return pack(map(files.whole_file, self._paths), self._shard_bytes)

    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order."""
        for piece in shard.pieces:
            if piece.size > self._max_file_bytes:
                yield too_long(piece.name, piece.size, self._max_file_bytes)
            else:
                yield parsed(self._document, piece)

    def _document(self, piece: Piece) -> Document:
        content = self._content(piece)
        text = decode(content, "text", piece.name).removeprefix("\ufeff")
        # Universal newlines, so that an empty line ends a paragraph on every system.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        source_id = self._source_id(epath.Path(piece.path))
        name = PurePosixPath(self._suffix.sub("", source_id)).name
        if not _MARKDOWN.search(source_id):
            return Document(name, text, source_id)
        title, text = read_markdown(text)
        return Document(title or name, text, source_id)

    def _content(self, piece: Piece) -> bytes:
        if not files.is_compressed(piece.path):
            return b"".join(files.read_range(piece))
        content = b""
        for chunk in files.unpack(piece.path, piece.name):
            content += chunk
            if len(content) > self._max_file_bytes:
                raise RecordError(
                    *too_long(piece.name, len(content), self._max_file_bytes)
                )
        return content

    def _source_id(self, path: epath.Path) -> str:
        name = os.fspath(path.relative_to(self._root))
        # File names may hold bytes that are not UTF-8.
        return os.fsencode(name).decode(errors="replace")


class AnyTextFolder(TextFolder):
    """The files `*.txt`, `*.md` and `*.markdown` below a folder, plain or `.gz`.

    The title of Markdown is its first heading, if it has one (`read_markdown`).
    """

    _kind = "folder"
    _described = "text or Markdown (*.txt, *.md, *.markdown, also .gz)"
    _suffix = _TEXT_OR_MARKDOWN


def read_markdown(text: str) -> tuple[str, str]:
    """Returns the first heading, "" if there is none, and the paragraphs.

    An empty line stands between two paragraphs, or items of a list.
    """
    tokens = _PARSER.parse(_FRONT_MATTER.sub("", text, count=1))
    found: dict[str, list[str]] = {"heading_open": [], "paragraph_open": []}
    for opening, token in pairwise(tokens):
        if token.type == "inline" and opening.type in found:
            plain = " ".join("".join(_plain(token.children or ())).split())
            found[opening.type].append(plain)
    headings, paragraphs = (list(filter(None, texts)) for texts in found.values())
    return next(iter(headings), ""), "\n\n".join(paragraphs)


def _plain(tokens: Sequence[Token]) -> Iterator[str]:
    """Yields the text of inline elements, without addresses that stand for a link."""
    is_address = False
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            is_address = token.type == "link_open" and token.info == "auto"
        elif token.type in ("text", "code_inline") and not is_address:
            yield token.content
        elif token.type in _BREAKS:
            yield " "
