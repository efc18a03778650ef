"""What every source of documents is: a list of shards that can be read in any order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from etils import epath

from realm_jax.data.documents import Record

SHARD_BYTES = 8 << 20
"""About how much of a source is a shard: seconds of work, and little to do again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file or dataset.

    Attributes:
      path: the file that holds it, or the name of a dataset of many files.
      name: what errors call the file or dataset.
      start: its first byte; its first example in a dataset of examples.
      stop: where it ends, exclusive.
      first_number: of its first line or example, counted from 1.
    """

    path: str
    name: str
    start: int
    stop: int
    first_number: int = 1

    @property
    def size(self) -> int:
        """Bytes, or examples in a dataset of examples."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a source that is read at once.

    Attributes:
      pieces: in the order they are read.
    """

    pieces: tuple[Piece, ...]


class DocumentSource(Protocol):
    """Documents in a fixed order, in shards.

    The records of all shards, one after the other, are the same whatever the size of
    a shard. A source is pickled and sent to the workers that read it.
    """

    def fingerprint(self) -> str:
        """Returns a SHA-256 (hex) that changes with the content.

        Every file is read for it.
        """
        ...

    def prepare_shards(self, scratch: epath.PathLike) -> None:
        """Unpacks into `scratch` what cannot be entered in the middle.

        Not calling it is no mistake, but a large compressed file is one shard then.
        What an earlier call left there is used again.

        Raises:
          BadInputError: a compressed file is damaged, or the disk is full.
        """
        ...

    def shards(self) -> list[Shard]:
        """Returns all shards, in order; the same ones every time."""
        ...

    def read(self, shard: Shard) -> Iterator[Record]:
        """Returns the records of a shard, in order.

        Raises:
          BadInputError: while reading: a file is damaged so that what follows cannot
            be read either, or it has changed since the shards were made.
        """
        ...


def read_all(source: DocumentSource) -> Iterator[Record]:
    """Returns all records of a source, in order."""
    for shard in source.shards():
        yield from source.read(shard)


def pack(pieces: Iterable[Piece], shard_bytes: int) -> list[Shard]:
    """Puts consecutive pieces together until each shard has `shard_bytes`."""
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
