"""Provides the manifest of a snapshot, its checks, and the errors of snapshots."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.manifests import (
    FileRecord,
    parse_files,
    require_fields,
    seal,
    unseal,
)
from realm_jax.storage import MissingObjectError

FORMAT_VERSION = 1

EMBEDDINGS = "embeddings"
"""The array of an index snapshot, with one row per block in order of block ids."""


_FIELDS = {
    "format_version": int,
    "step": int,
    "attempt": str,
    "corpus_fingerprint": str,
    "files": dict,
    "arrays": dict,
    "committed": int | float,
    "build_seconds": int | float,
    "metadata": dict,
}


class DamagedSnapshotError(BadInputError):
    """Raised when a file of a snapshot is missing or not as it was committed."""


class MismatchedSnapshotError(BadInputError):
    """Raised for an undamaged snapshot of another corpus, dimension or encoder."""


class AlreadyCommittedError(BadInputError):
    """Raised when the step already has a snapshot, by another attempt."""


class MissingAttemptError(MissingObjectError):
    """Raised when an attempt was deleted under its writer, or its header is damaged."""


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """Shape and dtype of an array of a snapshot."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a committed snapshot.

    Attributes:
      step: step of the encoder (for a retriever snapshot, its own training step).
      attempt: name of the attempt; its data is under `data/<step>-<attempt>/`.
      committed: time of the commit, in Unix seconds.
      build_seconds: time from the start of the attempt to the commit, in seconds.
    """

    step: int
    attempt: str
    corpus_fingerprint: str
    files: Mapping[str, FileRecord]
    arrays: Mapping[str, ArrayRecord]
    committed: float
    build_seconds: float
    metadata: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Number of embedded blocks."""
        return self._embeddings.shape[0]

    @property
    def dimension(self) -> int:
        """Dimension of an embedding."""
        return self._embeddings.shape[1]

    @property
    def began(self) -> float:
        """Start of the attempt, in Unix seconds: the encoder is at least as old."""
        return self.committed - self.build_seconds

    @property
    def _embeddings(self) -> ArrayRecord:
        if EMBEDDINGS not in self.arrays:
            raise MismatchedSnapshotError(
                f"expected a snapshot with an array {EMBEDDINGS!r}, step {self.step} "
                f"has {sorted(self.arrays)}; give an index snapshot."
            )
        return self.arrays[EMBEDDINGS]

    def to_bytes(self) -> bytes:
        """Returns the commit object: JSON that contains its own crc32c."""
        body = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        if EMBEDDINGS in self.arrays:
            # For people and scripts that read the file directly.
            body |= {"count": self.count, "dimension": self.dimension}
            body |= {"dtype": self._embeddings.dtype}
        return seal(body)


def parse_manifest(data: bytes, url: str) -> Manifest:
    """Returns the manifest in a commit object; DamagedSnapshotError if it is none."""
    try:
        body = unseal(data)
        require_fields(body, _FIELDS)
        if body["format_version"] != FORMAT_VERSION:
            raise ValueError("another format version")
        names = [field.name for field in dataclasses.fields(Manifest)]
        values = {name: body[name] for name in names}
        values["files"] = parse_files(body["files"])
        values["arrays"] = {
            name: _parse_array(name, record) for name, record in body["arrays"].items()
        }
        return Manifest(**values)
    except ValueError as error:
        raise DamagedSnapshotError(
            f"expected a snapshot manifest of format {FORMAT_VERSION} in {url}, got "
            f"something else ({error}); delete it, and the snapshot will be made anew."
        ) from error


def _parse_array(name: str, record: Any) -> ArrayRecord:
    require_fields(record, {"shape": list, "dtype": str})
    shape = tuple(record["shape"])
    dimensions = 2 if name == EMBEDDINGS else len(shape)
    if len(shape) != dimensions or not all(type(size) is int for size in shape):
        raise ValueError(f"the shape of {name!r} is {reprlib.repr(record['shape'])}")
    return ArrayRecord(shape, record["dtype"])


@dataclasses.dataclass(frozen=True)
class Expectation:
    """The properties a reader requires of a snapshot; None allows any value."""

    corpus_fingerprint: str | None = None
    dimension: int | None = None
    count: int | None = None

    def check(self, manifest: Manifest) -> None:
        """Raises MismatchedSnapshotError unless a snapshot has these properties."""
        for name, expected in dataclasses.asdict(self).items():
            if expected is None:
                continue
            found = getattr(manifest, name)
            if found != expected:
                raise MismatchedSnapshotError(
                    f"expected a snapshot with {name} {expected}, step {manifest.step} "
                    f"has {found}; rebuild it with this corpus and model, or use the "
                    "ones it was made with."
                )
