"""Trains and stores ScaNN's tree and codes as files of an index snapshot.

Training takes minutes at full size. The builder trains once, measures the recall
against exact search, and records it in the manifest; trainers only load the files.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from realm_jax import ranges
from realm_jax.index.manifest import Manifest
from realm_jax.index.scann_searcher import (
    LowRecallError,
    ScannConfig,
    ScannSearcher,
    share_found,
)
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.snapshot_writer import SnapshotWriter
from realm_jax.index.snapshots import SnapshotSeries

FOLDER = "scann"
RECALL = "scann_recall_at_8"
"""Key in an index's metadata: share of the 8 best blocks that ScaNN finds."""

_K = 8
# How many times as many neighbours questions miss as beginnings of blocks do: twice as
# many in docs/benchmarks.md, and a margin.
_MISSED_BY_QUESTIONS = 2.5


@dataclasses.dataclass(frozen=True)
class ScannAssets:
    """Configuration of a builder for `SEARCHER="scann"`.

    Attributes:
      config: configuration of the tree and its codes.
      min_recall: recall of the 8 best blocks below which no index is published.
      num_queries: number of queries; a search is chosen on half of them, and its recall
        is measured on the others.
    """

    config: ScannConfig = dataclasses.field(default_factory=ScannConfig)
    min_recall: float = 0.95
    num_queries: int = 1024

    def __post_init__(self):
        ranges.require_ranges(
            self, min_recall=ranges.SHARE, num_queries=ranges.whole(2)
        )

    def recall_of_beginnings(self) -> float:
        """Returns the recall to ask for, so that questions have `config.recall`.

        The queries at hand are beginnings of blocks, which miss fewer neighbours.
        """
        return 1 - (1 - self.config.recall) / _MISSED_BY_QUESTIONS


def write_assets(
    writer: SnapshotWriter,
    embeddings: Float[np.ndarray, "block projection"],
    queries: Float[np.ndarray, "query projection"],
    assets: ScannAssets,
) -> Mapping[str, float]:
    """Trains ScaNN on an index, writes its tree and codes, and returns its recall.

    A LowRecallError is raised if that is below `assets.min_recall`.
    """
    # Before the training, so that one copy of the rows at a time is in memory.
    exact = DeviceSearcher(embeddings, writer.step).search(queries, _K).ids
    exact = np.asarray(exact)
    searcher = ScannSearcher(embeddings, writer.step, assets.config)
    searcher.tune(queries[1::2], exact[1::2], assets.recall_of_beginnings())
    found = np.asarray(searcher.search(queries[::2], _K).ids)
    recall = share_found(found, exact[::2])
    if recall < assets.min_recall:
        raise LowRecallError(
            f"expected ScaNN to find {assets.min_recall:.0%} of the {_K} best blocks "
            f"of step {writer.step}, it finds {recall:.1%}; raise ScannConfig.recall, "
            "or lower ScannAssets.min_recall."
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / FOLDER
        searcher.save(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(scratch).as_posix()
                writer.write_file(name, path.read_bytes())
    return {RECALL: recall}


def load_assets(series: SnapshotSeries, manifest: Manifest) -> ScannSearcher | None:
    """Returns the searcher stored in a snapshot, None if there is none."""
    names = [name for name in manifest.files if name.startswith(f"{FOLDER}/")]
    if not names:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            path = pathlib.Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(series.read_file(manifest, name))
        return ScannSearcher.load(pathlib.Path(scratch) / FOLDER)
