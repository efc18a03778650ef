"""Starts the retriever with the inverse cloze task and the reader with masked LM.

Both are needed before REALM: a retriever that finds nothing and a reader that cannot
copy give each other no training signal. Without TASK only the retriever is trained,
without PAIRS_TASK only the reader; the other model is left unchanged. Resumes from the
newest checkpoint of MODEL_DIR.

Example:
  realm warm-start --gin_file=gin/models/base.gin --gin_file=gin/runs/warm_start.gin \\
    --gin.MODEL_DIR=runs/my/warm_start --gin.CORPUS=runs/my/corpus \\
    --gin.TASK=my_salient --gin.PAIRS_TASK=my_ict
"""

import threading
from collections.abc import Sequence

from realm_jax.cli.stages import run_stage
from realm_jax.training import warm_start


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    return run_stage("warm-start", __doc__, argv, stop, warm_start.run)
