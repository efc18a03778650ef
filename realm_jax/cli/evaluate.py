"""Measures the results of each stage and writes report.html and report.json.

Recall@1, @5, @20 and @100 after the warm start, after REALM and after fine-tuning, and
before a warm start with BM25_WEIGHT, beside random blocks and BM25; exact match and F1,
also by topic and by what training had seen; where questions are lost, and the
calibration of p(y|x); masked spans with retrieval against the null document alone;
curves, examples with their sources, and what each stage recorded of its settings; every
mean with its 95 % interval.
predictions.jsonl has an answer for every question, by its id, with its scores;
`realm compare` puts two of them side by side. With FOLLOW it measures again whenever
the corpus has a later version, or a stage has ended with a later checkpoint, until
Ctrl-C.

A control is the same chain without REALM updates: its warm start was continued instead,
for the same time. With a control, the report shows the effect of REALM: recall and
exact match with and without it, and the differences, paired by question.
predictions_control.jsonl has the control's answers.

  realm evaluate RUN                            the folder of a chain
  realm evaluate RUN --questions=FILE           other questions, or none are recorded
  realm evaluate RUN --baselines=bm25,oracle    the same reader, other blocks

RUN is the folder of a chain, such as runs/quickstart, of which each finished stage is
measured, or a model that `realm finetune` has trained. Sizes, lengths and corpus are
those that the runs recorded, and the questions those that fine-tuning held out, else
those that `realm pretrain` was given. The report is in RUN/evaluate, or --output. All
devices are used; on several hosts start it on each, as a training stage. The
predictions do not depend on either.

Gin files may stand in place of RUN, with the settings below.

Example:
  realm evaluate --gin_file=gin/models/base.gin --gin_file=gin/runs/evaluate.gin \\
    --gin.MODEL_DIR=runs/my/evaluate --gin.CORPUS=runs/my/corpus \\
    --gin.QUESTIONS=questions.jsonl --gin.FINETUNED=runs/my/finetune
"""

import argparse
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gin import operative_config_str

from realm_jax import multihost
from realm_jax.cli import bert_settings, configuration, model_dir, recorded_run
from realm_jax.cli.progress import StageProgress
from realm_jax.run_record import Attempt

if TYPE_CHECKING:
    from realm_jax.evaluation.run import EvaluateConfig


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command; one that follows ordinarily ends by being stopped."""
    parser = _make_parser()
    flags = recorded_run.parse(parser, argv)
    from realm_jax.evaluation import run
    from realm_jax.evaluation.findings import verdicts
    from realm_jax.evaluation.report import HTML_NAME
    from realm_jax.evaluation.watch import follow

    multihost.join(configuration.configured_if_bound(multihost.HostsConfig), stop)
    if not flags.run:
        config = configuration.configured(run.EvaluateConfig)
        config = bert_settings.follow_weights(config)
        bert_settings.require_decided_remat()
    with StageProgress("evaluate", stop) as progress:
        if flags.run:
            config = _recorded(flags, progress.note)
        model_dir.require_writable_folder("MODEL_DIR", config.model_dir)
        # Settings that changed are no news: nothing of an earlier report is kept.
        attempt = Attempt("evaluate", config, argv, gin=operative_config_str)
        if config.follow:
            reports = follow(config, progress, stop)
        else:
            reports = [run.run(config, progress, stop)]
        for data in reports:
            # Not before: evaluation finds bad input while it measures.
            attempt.begin()
            for finding in verdicts(data):
                progress.note(finding.text)
            progress.note(f"the report is in {config.model_dir}/{HTML_NAME}")
            if config.follow:
                corpus = data.run.corpus
                progress.note(
                    f"that was {corpus.name} ({corpus.fingerprint[:12]}); waiting for "
                    "something newer, Ctrl-C ends it"
                )
    return 0 if config.follow else None


def _make_parser() -> argparse.ArgumentParser:
    parser = recorded_run.make_parser("realm evaluate", __doc__)
    parser.add_argument(
        "--questions", default="", metavar="FILE", help="JSON lines of questions"
    )
    parser.add_argument("--split", default="test", help="split of the questions")
    parser.add_argument(
        "--output", default="", metavar="FOLDER", help="folder for the report"
    )
    parser.add_argument(
        "--baselines",
        default="",
        metavar="NAMES",
        help="whose blocks the fine-tuned reader reads, too: of closed_book, random, "
        "bm25, hybrid, starting_point and oracle, with commas between them",
    )
    parser.add_argument(
        "--starting_point",
        default="",
        metavar="FOLDER",
        help="model directory of a warm start that left the retriever unchanged, or "
        "whose query tower learned from BM25, which is then as it began",
    )
    return parser


def _recorded(
    flags: argparse.Namespace, note: Callable[[str], None]
) -> "EvaluateConfig":
    from realm_jax.evaluation.recorded import evaluate_config

    return evaluate_config(
        flags.run,
        recorded_run.given(flags),
        questions=flags.questions,
        output=flags.output,
        split=flags.split,
        starting_point=flags.starting_point,
        baselines=tuple(filter(None, flags.baselines.split(","))),
        note=note,
    )
