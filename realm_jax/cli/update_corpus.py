"""Adds, replaces and deletes documents of a prepared corpus, as a new version of it.

Each line of CHANGES is {"id", "title", "text"}, which adds the document or replaces the
one with that id, or {"id", "deleted": true}. The new version is what `realm prepare`
would make of the changed text with the same vocabulary, chunk length and tagger, but
only changed documents are tokenized and tagged. CORPUS itself is kept, and records
OUTPUT as its successor. Examples refer to blocks by number and are not carried over:
see docs/data.md for how to make them again.

Any option of Beam may follow, such as --runner=DataflowRunner.

Example:
  realm update-corpus --gin_file=gin/runs/update_corpus.gin \\
    --gin.CORPUS=runs/my/corpus --gin.CHANGES=changes.jsonl \\
    --gin.OUTPUT=runs/my/corpus2
"""

import os
import threading
from collections.abc import Sequence

from realm_jax.cli import configuration
from realm_jax.cli.prepare import reporter
from realm_jax.cli.progress import StageProgress
from realm_jax.extras import require_extra


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    # As in `prepare`: TensorFlow reports every accelerator that it does not find.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    parser = configuration.make_parser("realm update-corpus", __doc__)
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes on this machine; one a core if left out",
    )
    flags, beam_flags = configuration.parse_known(parser, argv, "update-corpus")
    require_extra("prepare", "realm update-corpus")
    from realm_jax.prepare import update_corpus
    from realm_jax.prepare.scratch import Workers

    config = configuration.configured(update_corpus.UpdateConfig)
    with StageProgress("update-corpus", stop) as progress:
        workers = Workers(flags.workers, beam_flags)
        report = reporter(progress, stop)
        update = update_corpus.run(config, report, stop, workers)
        progress.note(
            f"documents: {update.added:,} added, {update.replaced:,} replaced, "
            f"{update.deleted:,} deleted; {update.new_blocks:,} blocks are new"
        )
        progress.note(
            f"done, {update.store.num_blocks:,} blocks in {config.output}, now the "
            f"successor of {config.corpus}; examples are not carried over"
        )
