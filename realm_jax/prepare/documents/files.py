"""Finds, opens, hashes and unpacks files, local or on gs://."""

import bz2
import gzip
import hashlib
import io
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO

import google_crc32c
from etils import epath

from realm_jax.errors import BadInputError, full_disk_is_bad_input
from realm_jax.extras import require_extra_of_url
from realm_jax.prepare.documents.source import Piece

CHUNK_BYTES = 1 << 20
_WILDCARDS = frozenset("*?[")
_SCHEME = re.compile(r"(\w+)://")
# What damage looks like, in the words of gzip and bz2.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, OSError)

_log = logging.getLogger(__name__)


def require_readable(location: str) -> None:
    """Checks that a location, a kind before it or not, is local or on gs://."""
    match = _SCHEME.search(location)
    if match and match[1] != "gs":
        raise BadInputError(
            f"expected a local path or gs://, got {location!r}; copy it to one of these"
        )


def find_files(pattern: str, what: str) -> list[epath.Path]:
    """Returns a file, or the files that match a pattern with `*`, `?` or `[`, sorted.

    Args:
      pattern: a path or a pattern; directories that it matches are ignored.
    """
    require_readable(pattern)
    require_extra_of_url(pattern)
    path = epath.Path(pattern).expanduser()
    if path.is_dir():
        raise BadInputError(
            f"expected {what} at {pattern}, got a folder; name the files in it, such "
            f"as {pattern.rstrip('/')}/*."
        )
    found = [path] if path.exists() else _glob(path)
    return _require_content(found, f"{what} at {pattern}")


def find_below(
    folder: str, what: str, wanted: Callable[[str], bool]
) -> list[epath.Path]:
    """Returns the files below a folder, at any depth, sorted by their paths."""
    require_extra_of_url(folder)
    root = epath.Path(folder).expanduser()
    if not root.is_dir():
        raise BadInputError(
            f"expected a folder of {what} at {folder}, found none; check the path."
        )
    found = [
        epath.Path(parent) / name
        for parent, _, names in root.walk()
        for name in names
        if wanted(name)
    ]
    # Compared part by part and by code points, for the same order on every machine.
    found.sort(key=lambda path: os.fspath(path).split("/"))
    return _require_content(found, f"{what} below {folder}")


def whole_file(path: epath.Path) -> Piece:
    """Returns a file as one piece."""
    return Piece(os.fspath(path), os.fspath(path), 0, path.stat().length)


def open_file(path: epath.PathLike) -> IO[bytes]:
    """Opens a file for reading."""
    try:
        return epath.Path(path).open("rb")
    except OSError as error:
        raise BadInputError(
            f"expected a readable file at {path}, but it cannot be opened ({error}); "
            "check the path and its permissions."
        ) from error


def is_compressed(path: epath.PathLike) -> bool:
    """Returns whether a file is compressed, and so only readable from its start."""
    return os.fspath(path).endswith((".gz", ".bz2"))


def read_range(piece: Piece) -> Iterator[bytes]:
    """Yields the bytes of a piece of a plain file, in chunks."""
    remaining = piece.size
    with open_file(piece.path) as file:
        file.seek(piece.start)
        while remaining:
            chunk = file.read(min(CHUNK_BYTES, remaining))
            if not chunk:
                raise BadInputError(
                    f"expected at least {piece.stop:,} bytes in {piece.path}, got "
                    f"{piece.stop - remaining:,}; it has changed while it was read, "
                    "start anew."
                )
            remaining -= len(chunk)
            yield chunk


def unpack(path: epath.PathLike, name: str, stop: int = sys.maxsize) -> Iterator[bytes]:
    """Yields the content of a compressed file, in chunks.

    Args:
      stop: only what its first bytes hold; the rest of the file is not read.
    """
    unpacked = 0
    with open_file(path) as file:
        is_part = stop < file.seek(0, os.SEEK_END)
        file.seek(0)
        packed = io.BytesIO(file.read(stop)) if is_part else file
        if os.fspath(path).endswith(".gz"):
            stream = gzip.GzipFile(fileobj=packed)
        else:
            stream = bz2.BZ2File(packed)
        # At the end of a part, `read` would lose what it has unpacked.
        read = stream.read1 if is_part else stream.read
        while True:
            try:
                chunk = read(CHUNK_BYTES)
            except _DAMAGE as error:
                if is_part and isinstance(error, EOFError):
                    return
                raise BadInputError(
                    f"expected a whole compressed file at {name}, but it is damaged "
                    f"{unpacked:,} unpacked bytes on ({error}); fetch it again, or "
                    "correct the suffix of a file that is not compressed."
                ) from error
            if not chunk:
                return
            unpacked += len(chunk)
            yield chunk


def unpack_into(folder: epath.PathLike, path: epath.Path, content: str) -> epath.Path:
    """Unpacks a compressed file, or finds what an earlier call unpacked.

    The unpacked file appears when it is complete. Its name holds its crc32c, which is
    compared when it is found; a damaged one is unpacked anew.

    Args:
      content: identifies the content of that file.
    """
    target = epath.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for found in target.glob(f"{content}-*.lines"):
        with open_file(found) as file:
            if found.name == _unpacked_name(content, _crc32c(file)):
                return found
        _log.warning("%s is damaged and is made anew", found)
        found.unlink()
    unfinished = target / f".{content}.{os.getpid()}"
    try:
        with full_disk_is_bad_input(f"{target}"):
            checksum = google_crc32c.Checksum()
            with unfinished.open("wb") as file:
                for chunk in unpack(path, os.fspath(path)):
                    checksum.update(chunk)
                    file.write(chunk)
            unpacked = target / _unpacked_name(content, checksum)
            unfinished.replace(unpacked)
            return unpacked
    finally:
        unfinished.unlink(missing_ok=True)


def _unpacked_name(content: str, checksum: google_crc32c.Checksum) -> str:
    return f"{content}-{checksum.digest().hex()}.lines"


def _crc32c(file: IO[bytes]) -> google_crc32c.Checksum:
    checksum = google_crc32c.Checksum()
    while chunk := file.read(CHUNK_BYTES):
        checksum.update(chunk)
    return checksum


def sha256(path: epath.PathLike) -> str:
    """Returns the SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def combined_sha256(kind: str, parts: Iterable[str]) -> str:
    """Returns the SHA-256 (hex) of a kind of source and the parts of its identity."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()


def first_line(error: Exception) -> str:
    """Returns the first line of an error; TensorFlow appends where it was raised."""
    return str(error).partition("\n")[0]


def _glob(path: epath.Path) -> list[epath.Path]:
    parts = path.parts
    first = next((i for i, part in enumerate(parts) if _WILDCARDS & set(part)), None)
    if first is None:
        return []
    # Walk up with `parent`: the first part of a gs:// path is not a local folder.
    root = path
    for _ in parts[first:]:
        root = root.parent
    found = root.glob("/".join(parts[first:]))
    files = [match for match in found if not match.is_dir()]
    return sorted(files, key=lambda match: os.fspath(match).split("/"))


def _require_content(found: list[epath.Path], what: str) -> list[epath.Path]:
    if not found:
        raise BadInputError(f"expected {what}, found no such file; check the path.")
    if not any(path.stat().length for path in found):
        raise BadInputError(f"expected {what}, but it is empty; check how it was made.")
    return found
