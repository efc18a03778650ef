"""Trains retriever and span reader on questions, over a document index.

The index is that of the retriever before fine-tuning, or with REFRESH_MODE follows it.
With "async" run `realm build-index` beside it, on the same MODEL_DIR, as beside
`realm pretrain`. Resumes from the newest checkpoint of MODEL_DIR.

Example:
  realm finetune --gin_file=gin/models/base.gin --gin_file=gin/runs/finetune.gin \\
    --gin.MODEL_DIR=runs/my/finetune --gin.CORPUS=runs/my/corpus \\
    --gin.TASK=my_questions --gin.WARM_START=runs/my/pretrain
"""

import threading
from collections.abc import Sequence

from realm_jax.cli.stages import run_stage
from realm_jax.training import finetune


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    return run_stage("finetune", __doc__, argv, stop, finetune.run)
