"""Measures the index at size: search, recall, embedding, refresh, cost of a builder.

    python -m bench.index --output index.json
    python -m bench.index --corpus runs/my/corpus --retriever .cache/data/minilm-l6 \
        --questions dev.jsonl --folder runs/bench --output index.json
    python -m bench.index --markdown index.json

Parts: `search` (needs FAISS: the extra `export`), `recall` (on real text; needs
--corpus, --retriever and --questions), `embed`, `publish`, `trainer` and `size` (two
cores; `size` measures a trainer with ScaNN). All parts run whose requirements are met.
The result is one JSON object, written after every part; --markdown prints the tables
of docs/benchmarks.md.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import index_tables
from bench.command import make_parser, write_figures
from bench.index_embeddings import EmbeddingFiles, invent
from bench.index_search import SEARCHERS, measure_searchers
from bench.machine import machine, today
from realm_jax.errors import BadInputError

# Each process that searches imports this file to find its function, so what needs JAX
# is imported by the part that needs it.

_MODELS = ("tiny", "mini", "minilm", "toy")
# Above this number of rows only one process searches at a time: they fill the memory.
_MOST_IN_TURNS = 2_000_000
# Each repetition takes tens of seconds.
_EMBED_REPETITIONS = 3
_INVENTED_BLOCKS = 8192
_MEAN_WORDPIECES = 150

Folder = pathlib.Path


def measure_search(arguments: argparse.Namespace, folder: Folder) -> list[Any]:
    """Measures every searcher on corpora of every size."""
    if arguments.embeddings:
        files = EmbeddingFiles(arguments.embeddings, arguments.queries, "given")
        return [measure_searchers(files, arguments, in_turns=True)]
    measured = []
    for num_blocks in arguments.blocks:
        in_turns = num_blocks <= _MOST_IN_TURNS
        files = invent(folder, num_blocks, max(arguments.batches))
        measured.append(measure_searchers(files, arguments, in_turns=in_turns))
        pathlib.Path(files.blocks).unlink()
    return measured


def measure_recall(arguments: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    """Measures every searcher on embeddings of real text, with real questions."""
    from bench.index_corpus import embed_corpus

    files, speed = embed_corpus(
        folder,
        arguments.corpus,
        arguments.retriever,
        arguments.questions,
        document_length=arguments.document_length,
        num_queries=max(arguments.batches),
    )
    measured = measure_searchers(files, arguments, in_turns=True)
    return {**measured, "embedded_blocks_per_second": speed}


def measure_embed(arguments: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    """Measures blocks per second with and without length buckets, for every model."""
    from bench.index_embed import invent_blocks, measure_embedding
    from realm_jax.data.blocks import BlockStore

    if arguments.corpus:
        store = BlockStore.open(arguments.corpus)
    else:
        store = invent_blocks(
            folder / "embedded",
            _INVENTED_BLOCKS,
            _MEAN_WORDPIECES,
            arguments.document_length,
        )
    return {
        model: measure_embedding(
            store,
            model,
            document_length=arguments.document_length,
            repetitions=min(_EMBED_REPETITIONS, arguments.repetitions),
        )
        for model in arguments.models
    }


def measure_publish(arguments: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    """Measures the time from the builder's commit to the trainer's swap."""
    from bench.index_refresh import measure_publishing

    return measure_publishing(arguments, folder)


def measure_trainer(arguments: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    """Measures steps per second with and without a builder on another core."""
    from bench.index_refresh import measure_beside_builder

    return measure_beside_builder(arguments, folder)


def measure_size(arguments: argparse.Namespace, folder: Folder) -> list[Any]:
    """Measures seconds per step over indexes of every size, with ScaNN."""
    from bench.index_refresh import measure_sizes

    return measure_sizes(arguments, folder)


PARTS: dict[str, Callable[[argparse.Namespace, Folder], Any]] = {
    "search": measure_search,
    "recall": measure_recall,
    "embed": measure_embed,
    "publish": measure_publish,
    "trainer": measure_trainer,
    "size": measure_size,
}


def _missing(part: str, arguments: argparse.Namespace) -> str:
    """Describes what a part requires and lacks, "" if nothing."""
    searches = part in ("search", "recall")
    of_faiss = any(name.startswith("faiss") for name in arguments.searchers)
    if searches and of_faiss and importlib.util.find_spec("faiss") is None:
        return "FAISS; install the extra `export`, or choose other --searchers"
    if part == "recall" and not (
        arguments.corpus and arguments.retriever and arguments.questions
    ):
        return "--corpus, --retriever and --questions"
    if part in ("publish", "trainer", "size") and len(os.sched_getaffinity(0)) < 2:
        return "two cores, one for the trainer and one beside it"
    return ""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts and writes the result after each."""
    measured: dict[str, Any] = {
        "date": today(),
        "machine": machine(),
        "command": "python -m bench.index " + " ".join(sys.argv[1:]),
        # Load of the machine before each part, for judging the result.
        "load_before": {},
        "minutes": {},
    }
    lacking = {part: _missing(part, arguments) for part in arguments.parts or PARTS}
    for part, what in lacking.items():
        if what and arguments.parts:
            raise BadInputError(f"expected what `{part}` needs: {what}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        for part in [part for part, what in lacking.items() if not what]:
            folder = arguments.folder if part == "recall" else None
            began = time.monotonic()
            measured["load_before"][part] = os.getloadavg()[0]
            measured[part] = PARTS[part](arguments, Folder(folder or scratch))
            measured["minutes"][part] = (time.monotonic() - began) / 60
            if arguments.output:
                write_figures(arguments.output, measured)
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--markdown", metavar="JSON", help="print the tables of a result, and no more")
    add("--output", help="write the JSON object here")
    add("--folder", help="keeps the embeddings of `recall`; scratch for the rest")
    add("--parts", nargs="+", choices=list(PARTS))
    add("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    add("--searchers", nargs="+", default=list(SEARCHERS), choices=list(SEARCHERS))
    add("--batches", type=int, nargs="+", default=[64, 512])
    add("--repetitions", type=int, default=5)
    add("--embeddings", default="", help="of `search`: .npy, instead of invented ones")
    add("--queries", default="", help="of `search`: .npy, with --embeddings")
    add("--corpus", default="", help="of `recall` and `embed`: a prepared corpus")
    add("--retriever", default="", help="of `recall`: BERT's weights, or a MODEL_DIR")
    add("--questions", nargs="+", default=[], help="of `recall`: JSON lines")
    add("--document_length", type=int, default=288)
    add("--models", nargs="+", default=["tiny", "mini", "minilm"], choices=_MODELS)
    # Of `publish`, `trainer` and `size`: that of both towers and the reader.
    add("--model", default="tiny", choices=_MODELS)
    # In the indexes whose transfer is measured.
    add("--publish_blocks", type=int, default=100_000)
    add("--num_swaps", type=int, default=6)
    # What the builder embeds beside the trainer.
    add("--trained_blocks", type=int, default=50_000)
    # How long the builder runs, and then is stopped; and how often.
    add("--phase_seconds", type=float, default=15.0)
    add("--num_pairs", type=int, default=5)
    add("--num_steps", type=int, default=60)
    return parser


def main(command_line: Sequence[str] | None = None) -> None:
    """Runs the measurements, or prints a result."""
    parser = _parser()
    arguments = parser.parse_args(command_line)
    if arguments.markdown:
        measured = json.loads(pathlib.Path(arguments.markdown).read_text())
        print(index_tables.markdown(measured))
        return
    try:
        print(json.dumps(run(arguments), indent=1))
    except BadInputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
