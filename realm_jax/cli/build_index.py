"""Follows the newest retriever of a run and publishes an index for each refresh.

Runs beside `realm pretrain` with REFRESH_MODE="async", on the same MODEL_DIR, and ends
when the trainer has ended. Killed anywhere, it goes on with at most one shard redone.

Macros:
  MODEL_DIR   folder of the run
  CORPUS      the corpus the trainer trains on

Example:
  realm build-index --gin_file=gin/runs/build_index.gin \\
    --gin.MODEL_DIR='"runs/my/pretrain"' --gin.CORPUS='"runs/my/corpus"'
"""

import dataclasses
import logging
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.progress import StageProgress


@dataclasses.dataclass(frozen=True)
class BuildIndexConfig:
    """Which run to follow.

    Attributes:
      model_dir: folder or gs:// of the run.
      corpus: the prepared corpus.
    """

    model_dir: str
    corpus: str


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    configuration.parse(configuration.make_parser("realm build-index", __doc__), argv)
    from realm_jax.data.blocks import BlockStore
    from realm_jax.index.builder import BuilderConfig, IndexBuilder
    from realm_jax.storage import open_store

    logging.getLogger().setLevel(logging.INFO)
    config = configuration.configured(BuildIndexConfig)
    with StageProgress("build-index") as progress:
        IndexBuilder(
            open_store(config.model_dir),
            BlockStore.open(config.corpus),
            configuration.configured(BuilderConfig),
            progress,
        ).run(stop)
