"""Trains retriever and reader together on masked sentences (REALM).

With REFRESH_MODE="async" run `realm build-index` beside it, on the same MODEL_DIR: the
two exchange snapshots there. Resumes from the newest checkpoint of MODEL_DIR.

Example:
  realm pretrain --gin_file=gin/models/base.gin --gin_file=gin/runs/pretrain.gin \\
    --gin.MODEL_DIR=runs/my/pretrain --gin.CORPUS=runs/my/corpus \\
    --gin.TASK=my_salient --gin.WARM_START=runs/my/warm_start
"""

import threading
from collections.abc import Sequence

from realm_jax.cli.stages import run_stage
from realm_jax.training import pretrain


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    return run_stage("pretrain", __doc__, argv, stop, pretrain.run)
