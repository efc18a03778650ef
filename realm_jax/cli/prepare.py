"""Turns a corpus into blocks, salient spans and examples to train on.

Reads documents, cuts them into blocks of whole sentences, tags names and dates once,
and materialises the SeqIO tasks, so that no later stage needs TensorFlow. Apache Beam
distributes the work; the output does not depend on how. Existing parts are kept, and a
killed run is resumed.

Any option of Beam may follow, such as --runner=DataflowRunner.

Example:
  realm prepare --gin_file=gin/runs/prepare.gin --gin.CORPUS=runs/my/corpus \\
    --gin.SOURCE=articles.jsonl.gz --gin.NAME=my
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from realm_jax.cli import configuration
from realm_jax.cli.progress import StageProgress
from realm_jax.errors import StoppedError
from realm_jax.extras import require_extra


def main(argv: Sequence[str], stop: threading.Event) -> None:
    """Runs the command."""
    # No accelerator is used here, and TensorFlow reports each one it cannot find as an
    # error; real failures are raised as exceptions.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    parser = configuration.make_parser("realm prepare", __doc__)
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes on this machine; if left out one a core, for small corpora one",
    )
    parser.add_argument(
        "--max_bad_lines",
        type=int,
        default=0,
        metavar="N",
        help="damaged records to leave out, and count, before giving up",
    )
    flags, beam_flags = configuration.parse_known(parser, argv, "prepare")
    require_extra("prepare", "realm prepare")
    from realm_jax.data.questions import read_questions, unknown_titles
    from realm_jax.prepare import prepare
    from realm_jax.prepare.scratch import Workers

    config = configuration.configured(prepare.PrepareConfig)
    config = dataclasses.replace(
        config, modules=(*config.modules, *flags.import_module)
    )
    with StageProgress("prepare", stop) as progress:
        report = reporter(progress, stop)
        workers = Workers(flags.workers, beam_flags, flags.max_bad_lines)
        store = prepare.run(config, report, stop, workers)
        for line in summary(store.info):
            progress.note(line)
        if config.questions:
            unknown = unknown_titles(store, read_questions(config.questions))
            if unknown:
                progress.note(f"warning: {unknown}")
        progress.note(
            f"done, {store.num_blocks:,} blocks in {store.vocabulary.size:,} "
            f"wordpieces, in {config.corpus}"
        )


def reporter(
    progress: StageProgress, stop: threading.Event
) -> Callable[[str, int, int | None], None]:
    """Returns what shows how much of what is made, and ends the command on request."""

    def report(what: str, done: int, total: int | None) -> None:
        if stop.is_set():
            raise StoppedError(f"stopped while making {what}")
        progress(done, total, what=what)

    return report


def summary(info: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines on records that were left out or changed; none if there are none."""
    counts = info.get("summary", {})
    said = {
        "without text, left out": counts.get("without_text"),
        "without a title": counts.get("without_title"),
        "with a title longer than half a block, shortened": counts.get(
            "shortened_titles"
        ),
        "cuts in sentences longer than a block": counts.get("divisions"),
        "wordpieces of words longer than a block, not read": counts.get(
            "unread_pieces"
        ),
        "damaged, left out": counts.get("bad_records"),
        **counts.get("left_out", {}),
        "blocks that are the same as another": info.get("num_duplicate_blocks"),
    }
    parts = [f"{count:,} {what}" for what, count in said.items() if count]
    if parts:
        yield f"{counts.get('documents', 0):,} documents; {'; '.join(parts)}"
    for where, reason in counts.get("first_bad", ()):
        yield f"left out {where}: {reason}"
