"""Trains retriever and reader together on masked sentences (REALM).

With REFRESH_MODE="async" run `realm build-index` beside it, on the same MODEL_DIR: the
two meet through snapshots there. Resumes from the newest checkpoint of MODEL_DIR.

Macros:
  MODEL_DIR        folder of the run
  CORPUS           prepared corpus
  TASK             masked sentences, e.g. "my_salient"
  WARM_START       model directory of `realm warm-start`
  REFRESH_MODE     "async", "blocking" or "off"
  REFRESH_PERIOD   steps between two indexes
  SEARCHER         "device" (exact) or "scann"
  QUESTIONS        held-out questions for recall@5 at every refresh, or ""
  NUM_CANDIDATES, TRAIN_STEPS, BATCH_SIZE, SEED

Example:
  realm pretrain --gin_file=gin/models/base.gin --gin_file=gin/runs/pretrain.gin \\
    --gin.MODEL_DIR='"runs/my/pretrain"' --gin.CORPUS='"runs/my/corpus"' \\
    --gin.TASK='"my_salient"' --gin.WARM_START='"runs/my/warm_start"'
"""

import threading
from collections.abc import Sequence

from realm_jax.cli.stages import run_stage


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    from realm_jax.training import pretrain

    run_stage("pretrain", __doc__, argv, stop, pretrain.PretrainConfig, pretrain.run)
