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

from realm_jax.errors import BadInputError
from realm_jax.index.manifest import Manifest
from realm_jax.index.searchers import DeviceSearcher, ScannConfig, ScannSearcher
from realm_jax.index.snapshot_writer import SnapshotWriter
from realm_jax.index.snapshots import SnapshotSeries

FOLDER = "scann"
RECALL = "scann_recall_at_8"
"""Key in an index's metadata: share of the 8 best blocks that ScaNN finds."""

_K = 8


class LowRecallError(BadInputError):
    """Raised when ScaNN's recall against exact search is too low."""


@dataclasses.dataclass(frozen=True)
class ScannAssets:
    """Configuration of a builder for `SEARCHER="scann"`.

    Attributes:
      config: configuration of the tree and its codes.
      min_recall: recall of the 8 best blocks below which no index is published.
      num_queries: number of queries on which recall is measured.
    """

    config: ScannConfig = dataclasses.field(default_factory=ScannConfig)
    min_recall: float = 0.95
    num_queries: int = 256


def write_assets(
    writer: SnapshotWriter,
    embeddings: Float[np.ndarray, "block projection"],
    queries: Float[np.ndarray, "query projection"],
    assets: ScannAssets,
) -> Mapping[str, float]:
    """Trains ScaNN on an index, and writes its tree and codes to the snapshot.

    Args:
      writer: writer of the snapshot.
      embeddings: all embeddings of the index.
      queries: queries embedded by the query tower.
      assets: configuration of training and evaluation.

    Returns:
      The measured recall, for the manifest.

    Raises:
      LowRecallError: the recall is below `assets.min_recall`.
      BadInputError: the disk is full.
    """
    searcher = ScannSearcher(embeddings, writer.step, assets.config)
    found = searcher.search(queries, _K).ids
    exact = DeviceSearcher(embeddings, writer.step).search(queries, _K).ids
    recall = float(
        np.mean([np.isin(e, f).mean() for e, f in zip(exact, found, strict=True)])
    )
    if recall < assets.min_recall:
        raise LowRecallError(
            f"expected ScaNN to find {assets.min_recall:.0%} of the {_K} best blocks "
            f"of step {writer.step}, it finds {recall:.1%}; raise "
            "ScannConfig.searched_share or ScannConfig.reordered."
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
    """Returns the searcher stored in a snapshot, None if there is none.

    Raises:
      DamagedSnapshotError: a file is missing or was changed.
    """
    names = [name for name in manifest.files if name.startswith(f"{FOLDER}/")]
    if not names:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            path = pathlib.Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(series.read_file(manifest, name))
        return ScannSearcher.load(pathlib.Path(scratch) / FOLDER)
