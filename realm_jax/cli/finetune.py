"""Trains retriever and span reader on questions, over a document index.

The index is that of the retriever before fine-tuning, or with REFRESH_MODE follows it.
With "async" run `realm build-index` beside it, on the same MODEL_DIR, as beside
`realm pretrain`. Resumes from the newest checkpoint of MODEL_DIR.

Macros:
  MODEL_DIR    folder of the run
  CORPUS       prepared corpus
  TASK         questions, e.g. "my_questions"
  MORE_TASKS   other questions mixed with them, e.g. {"trec_questions": 0.2}
  WARM_START   model directory of `realm pretrain`, or of `realm warm-start` for ORQA,
               which is fine-tuned from the inverse cloze task alone
  CHECKPOINT   checkpoint of WARM_START: "last", or "best" by held-out utility
  RETRIEVER_WARM_START, READER_WARM_START
               source of one model alone instead, or ""
  QUESTIONS    held-out questions by which a checkpoint is chosen, or "" for the last
  QUESTIONS_SPLIT, MAX_QUESTIONS, EVALUATION_PERIOD
               their split, how many of them, and updates between two measurements
  EARLY_STOPPING
               measurements without a better one after which training ends, or None
  REFRESH_MODE "off", "blocking" or "async"
  REFRESH_PERIOD
               updates between two indexes
  NUM_EMBEDDED best blocks through which the document tower is trained; 0: it is not
  NUM_READ, TRAIN_NUM_READ
               blocks that are read for an answer, and in an update; None: as many
  SEARCHER     "device" (exact) or "scann"
  SKIP_NONFINITE_UPDATES
               updates that may be skipped because they are not finite
  TRAIN_STEPS, BATCH_SIZE, SEED

Example:
  realm finetune --gin_file=gin/models/base.gin --gin_file=gin/runs/finetune.gin \\
    --gin.MODEL_DIR=runs/my/finetune --gin.CORPUS=runs/my/corpus \\
    --gin.TASK=my_questions --gin.WARM_START=runs/my/pretrain
"""

import sys
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.stages import run_stage


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    from realm_jax.cli.builder_watch import watched_builder
    from realm_jax.training import finetune

    return run_stage(
        "finetune",
        __doc__,
        argv,
        stop,
        finetune.FinetuneConfig,
        finetune.run,
        lambda config, progress: watched_builder(
            config, progress, configuration.gin_files(argv)
        ),
    )


if __name__ == "__main__":
    from realm_jax.cli.main import console

    console(["finetune", *sys.argv[1:]])
