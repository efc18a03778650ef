"""Provides a source over files of lines, and the formats that a line may have.

WikiExtractor's output with `--json` is read, and CC-News, the articles that news-please
extracts from Common Crawl: in the format of news-please (`NewsArticle`, with
`maintext`) and in that of the published data set `cc_news` (with `text`), also in TFDS.
"""

import html
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from realm_jax.data.documents import (
    MAX_RECORD_BYTES,
    NO_ARTICLE,
    Document,
    LeftOut,
    Record,
    is_article,
    title_and_text,
    too_long,
)
from realm_jax.data.records import RecordError, clean_text, json_object, shorten
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.source import (
    SHARD_BYTES,
    DocumentSource,
    Piece,
    Shard,
    pack,
    parsed,
)

# Of CC-News the first field that is present and not empty is used. A description is the
# lead of an article whose body could not be extracted.
TEXT_FIELDS = ("maintext", "text", "description")
_TITLE_FIELDS = ("title", "title_page", "title_rss")
_ID_FIELDS = ("url", "filename", *_TITLE_FIELDS)

Parse = Callable[[bytes, str], Document | LeftOut]
"""Maps (line, where) to a document, or raises `RecordError`. Must be picklable, such as
a module-level function."""


class Line(NamedTuple):
    """A line of a file.

    Attributes:
      content: the line without the newline; None if it is too long to keep.
      length: its length in bytes, without the newline.
    """

    content: bytes | None
    length: int


class LineSource(DocumentSource):
    """Documents from files with one record per line; blank lines are skipped.

    Plain files are split at line starts, so that no line crosses shards. A compressed
    file is one piece until `prepare_shards` has unpacked it.
    """

    def __init__(
        self,
        kind: str,
        paths: Sequence[epath.Path],
        parse: Parse,
        *,
        shard_bytes: int = SHARD_BYTES,
        max_line_bytes: int = MAX_RECORD_BYTES,
    ):
        """Describes files.

        Args:
          kind: names the format that `parse` reads, for the fingerprint.
          paths: the files in reading order; `.gz` and `.bz2` are unpacked.
          parse: converts a line to a document.
          max_line_bytes: longer lines are bad records, and never held in memory.
        """
        self._kind = kind
        self._paths = tuple(paths)
        self._parse = parse
        self._shard_bytes = shard_bytes
        self._max_line_bytes = max_line_bytes
        self._hashes: dict[str, str] = {}
        self._unpacked: dict[str, str] = {}

    def fingerprint(self) -> str:
        """Returns a SHA-256 of the kind and the content of the files, in order."""
        return files.combined_sha256(self._kind, map(self._sha256, self._paths))

    def prepare_shards(self, scratch: epath.PathLike) -> None:
        """Unpacks the compressed files that are larger than a shard.

        Other sources may use the same folder, and a file is not unpacked again by a
        later call unless what the earlier one left is damaged.
        """
        for path in self._paths:
            large = path.stat().length > self._shard_bytes
            if not (large and files.is_compressed(path)):
                continue
            unpacked = files.unpack_into(scratch, path, self._sha256(path))
            self._unpacked[os.fspath(path)] = os.fspath(unpacked)

    def shards(self) -> list[Shard]:
        """Returns shards of whole lines.

        Files larger than a shard are read once to count their lines.
        """
        pieces = (piece for path in self._paths for piece in self._pieces(path))
        return pack(pieces, self._shard_bytes)

    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order."""
        for piece in shard.pieces:
            if files.is_compressed(piece.path):
                chunks = files.unpack(piece.path, piece.name, piece.stop)
            else:
                chunks = files.read_range(piece)
            lines = split_lines(chunks, self._max_line_bytes)
            for number, line in enumerate(lines, start=piece.first_number):
                where = f"{piece.name}, line {number}"
                if line.content is None:
                    yield too_long(where, line.length, self._max_line_bytes)
                elif line.content.strip():
                    yield parsed(self._parse, line.content, where)

    def _pieces(self, path: epath.Path) -> list[Piece]:
        name = os.fspath(path)
        whole = files.whole_file(epath.Path(self._unpacked.get(name, path)))
        if files.is_compressed(whole.path):
            return [whole]
        return cut_at_lines(whole, name, self._shard_bytes)

    def _sha256(self, path: epath.Path) -> str:
        name = os.fspath(path)
        if name not in self._hashes:
            self._hashes[name] = files.sha256(path)
        return self._hashes[name]


def split_lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[Line]:
    """Splits chunks of bytes into lines, which end in a newline or at the end.

    At most `max_bytes` and a chunk are kept in memory.
    """
    content, length = b"", 0
    for chunk in chunks:
        begun, *lines = chunk.split(b"\n")
        length += len(begun)
        content = content + begun if length <= max_bytes else b""
        for line in lines:
            yield Line(content if length <= max_bytes else None, length)
            content, length = line, len(line)
    if length:
        yield Line(content if length <= max_bytes else None, length)


def cut_at_lines(whole: Piece, name: str, shard_bytes: int) -> list[Piece]:
    """Splits a plain file at the first line start after every `shard_bytes`."""
    starts = [(0, 1)]
    if whole.size > shard_bytes:
        starts += _line_starts(files.read_range(whole), shard_bytes)
    ends = [*(start for start, _ in starts[1:]), whole.size]
    return [
        Piece(whole.path, name, start, end, number)
        for (start, number), end in zip(starts, ends, strict=True)
        if start < end
    ]


def _line_starts(
    chunks: Iterable[bytes], shard_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yields (offset, line number) of the start of each piece except the first."""
    position, newlines, wanted = 0, 0, shard_bytes
    for chunk in chunks:
        counted = 0
        while True:
            # A line begins at the earliest wanted offset if a newline precedes it.
            found = chunk.find(b"\n", max(wanted - 1 - position, counted))
            if found < 0:
                break
            newlines += chunk.count(b"\n", counted, found + 1)
            counted = found + 1
            yield position + counted, newlines + 1
            wanted = position + counted + shard_bytes
        newlines += chunk.count(b"\n", counted)
        position += len(chunk)


