"""Finds the blocks of a corpus that are nearest to a query, without reading them.

RUN is the folder of a chain, such as runs/quickstart, or of one of its models. The
retriever is that of the last stage that is there: fine-tuned, trained by REALM, or warm
started, and of a chain of `realm adapt` the one that was exported. So a text without a
single question can be searched, too. An index that is missing is made once, in the
model's folder. With --hybrid the result is fused with that of BM25, which finds rare
words: often the best search of a text of your own.

Queries come from the command line or, one a line, from standard input; at a terminal
without a query there is a prompt.

Example:
  realm search runs/quickstart "mausoleum of white marble" --k=3
  realm search runs/quickstart "mausoleum of white marble" --hybrid
  realm search runs/quickstart --json < queries.txt
"""

import argparse
import json
import threading
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realm_jax.answering.answers import Document
from realm_jax.api import Model, require_within
from realm_jax.cli import configuration, recorded_run
from realm_jax.cli.ask import block_text
from realm_jax.cli.standard_input import Notes, each_line, is_terminal
from realm_jax.evaluation.ask import require_question
from realm_jax.evaluation.searching import open_retriever

_DEFAULT_K = 5


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command, which ordinarily ends with the last query."""
    flags = _make_parser().parse_intermixed_args(argv)
    configuration.import_modules(flags)
    queries = [require_question(query) for query in flags.queries]
    note = Notes("search")
    retriever, corpus = open_retriever(flags.run, recorded_run.given(flags))
    k = min(_DEFAULT_K, corpus.num_blocks)
    if flags.k is not None:
        k = require_within(flags.k, corpus.num_blocks, "in the corpus")
    if not retriever.has_index(corpus):
        note(f"making the index of {corpus.directory}")
    index = retriever.index(corpus, stop)
    model = Model(retriever.corpus_search(corpus, index, batch_size=1))
    if flags.hybrid:
        note(f"counting the words of {corpus.num_blocks:,} blocks")
    echo = len(queries) > 1 or (not queries and not is_terminal())

    def search(query: str) -> None:
        found = model.search(query, k, hybrid=flags.hybrid)
        if flags.json:
            _print_json(query.strip(), found)
        else:
            _print_table(query.strip() if echo else "", found, flags.hybrid)

    for query in queries:
        if not stop.is_set():
            search(query)
    if not queries:
        each_line(search, stop, note, prompts=not flags.json)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = configuration.make_plain_parser("realm search", __doc__)
    parser.add_argument("run", metavar="RUN", help="a chain or a model")
    parser.add_argument("queries", nargs="*", default=[], metavar="QUERY")
    parser.add_argument(
        "--k",
        type=recorded_run.whole_number,
        metavar="N",
        help=f"blocks to print for each query; {_DEFAULT_K} by default",
    )
    parser.add_argument(
        "--hybrid", action="store_true", help="fuse it with what BM25 finds"
    )
    parser.add_argument(
        "--json", action="store_true", help="print an object a line for each query"
    )
    configuration.add_import_module(parser)
    recorded_run.add_options(parser)
    return parser


def _print_json(query: str, documents: Sequence[Document]) -> None:
    line = {"query": query, "documents": [one.as_json() for one in documents]}
    print(json.dumps(line, ensure_ascii=False), flush=True)


def _print_table(query: str, documents: Sequence[Document], is_hybrid: bool) -> None:
    console = Console()
    if query:
        console.print(Text(f"? {query}", style="bold cyan"))
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("fused" if is_hybrid else "f(x, z)", justify="right", no_wrap=True)
    table.add_column("block", ratio=1)
    for document in documents:
        block = block_text(document, Text(document.text))
        table.add_row(f"{document.score:.{4 if is_hybrid else 3}f}", block)
    console.print(table)
