"""What a commit object says of a snapshot, and how a snapshot can be wrong."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.manifests import FileRecord, parse_files, seal, unseal

FORMAT_VERSION = 1

EMBEDDINGS = "embeddings"
"""The array of an index snapshot: one row a block, in the order of block ids."""


class DamagedSnapshotError(BadInputError):
    """A file of a snapshot is missing or is not the one that was committed."""


class MismatchedSnapshotError(BadInputError):
    """A sound snapshot of something else: another corpus, another dimension."""


class AlreadyCommittedError(BadInputError):
    """The step has a snapshot, by another attempt."""


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """An array of a snapshot."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A committed snapshot.

    Attributes:
      step: of the encoder (of a retriever snapshot: the training step it is from).
      attempt: which writer made it; its data lies under `data/<step>-<attempt>/`.
      corpus_fingerprint: of the block store it belongs to.
      files: by name within the snapshot, those of arrays included.
      arrays: by name.
      committed: when, in Unix seconds.
      build_seconds: from the start of the attempt to the commit.
      metadata: whatever the writer wanted its readers to know; plain JSON.
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
        """Size of an embedding."""
        return self._embeddings.shape[1]

    @property
    def dtype(self) -> str:
        """Type of the embeddings."""
        return self._embeddings.dtype

    @property
    def began(self) -> float:
        """When the attempt began, in Unix seconds: the encoder is at least as old."""
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
        """Returns the commit object: JSON that carries its own crc32c."""
        body = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        if EMBEDDINGS in self.arrays:
            # For people and scripts that read the file as it is.
            body |= {"count": self.count, "dimension": self.dimension}
            body |= {"dtype": self.dtype}
        return seal(body)


def parse_manifest(data: bytes, url: str) -> Manifest:
    """Returns the manifest in a commit object.

    Args:
      data: the object.
      url: where it was read, for messages.

    Raises:
      DamagedSnapshotError: it is not what a commit wrote.
    """
    try:
        body = unseal(data)
        if body.pop("format_version") != FORMAT_VERSION:
            raise ValueError("another format version")
        names = [field.name for field in dataclasses.fields(Manifest)]
        values = {name: body[name] for name in names}
        values["files"] = parse_files(body["files"])
        values["arrays"] = {
            name: ArrayRecord(tuple(record["shape"]), record["dtype"])
            for name, record in body["arrays"].items()
        }
        return Manifest(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedSnapshotError(
            f"expected a snapshot manifest of format {FORMAT_VERSION} in {url}, got "
            f"something else ({error}); delete it, and the snapshot will be made anew."
        ) from error


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a reader needs a snapshot to be; None: anything."""

    corpus_fingerprint: str | None = None
    dimension: int | None = None
    count: int | None = None

    def check(self, manifest: Manifest) -> None:
        """Returns if the snapshot is what is needed.

        Raises:
          MismatchedSnapshotError: it is not.
        """
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
