"""Defines sources of documents, as lists of shards that can be read in any order."""

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from etils import epath

from realm_jax.data.documents import Document, LeftOut, Record
from realm_jax.data.records import RecordError

SHARD_BYTES = 8 << 20
"""Approximate size of a shard: seconds of work, so little is repeated on failure."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file or dataset.

    Attributes:
      path: the file that holds it, or the name of a dataset of many files.
      name: name of the file or dataset in errors.
      start: its first byte, or its first example in a dataset of examples.
      stop: its end, exclusive.
      first_number: number of its first line or example, counted from 1.
    """

    path: str
    name: str
    start: int
    stop: int
    first_number: int = 1

    @property
    def size(self) -> int:
        """Its size in bytes, or in examples in a dataset of examples."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a source that is read as a unit."""

    pieces: tuple[Piece, ...]


class DocumentSource(abc.ABC):
    """Documents in a fixed order, in shards.

    The concatenated records of all shards do not depend on the size of a shard. A
    source is pickled and sent to the workers that read it.
    """

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a SHA-256 (hex) of the content, for which every file is read."""

    def prepare_shards(self, scratch: epath.PathLike) -> None:
        """Unpacks into `scratch` files that cannot be read from the middle, if any.

        Optional; without it a large compressed file is a single shard. Files that an
        earlier call unpacked are reused.
        """
        del scratch

    @abc.abstractmethod
    def shards(self) -> list[Shard]:
        """Returns all shards, in order; every call returns the same ones."""

    @abc.abstractmethod
    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order.

        Raises:
          BadInputError: while reading: a file is damaged so that the rest of it cannot
            be read, or it has changed since the shards were made.
        """


def parsed(parse: Callable[..., Document | LeftOut], *record: Any) -> Record:
    """Returns what `parse` makes of a record, a `BadRecord` if it cannot be read."""
    try:
        return parse(*record)
    except RecordError as error:
        return error.record


def read_all(source: DocumentSource) -> Iterator[Record]:
    """Yields all records of a source, in order."""
    for shard in source.shards():
        yield from source.read(shard)


def pack(pieces: Iterable[Piece], shard_bytes: int) -> list[Shard]:
    """Groups consecutive pieces into shards of at least `shard_bytes`."""
    shards: list[Shard] = []
    gathered: list[Piece] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += piece.size
        if size >= shard_bytes:
            shards.append(Shard(tuple(gathered)))
            gathered, size = [], 0
    if gathered:
        shards.append(Shard(tuple(gathered)))
    return shards
