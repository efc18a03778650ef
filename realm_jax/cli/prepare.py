"""Turns a corpus into blocks, salient spans and examples to train on.

Reads JSON lines with `title` and `text`, cuts articles into blocks of whole sentences,
tags names and dates once, and materialises the SeqIO tasks, so that nothing after this
needs TensorFlow. What is there already is kept.

Macros:
  CORPUS      folder to make
  SOURCE      JSON lines with `title` and `text`, plain or .gz
  NAME        of the corpus; tasks are NAME_ict, NAME_salient, NAME_questions
  QUESTIONS   JSON lines of questions, or ""
  VOCABULARY  a BERT vocab.txt, or "" to train one on the text
  TAGGER      "auto", "spacy", "rules" or "given"

Example:
  realm prepare --gin_file=gin/runs/prepare.gin --gin.CORPUS='"runs/my/corpus"' \\
    --gin.SOURCE='"articles.jsonl.gz"' --gin.NAME='"my"'
"""

import os
import sys
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.progress import StageProgress
from realm_jax.errors import StoppedError


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    # No accelerator is used here, and TensorFlow reports each one it cannot find as an
    # error; what really fails arrives as an exception.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    configuration.parse(configuration.make_parser("realm prepare", __doc__), argv)
    from tasks import prepare

    config = configuration.configured(prepare.PrepareConfig)
    with StageProgress("prepare", stop) as progress:

        def report(what: str, done: int, total: int | None) -> None:
            if stop.is_set():
                raise StoppedError(f"stopped while making {what}")
            progress(done, total, what=what)

        store = prepare.run(config, report)
        progress.note(
            f"done, {store.num_blocks:,} blocks in {store.vocabulary.size:,} "
            f"wordpieces, in {config.corpus}"
        )


if __name__ == "__main__":
    from realm_jax.cli.main import main as realm

    sys.exit(realm(["prepare", *sys.argv[1:]]))
