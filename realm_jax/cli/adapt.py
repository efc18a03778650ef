"""Adapts a sentence encoder to a text, without a question.

TEXT is JSON lines with title and text (or BEIR's corpus.jsonl), or a folder of text or
Markdown files; both may be gzipped. The command prepares it, teaches the encoder what
BM25 knows of its words, and a reader to read, trains both together by REALM with an
index builder beside them, measures the encoder before and after each, and writes the
best to DIR/export for sentence-transformers. It ends with three lines: what was gained,
what it cost, and what was exported. Ctrl-C stops it at a safe point, and the same
command goes on.

What is measured is in DIR/adapt.json: whether held-out sentences find the blocks around
their own and, with --queries, how well these are answered. Nothing is trained on
queries or judgements.

Example:
  realm adapt articles.jsonl --output=runs/my
  realm search runs/my "white marble"
"""

import argparse
import dataclasses
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from realm_jax.cli import configuration, recorded_run
from realm_jax.cli.init import (
    CHAIN_NAME,
    add_encoder_flags,
    corpus_name,
    read_encoder_start,
)
from realm_jax.cli.progress import StageProgress
from realm_jax.cli.standard_input import Notes
from realm_jax.errors import BadInputError

if TYPE_CHECKING:
    from realm_jax.data.judgements import JudgedQuery
    from realm_jax.prepare.adapt_chain import AdaptChain
    from realm_jax.prepare.encoder_start import EncoderStart

EXPORT_NAME = "export"
# As the quickstart has.
_UPDATES = 24
_LOOK_SECONDS = 0.2


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command; a chain that fails ends it with the chain's exit code."""
    flags = _parser().parse_args(argv)
    if flags.qrels and not flags.queries:
        raise BadInputError(
            "expected --queries beside --qrels, got none; give the file of the queries"
        )
    if flags.updates < 1:
        raise BadInputError(
            f"expected at least 1 as --updates, got {flags.updates}; give a number of "
            "updates, or leave it out"
        )
    if "://" in flags.output:
        raise BadInputError(
            f"expected a local folder as --output, got {flags.output}; adapt to one, "
            "and copy what it exports"
        )
    chain, queries = _plan(flags, stop)
    path = pathlib.Path(chain.root, CHAIN_NAME)
    _write_chain(path, chain.gin_file())
    for line in chain.description():
        print(line, flush=True)
    code = _run_chain(path, stop)
    if stop.is_set():
        return None
    if code:
        return code
    report = _measured(chain, queries, stop)
    export = _exported(chain.root, report["exported"], stop)
    from realm_jax.evaluation.adapt_report import summary

    for line in summary(report, chain.root, export):
        print(line)
    return None


def _plan(
    flags: argparse.Namespace, stop: threading.Event
) -> "tuple[AdaptChain, list[JudgedQuery]]":
    """Reads the text, the encoder and the judgements; writes nothing."""
    from realm_jax.data.judgements import read_judgements
    from realm_jax.prepare import adapt_chain, first_chain
    from realm_jax.prepare.text_sample import TextSample, choose_masks

    encoder = _require_encoder(read_encoder_start(flags))
    vocabulary = encoder.vocabulary
    sample = TextSample.read(flags.text, stop)
    survey = adapt_chain.Survey.read(flags.text, stop)
    text = first_chain.measure_text(flags.text, sample)
    fit = sample.fit(vocabulary)
    text = dataclasses.replace(text, characters_per_piece=fit.characters_per_piece)
    text = adapt_chain.require_enough(flags.text, text, survey)
    first_chain.require_known(
        fit,
        encoder.vocabulary_file,
        "the text to `realm init`, for a model from nothing",
    )
    queries = []
    if flags.queries:
        queries = read_judgements(flags.queries, flags.qrels, survey.ids)
    else:
        adapt_chain.require_measurable(flags.text, survey, vocabulary)
    chain = adapt_chain.AdaptChain(
        root=flags.output.rstrip("/"),
        name=corpus_name(pathlib.Path(flags.output)),
        source=flags.text,
        text=text,
        masks=choose_masks(sample, text.validation_fraction),
        questions=None,
        encoder=encoder,
        fit=fit,
        survey=survey,
        updates=flags.updates,
    )
    return chain, queries


def _require_encoder(encoder: "EncoderStart | None") -> "EncoderStart":
    if encoder is None:
        raise BadInputError(
            "expected an encoder to adapt, found none; fetch MiniLM's weights with "
            "`make data`, or give --weights=FOLDER of a BERT"
        )
    return encoder


