"""Measures what BM25 teaches the query tower of `realm adapt`, several times.

    python -m bench.bm25_teacher RUN --queries queries.jsonl [--qrels test.tsv] \\
        --work FOLDER --seeds 3 [--page PAGE --place NAME]

RUN is a chain that `realm adapt` has made. Its warm start is trained again for each
seed, without the reader, below FOLDER, where what is done is not trained again. The
queries are those of `realm adapt`; differences from the encoder as it was are paired,
with 95 % intervals.
"""

import json
import pathlib
import sys
import threading

import numpy as np

from bench.command import (
    command_line,
    make_parser,
    one_line_errors,
    publish,
    require_room,
    run_step,
)
from bench.machine import machine, today
from bench.tables import percent, table
from realm_jax.data.blocks import BlockStore
from realm_jax.data.judgements import read_judgements
from realm_jax.evaluation import adaptation
from realm_jax.evaluation.comparisons import (
    AFTER_WARM_START,
    BEFORE_TRAINING,
    BM25,
    Comparison,
    fused_name,
)
from realm_jax.evaluation.recorded import find_model
from realm_jax.evaluation.searching import PretrainedRetriever
from realm_jax.stages import WARM_START

METRIC = "nDCG@10"


def main() -> None:
    """Trains each seed, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("run", metavar="RUN", help="a chain of `realm adapt`")
    parser.add_argument("--queries", required=True, help="queries to measure with")
    parser.add_argument("--qrels", default="", help="their judgements")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="how often to train")
    parser.add_argument("--place", default="", help="which of the page's tables it is")
    flags = parser.parse_args()
    name = "-".join(filter(None, ["bm25_teacher", flags.place]))
    require_room(name, flags)
    corpus = BlockStore.open(f"{flags.run}/corpus")
    sources = {text.source_id for text in corpus.texts(np.arange(corpus.num_blocks))}
    queries = read_judgements(flags.queries, flags.qrels, sources)
    flags.work.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    for seed in range(flags.seeds):
        found = _measured(_trained(flags.run, flags.work, seed), corpus, queries)
        if not rows:
            rows.append(["BM25", *_cells(found, BM25), ""])
            rows.append(["the encoder as it was", *_row(found, BEFORE_TRAINING)])
        rows.append([f"taught, seed {seed}", *_row(found, AFTER_WARM_START)])
        print(rows[-1], flush=True)
    names = {"RUN": flags.run, "QUERIES": flags.queries, "FOLDER": flags.work}
    header = [f"{len(queries)} queries", METRIC, "change", "fused with BM25"]
    lines = [
        f"    {command_line('bm25_teacher', names)}",
        "",
        table(header, rows),
        "",
        f"{today()}, {machine()}; {corpus.num_blocks:,} blocks.",
    ]
    publish(name, "\n".join(lines), rows, flags)


def _trained(run: str, work: pathlib.Path, seed: int) -> str:
    """Trains the warm start of a chain with a seed, and returns its folder."""
    folder = work / str(seed)
    settings = {"MODEL_DIR": str(folder), "SEED": seed, "TASK": ""}
    command = [
        *(sys.executable, "-m", "tpu_launch", "local", f"--gin_file={run}/chain.gin"),
        f"--gin.STAGES={json.dumps([WARM_START.command])}",
        *(
            f"--gin.{WARM_START.name}/{name}={json.dumps(value)}"
            for name, value in settings.items()
        ),
    ]
    run_step(command, work / f"{seed}.log")
    return str(folder)


def _measured(folder: str, corpus: BlockStore, queries) -> Comparison:
    run = find_model(folder, [WARM_START])
    retrievers = {
        BEFORE_TRAINING: PretrainedRetriever.open(run, as_begun=True),
        AFTER_WARM_START: PretrainedRetriever.open(run),
    }
    length = retrievers[BEFORE_TRAINING].models.lengths.query
    probe = adaptation.queries_probe(corpus, queries, length)
    measured = adaptation.measure(retrievers, corpus, [probe], threading.Event())
    return measured[probe.name]


def _row(found: Comparison, label: str) -> list[str]:
    """Returns the cells of a retriever, alone and fused with BM25."""
    return [*_cells(found, label), _cells(found, fused_name(label))[0]]


def _cells(found: Comparison, label: str) -> list[str]:
    """Returns the mean, and the change from the encoder as it was if there is one."""
    rows = {row.label: row.metrics for row in (*found.baselines, *found.rows)}
    change = found.find_change(BEFORE_TRAINING, label, METRIC)
    changed = "" if change is None else percent(change, "+")
    return [percent(rows[label][METRIC]), changed]


if __name__ == "__main__":
    with one_line_errors():
        main()
