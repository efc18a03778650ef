"""Measures the fusion of a retriever with BM25, by the weight of BM25.

    python -m bench.hybrid RUN --queries queries.jsonl [--qrels test.tsv] \\
        --page docs/adapt.md

RUN is a chain or a model, as `realm search` takes it, and the queries are those of
`realm adapt`. Differences from the retriever alone are paired, with 95 % intervals.
"""

import threading

import numpy as np

from bench.command import (
    command_line,
    make_parser,
    one_line_errors,
    publish,
    require_room,
)
from bench.machine import machine, today
from bench.tables import table
from realm_jax.answering.hybrid import DEPTH, BM25Index, fuse
from realm_jax.data.judgements import read_judgements
from realm_jax.evaluation import adaptation
from realm_jax.evaluation.recorded import Overrides
from realm_jax.evaluation.searching import open_retriever
from realm_jax.metrics.retrieval import (
    bootstrap_interval,
    paired_bootstrap_difference,
)
from realm_jax.types import NULL_BLOCK

METRIC = "nDCG@10"
WEIGHTS = (0.0, 0.3, 0.5, 0.7, 1.0)


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("run", metavar="RUN", help="a chain or a model")
    parser.add_argument("--queries", required=True, help="queries to search with")
    parser.add_argument("--qrels", default="", help="their judgements")
    flags = parser.parse_args()
    require_room("hybrid", flags)
    retriever, corpus = open_retriever(flags.run, Overrides())
    sources = {text.source_id for text in corpus.texts(np.arange(corpus.num_blocks))}
    queries = read_judgements(flags.queries, flags.qrels, sources)
    probe = adaptation.queries_probe(corpus, queries, retriever.models.lengths.query)
    index = retriever.index(corpus, threading.Event())
    search = retriever.corpus_search(corpus, index, batch_size=32)
    depth = min(DEPTH, corpus.num_blocks)
    retrieved = np.asarray(search.search(probe.ids, depth).ids)
    by_words = np.asarray(BM25Index(corpus).search(probe.texts, depth).ids)
    everything = range(len(probe.texts))

    def judge(first: np.ndarray, weight: float) -> np.ndarray:
        most = min(2 * depth, corpus.num_blocks)
        found = fuse(first, by_words, most, bm25_weight=weight)
        scores = np.full((len(first), corpus.num_blocks), -np.inf, np.float32)
        for row, ids, of_ids in zip(scores, found.ids, found.scores, strict=True):
            row[ids[ids != NULL_BLOCK]] = of_ids[ids != NULL_BLOCK]
        return probe.judge(scores, everything)[METRIC]

    nothing = np.full_like(retrieved, NULL_BLOCK)
    values = {"BM25 alone": judge(nothing, 1.0)}
    values |= {f"BM25 weighs {w:g}": judge(retrieved, w) for w in WEIGHTS}
    alone = values["BM25 weighs 0"]
    rows = []
    for label, found in values.items():
        mean = bootstrap_interval(found).percent()
        change = paired_bootstrap_difference(alone, found).percent("+.1f")
        rows.append([label, mean, "" if found is alone else change])
    names = {"RUN": flags.run, "QUERIES": flags.queries}
    heads = [f"{len(queries)} queries", METRIC, "change"]
    text = (
        f"    {command_line('hybrid', names)}\n\n{table(heads, rows)}\n\n"
        f"{today()}, {machine()}; {corpus.num_blocks:,} blocks."
    )
    publish("hybrid", text, values, flags)


if __name__ == "__main__":
    with one_line_errors():
        main()