def _write_chain(path: pathlib.Path, text: str) -> None:
    """Writes the chain file, or checks that it is there as an earlier call wrote it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif path.read_text() != text:
        raise BadInputError(
            f"expected the text, encoder and settings that {path} was written for, got "
            "others; repeat the command that began there, or give another --output"
        )


def _run_chain(path: pathlib.Path, stop: threading.Event) -> int:
    """Runs the chain as a process of its own; returns its exit code.

    It hears of Ctrl-C at a terminal by itself, and of what else asks to stop from here.
    """
    program = [sys.executable, "-m", "tpu_launch", "local", f"--gin_file={path}"]
    with subprocess.Popen(program) as process:
        while (code := process.poll()) is None:
            if stop.wait(_LOOK_SECONDS):
                process.terminate()
                code = process.wait()
    return code if code >= 0 else 128 - code


def _measured(
    chain: "AdaptChain", queries: "list[JudgedQuery]", stop: threading.Event
) -> dict[str, Any]:
    """Returns the report of a chain that is done, and writes it."""
    from realm_jax.data.blocks import BlockStore
    from realm_jax.evaluation import adapt_report, adaptation
    from realm_jax.evaluation.comparisons import AFTER_REALM, BEFORE_TRAINING
    from realm_jax.evaluation.recorded import find_model
    from realm_jax.evaluation.searching import PretrainedRetriever

    began = time.monotonic()
    corpus = BlockStore.open(f"{chain.root}/corpus", verify=True)
    retrievers = {
        label: PretrainedRetriever.open(
            find_model(f"{chain.root}/{stage.name}", [stage]),
            before_training=label == BEFORE_TRAINING,
        )
        for label, stage in adapt_report.STAGES_OF.items()
    }
    realm = retrievers[AFTER_REALM]
    of = {
        "corpus": corpus.fingerprint,
        "updates": realm.run.step,
        "queries": [dataclasses.asdict(query) for query in queries],
    }
    found = adapt_report.read_report(chain.root)
    if found is not None and found["of"] == of:
        return found
    length = realm.models.lengths.query
    probes = [adaptation.queries_probe(corpus, queries, length)] if queries else []
    if sentences := adaptation.sentences_probe(corpus, chain.task):
        probes.append(sentences)
    with StageProgress("adapt", stop, Console(stderr=True)) as progress:
        measured = adaptation.measure(
            retrievers,
            corpus,
            probes,
            stop,
            note=progress.note,
            show=lambda done, total, what: progress(done, total, what=what),
        )
    seconds, size = time.monotonic() - began, _largest_process()
    report = adapt_report.make_report(
        measured, chain.root, of, seconds=seconds, bytes=size
    )
    # An earlier one may be of another stage.
    shutil.rmtree(f"{chain.root}/{EXPORT_NAME}", ignore_errors=True)
    adapt_report.write_report(chain.root, report)
    return report


def _largest_process() -> int:
    """Returns the bytes that this process, or one of the chain, has needed at most."""
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return 1024 * max(resource.getrusage(user).ru_maxrss for user in users)


def _exported(root: str, chosen: str, stop: threading.Event) -> str:
    """Exports the retriever that was chosen, unless it was; returns the folder."""
    from realm_jax.evaluation.adapt_report import STAGES_OF
    from realm_jax.evaluation.comparisons import BEFORE_TRAINING
    from realm_jax.evaluation.export import export_retriever
    from realm_jax.evaluation.recorded import Overrides

    folder = os.path.join(root, EXPORT_NAME)
    if not os.path.isdir(folder):
        export_retriever(
            # By its own folder: a chain may have been fine-tuned since.
            f"{root}/{STAGES_OF[chosen].name}",
            folder,
            Overrides(),
            before_training=chosen == BEFORE_TRAINING,
            embeddings=("npy",),
            stop=stop,
            note=Notes("adapt"),
        )
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm adapt", __doc__)
    parser.add_argument(
        "text", metavar="TEXT", help="a file of JSON lines, or a folder"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="of the chain and its results"
    )
    parser.add_argument(
        "--queries",
        default="",
        metavar="FILE",
        help="queries to measure with: JSON lines with _id and text, as BEIR has them, "
        "or with id, question and gold_ids",
    )
    parser.add_argument(
        "--qrels",
        default="",
        metavar="FILE",
        help="their judgements: query, document and grade, tab-separated",
    )
    add_encoder_flags(parser, "by default MiniLM's, which `make data` fetches")
    parser.add_argument(
        "--updates",
        type=recorded_run.whole_number,
        default=_UPDATES,
        metavar="N",
        help=f"of REALM; {_UPDATES} by default",
    )
    return parser