def page_from_json(line: bytes, where: str) -> Document | LeftOut:
    """Reads a page `{"id", "url", "title", "text"}`.

    WikiExtractor escapes HTML, and some of its versions begin the text with the title
    on a separate line; both are undone.
    """
    fields = json_object(line, where)
    title, text = map(html.unescape, title_and_text(fields, where))
    if not is_article(title):
        return LeftOut(where, NO_ARTICLE)
    first_line, _, rest = text.partition("\n")
    if title and first_line.strip() == title.strip():
        text = rest.lstrip("\n")
    return Document(title, text, clean_text(str(fields.get("id") or title)))


def article_from_json(line: bytes, where: str) -> Document:
    """Reads a line of CC-News."""
    return article_from_fields(json_object(line, where), where)


def article_from_fields(fields: Mapping[str, Any], where: str) -> Document:
    """Converts the fields of an article to a document, identified by its address.

    Args:
      fields: strings or None; the crawler sets fields that it did not find to None.
    """
    if not any(name in fields for name in TEXT_FIELDS):
        raise RecordError(
            where,
            f"expected one of the fields {', '.join(TEXT_FIELDS)}, got "
            f"{shorten(', '.join(fields))}; correct the record.",
        )
    return Document(
        title=_first(fields, _TITLE_FIELDS, where),
        text=_first(fields, TEXT_FIELDS, where),
        source_id=_first(fields, _ID_FIELDS, where),
    )


def _first(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = fields.get(name)
        if not isinstance(value, str | None):
            raise RecordError(
                where,
                f"expected {name!r} to be a string or null, got "
                f"{shorten(json.dumps(value, default=str))}; correct the record.",
            )
        if value and value.strip():
            return clean_text(value)
    return ""
