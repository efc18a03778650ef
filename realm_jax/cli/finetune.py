"""Trains query tower and span reader on questions, over the frozen document index.

Resumes from the newest checkpoint of MODEL_DIR.

Macros:
  MODEL_DIR    folder of the run
  CORPUS       prepared corpus
  TASK         questions, e.g. "my_questions"
  WARM_START   model directory of `realm pretrain`
  CHECKPOINT   checkpoint of WARM_START: "last", or "best" by held-out utility
  RETRIEVER_WARM_START, READER_WARM_START
               source of one model alone instead, or ""
  QUESTIONS    held-out questions by which a checkpoint is chosen, or "" for the last
  QUESTIONS_SPLIT, MAX_QUESTIONS, EVALUATION_PERIOD
               their split, how many of them, and updates between two measurements
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

from realm_jax.cli.stages import run_stage


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    from realm_jax.training import finetune

    return run_stage(
        "finetune", __doc__, argv, stop, finetune.FinetuneConfig, finetune.run
    )


if __name__ == "__main__":
    from realm_jax.cli.main import console

    console(["finetune", *sys.argv[1:]])
