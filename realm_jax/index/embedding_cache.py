"""Reuses embeddings of an existing index by the same document encoder.

Each index stores the content hashes of its blocks. Another index by the same encoder
therefore provides the rows of every block that is in both, whatever its id (a block's
hash is that of its wordpieces, see `data/blocks.py`). It may be of an earlier version
of the corpus, of another step with the same document tower, or of another stage:
fine-tuning begins with the retriever that pre-training ended with.

A model directory keeps the indexes of the corpus that was indexed there first under
`index/`; wherever training searches, that is the corpus it was trained on. Those of any
other corpus are under `other_index/<fingerprint>/`, so that indexes needed to resume
from checkpoints are never replaced.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from realm_jax.errors import BadInputError
from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError, Manifest
from realm_jax.index.snapshot_writer import commit_name
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.models.retriever import SETTINGS_OF_TRAINING
from realm_jax.storage import MissingObjectError, Store, open_store

HASHES = "block_hashes"
"""Name of an index snapshot's array with the content hash of each row's block."""

DOCUMENT_CRC32C = "document_crc32c"
"""Key in an index's metadata: checksum of the parameters that embedded documents."""

UNREADABLE = (BadInputError, OSError)
"""Exceptions on reading another index, after which its rows are embedded instead."""

_OTHERS = "other_index"
_READ_ROWS = 1 << 16


def index_series(store: Store, corpus_fingerprint: str) -> SnapshotSeries:
    """Returns the series of a corpus's indexes in a model directory."""
    own = SnapshotSeries(store, INDEX_SERIES)
    for step in reversed(own.steps()):
        # An unreadable manifest is reported by its users; any other one serves as well.
        with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
            if own.read_manifest(step).corpus_fingerprint == corpus_fingerprint:
                return own
            return SnapshotSeries(store, f"{_OTHERS}/{corpus_fingerprint[:16]}")
    return own


class KnownRows:
    """The rows of the index at `url`, by the hashes of their blocks."""

    def __init__(self, series: SnapshotSeries, manifest: Manifest):
        self.url = series.store.url(commit_name(series.name, manifest.step))
        self._embeddings = series.array(manifest, EMBEDDINGS)
        hashes = _as_keys(series.read_array(manifest, HASHES))
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, hashes: UInt8[np.ndarray, "block 16"]) -> Int[np.ndarray, " block"]:
        """Returns the row of each block, -1 where there is none."""
        keys = _as_keys(hashes)
        places = np.searchsorted(self._sorted, keys).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[places] == keys, self._order[places], -1)

    def read(
        self, rows: Int[np.ndarray, " block"]
    ) -> Float[np.ndarray, "block projection"]:
        """Returns the embeddings of rows, in the given order."""
        found = np.empty((len(rows), self._embeddings.shape[1]), np.float32)
        # Adjacent blocks are mostly adjacent in the other index: few chunks are read.
        for first in np.unique(rows // _READ_ROWS) * _READ_ROWS:
            here = (rows >= first) & (rows < first + _READ_ROWS)
            start, stop = int(rows[here].min()), int(rows[here].max()) + 1
            found[here] = self._embeddings[start:stop][rows[here] - start]
        return found


def find_known(
    store: Store,
    donors: Sequence[str],
    metadata: Mapping[str, Any],
    corpus_fingerprint: str,
) -> KnownRows | None:
    """Returns the rows of an intact index by the same document encoder, or None.

    An index of the same corpus is preferred, because it has every row; then one of the
    model directory itself, and not of `donors`; then the newest. Every byte is compared
    with its checksum. Directories that are missing or cannot be read are ignored.
    """
    wanted = _encoding(metadata)
    found = []
    for place, donor in enumerate([store, *_open(donors)]):
        with contextlib.suppress(*UNREADABLE):
            found += [
                _Candidate(
                    manifest.corpus_fingerprint == corpus_fingerprint,
                    -place,
                    manifest.committed,
                    series,
                    manifest,
                )
                for series, manifest in _indexes(donor)
                if HASHES in manifest.arrays and _encoding(manifest.metadata) == wanted
            ]
    for candidate in sorted(found, key=lambda entry: entry[:3], reverse=True):
        # A damaged index is skipped here, and reported by its users.
        with contextlib.suppress(*UNREADABLE):
            candidate.series.verify(candidate.manifest)
            return KnownRows(candidate.series, candidate.manifest)
    return None


class _Candidate(NamedTuple):
    """An index to copy rows from; the first three fields are the sort key."""

    is_same_corpus: bool
    place: int
    committed: float
    series: SnapshotSeries
    manifest: Manifest


def _open(donors: Sequence[str]) -> Iterator[Store]:
    for donor in donors:
        with contextlib.suppress(*UNREADABLE):
            yield open_store(donor)


def _indexes(store: Store) -> Iterator[tuple[SnapshotSeries, Manifest]]:
    """Yields all indexes of a model directory, of any corpus."""
    names = re.compile(rf"({_OTHERS}/[0-9a-f]+)/commits/\d+\.json")
    others = {m.group(1) for m in map(names.fullmatch, store.list(_OTHERS)) if m}
    for name in [INDEX_SERIES, *sorted(others)]:
        series = SnapshotSeries(store, name)
        for step in series.steps():
            with contextlib.suppress(*UNREADABLE):
                yield series, series.read_manifest(step)


def _encoding(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the values that determine an embedding, apart from its document.

    They exclude the query tower, and include the configuration: pooling and the type of
    activations change embeddings, but not the parameters. Batching and dropout are left
    out, because they do not matter.
    """
    try:
        retriever = {**metadata["retriever"], "bert": {**metadata["retriever"]["bert"]}}
        for name in SETTINGS_OF_TRAINING:
            retriever.pop(name, None)
            retriever["bert"].pop(name, None)
        return {
            "retriever": retriever,
            "vocabulary_fingerprint": metadata["vocabulary_fingerprint"],
            "document_length": metadata["embed"]["document_length"],
            DOCUMENT_CRC32C: metadata[DOCUMENT_CRC32C],
        }
    except (KeyError, TypeError):
        return None  # Of a builder that recorded less metadata: not comparable.


def _as_keys(hashes: UInt8[np.ndarray, "block 16"]) -> np.ndarray:
    return np.ascontiguousarray(hashes).view("V16").ravel()
