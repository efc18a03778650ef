"""Trains retriever and reader together on masked sentences (REALM).

With REFRESH_MODE="async" run `realm build-index` beside it, on the same MODEL_DIR: the
two exchange snapshots there. Resumes from the newest checkpoint of MODEL_DIR.

Macros:
  MODEL_DIR        folder of the run
  CORPUS           prepared corpus
  TASK             masked sentences, e.g. "my_salient"
  WARM_START       model directory of `realm warm-start`
  RETRIEVER_WARM_START, READER_WARM_START
                   source of one model alone instead, or ""
  REFRESH_MODE     "async", "blocking", "rolling" or "off"
  REFRESH_PERIOD   steps between two indexes
  MAX_STALENESS_STEPS, WHEN_STALE
                   maximum age of an index, and then "wait", "warn" or "stop"
  SEARCHER         "device" (inside the step) or "scann" (on the host)
  QUESTIONS        held-out questions for recall@5 at every refresh, or ""
  HELD_OUT_EXAMPLES
                   validation sentences to predict at every refresh; 0 for none. The
                   checkpoint with the highest utility on them is kept as the best
  MICROBATCHES     parts of a batch that are computed one after the other
  PACK_DOCUMENTS   True lets two documents share a row, for a corpus of short blocks
  SKIP_NONFINITE_UPDATES
                   updates that may be skipped because they are not finite
  NUM_CANDIDATES, TRAIN_STEPS, BATCH_SIZE, SEED

Example:
  realm pretrain --gin_file=gin/models/base.gin --gin_file=gin/runs/pretrain.gin \\
    --gin.MODEL_DIR=runs/my/pretrain --gin.CORPUS=runs/my/corpus \\
    --gin.TASK=my_salient --gin.WARM_START=runs/my/warm_start
"""

import sys
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.stages import run_stage


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    from realm_jax.cli.builder_watch import watched_builder
    from realm_jax.training import pretrain

    return run_stage(
        "pretrain",
        __doc__,
        argv,
        stop,
        pretrain.PretrainConfig,
        pretrain.run,
        lambda config, progress: watched_builder(
            config, progress, configuration.gin_files(argv)
        ),
    )


if __name__ == "__main__":
    from realm_jax.cli.main import console

    console(["pretrain", *sys.argv[1:]])
