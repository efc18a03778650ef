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

import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.progress import StageProgress
from realm_jax.errors import StoppedError


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    configuration.parse(configuration.make_parser("realm prepare", __doc__), argv)
    from tasks import prepare

    config = configuration.configured(prepare.PrepareConfig)
    with StageProgress("prepare") as progress:

        def report(what: str, done: int, total: int | None) -> None:
            if stop.is_set():
                raise StoppedError(f"stopped while making {what}")
            progress(done, total, what=what)

        store = prepare.run(config, report)
        progress.note(
            f"{store.num_blocks:,} blocks, {store.vocabulary.size:,} wordpieces in the "
            f"vocabulary, in {config.corpus}"
        )
