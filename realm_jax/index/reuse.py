"""Indexes of a corpus that changed: what did not change is not embedded again.

Each index keeps the content hashes of its blocks. An index of another version of the
corpus by the same encoder then gives the rows of every block that is in both, whatever
its id (a block's hash is that of its wordpieces, see `data/blocks.py`).

A model directory has the indexes of the corpus that was indexed there first under
`index/`, which is the one it was trained on wherever training searches. Those of any
other corpus lie under `other_index/<fingerprint>/`: the ones that checkpoints resume
with are never replaced.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError, Manifest
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.storage import MissingObjectError, Store

HASHES = "block_hashes"
"""The array of an index snapshot with the content hash of each row's block."""

_OTHERS = "other_index"
_READ_ROWS = 1 << 16


def index_series(store: Store, corpus_fingerprint: str) -> SnapshotSeries:
    """Returns the indexes of a corpus in a model directory."""
    own = SnapshotSeries(store, INDEX_SERIES)
    for step in reversed(own.steps()):
        # Who needs a manifest that cannot be read will name it; another tells as well.
        with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
            if own.read_manifest(step).corpus_fingerprint == corpus_fingerprint:
                return own
            return SnapshotSeries(store, f"{_OTHERS}/{corpus_fingerprint[:16]}")
    return own


class KnownRows:
    """The rows of an index, by the hashes of their blocks."""

    def __init__(self, series: SnapshotSeries, manifest: Manifest):
        """Reads the hashes.

        Raises:
          DamagedSnapshotError: they are not what was committed.
        """
        self.step = manifest.step
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
        """Returns the embeddings of rows, in the order they are asked for.

        Raises:
          DamagedSnapshotError: a chunk is missing or was changed.
        """
        found = np.empty((len(rows), self._embeddings.shape[1]), np.float32)
        # Neighbours are mostly neighbours in the other index, too: few chunks are read.
        for first in np.unique(rows // _READ_ROWS) * _READ_ROWS:
            here = (rows >= first) & (rows < first + _READ_ROWS)
            start, stop = int(rows[here].min()), int(rows[here].max()) + 1
            found[here] = self._embeddings[start:stop][rows[here] - start]
        return found


def find_known(
    store: Store, metadata: Mapping[str, Any], corpus_fingerprint: str
) -> KnownRows | None:
    """Returns the rows of an index of another corpus that was made the same way.

    Args:
      store: the model directory.
      metadata: what must agree: encoder, vocabulary, lengths.
      corpus_fingerprint: of the corpus to be indexed.
    """
    names = re.compile(rf"({_OTHERS}/[0-9a-f]+)/commits/\d+\.json")
    others = {m.group(1) for m in map(names.fullmatch, store.list(_OTHERS)) if m}
    found = []
    for name in [INDEX_SERIES, *sorted(others)]:
        series = SnapshotSeries(store, name)
        for step in series.steps():
            # What cannot be read is of no use here; who needs it will name it.
            with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
                manifest = series.read_manifest(step)
                same = all(manifest.metadata.get(k) == v for k, v in metadata.items())
                other = manifest.corpus_fingerprint != corpus_fingerprint
                if same and other and HASHES in manifest.arrays:
                    found.append((manifest.committed, series, manifest))
    if not found:
        return None
    _, series, manifest = max(found, key=lambda entry: entry[0])
    with contextlib.suppress(DamagedSnapshotError):
        series.verify(manifest)
        return KnownRows(series, manifest)
    return None


def _as_keys(hashes: UInt8[np.ndarray, "block 16"]) -> np.ndarray:
    return np.ascontiguousarray(hashes).view("V16").ravel()
