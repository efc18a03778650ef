"""Compares what `realm adapt` makes of an encoder with what others make of it.

    python -m bench.adaptation RUN --queries queries.jsonl [--qrels test.tsv] \\
        --encoder FOLDER --work FOLDER [--seeds 3] [--page PAGE --place NAME]

RUN is a chain that `realm adapt` has made of the encoder in `--encoder`, at its own
width or projected. Its warm start is trained again for each seed, without the reader.
On the same text sentence-transformers trains TSDAE, SimCSE, ICT and GPL's loss, each
for `--minutes` on two cores (`bench/peers/adapt_torch.py`, installed by `make peers`).
What is done below `--work` is not done again. Without `--encoder` the others are left
out.

The queries are those of `realm adapt`. A row is the mean over seeds; its difference
from the encoder as it was is paired by query, with a 95 % interval.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.command import (
    command_line,
    make_parser,
    one_line_errors,
    publish,
    require_room,
    run_step,
    write_figures,
)
from bench.machine import machine, today
from bench.pipeline import copy_first_index
from bench.processes import PEERS_PYTHON, require_peers, run_json
from bench.tables import table
from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.blocks import BlockStore
from realm_jax.data.judgements import read_judgements
from realm_jax.errors import BadInputError
from realm_jax.evaluation import adaptation
from realm_jax.evaluation.adapt_report import read_report
from realm_jax.evaluation.comparisons import BM25, fused_name
from realm_jax.evaluation.provenance import time_of
from realm_jax.evaluation.recorded import find_model
from realm_jax.evaluation.searching import PretrainedRetriever
from realm_jax.metrics.retrieval import bootstrap_interval, paired_bootstrap_difference
from realm_jax.stages import PRETRAIN, WARM_START, StageSpec

METRIC = "nDCG@10"
COSTS = ("minutes", "GiB")
UNTOUCHED, PROJECTED, TAUGHT, REALM = "before", "projected", "taught", "realm"
PEER_UNTOUCHED = "untouched"
PEERS = ("tsdae", "simcse", "ict", "margin_mse")
LABELS = {
    UNTOUCHED: "the encoder as it was",
    PROJECTED: "projected",
    TAUGHT: "taught by it and BM25",
    REALM: "then REALM",
    "tsdae": "TSDAE",
    "simcse": "SimCSE",
    "ict": "ICT",
    "margin_mse": "GPL's loss with BM25",
}
# Of means: rounding may swap a few of the documents that are found.
_TOLERANCE = 0.005
_MAX_SENTENCES = 20_000
_FEWEST_WORDS = 4
_NEGATIVES = 10

Row = dict[str, Any]
"""`METRIC` of each query as "values", "fused" with BM25, and of "bm25"; `COSTS`; and
"of", the flags that it depends on."""


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("run", metavar="RUN", help="a chain of `realm adapt`")
    parser.add_argument("--queries", required=True, help="queries to measure with")
    parser.add_argument("--qrels", default="", help="their judgements")
    parser.add_argument("--encoder", default="", help="what RUN began with")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="how often to train")
    parser.add_argument("--minutes", type=float, default=4.0, help="for a peer")
    parser.add_argument(
        "--peers", type=pathlib.Path, default=PEERS_PYTHON, help="their Python"
    )
    parser.add_argument("--place", default="", help="which of the page's tables it is")
    flags = parser.parse_args()
    name = "-".join(filter(None, ["adaptation", flags.place]))
    require_room(name, flags)
    if flags.encoder:
        require_peers(flags.peers)
    bench = Bench(flags)
    methods = (
        [UNTOUCHED, PROJECTED, TAUGHT] if bench.is_projected else [UNTOUCHED, TAUGHT]
    )
    if (pathlib.Path(flags.run) / PRETRAIN.name).is_dir():
        methods.append(REALM)
    if flags.encoder:
        methods += PEERS
        bench.require_same_start()
    found: dict[str, list[Row]] = {method: [] for method in methods}
    for seed, method in itertools.product(range(flags.seeds), methods):
        if seed == 0 or method not in (UNTOUCHED, PROJECTED, REALM):
            found[method].append(bench.row(method, seed))
            print(method, seed, np.mean(found[method][-1]["values"]), flush=True)
    names = {
        **{"RUN": flags.run, "QUERIES": flags.queries, "QRELS": flags.qrels},
        **{"ENCODER": flags.encoder, "FOLDER": flags.work},
    }
    text = (
        f"    {command_line('adaptation', names)}\n\n{bench.table(found)}\n\n"
        f"{today()}, {machine()}; {bench.corpus.num_blocks:,} blocks."
    )
    publish(name, text, found, flags)


class Bench:
    """A text with its queries, and what was trained on it."""

    def __init__(self, flags: argparse.Namespace):
        self._run: str = flags.run
        self._work: pathlib.Path = flags.work
        self._flags = flags
        names = ("run", "queries", "qrels", "encoder", "minutes")
        self._of = {name: getattr(flags, name) for name in names}
        self._work.mkdir(parents=True, exist_ok=True)
        self.corpus = BlockStore.open(f"{flags.run}/corpus")
        texts = self.corpus.texts(np.arange(self.corpus.num_blocks))
        self._queries = read_judgements(
            flags.queries, flags.qrels, {text.source_id for text in texts}
        )
        self._bm25 = BM25Index(self.corpus)
        begun = PretrainedRetriever.open(
            find_model(flags.run, [WARM_START]), before_training=True
        )
        self._length = begun.models.lengths.query
        config = begun.models.retriever_config(self.corpus.vocabulary.size)
        self.is_projected = config.projected
        # The document tower does not learn from BM25: its embeddings serve all seeds.
        self._numerics = adaptation.index_numerics([begun], self.corpus)
        self._donors = [begun.model_dir]
        self._probe = adaptation.queries_probe(self.corpus, self._queries, self._length)

    def row(self, method: str, seed: int) -> Row:
        """Returns the figures of a method, which are in a file if it has been run."""
        place = self._work / f"{method}-{seed}.json"
        if not place.exists():
            made = {
                UNTOUCHED: self._untouched,
                PROJECTED: self._begun,
                TAUGHT: self._taught,
                REALM: self._realm,
            }
            row = made[method](seed) if method in made else self._peer(method, seed)
            write_figures(place, {**row, "of": self._of})
        row = json.loads(place.read_text())
        if row["of"] != self._of:
            raise BadInputError(
                f"expected figures of {self._of} in {place}, got those of {row['of']}; "
                "give another --work"
            )
        return row

    def table(self, found: Mapping[str, Sequence[Row]]) -> str:
        """Returns the table of all rows."""
        before = np.array(found[UNTOUCHED][0]["values"])
        by_words = bootstrap_interval(np.array(found[UNTOUCHED][0]["bm25"]))
        rows = [[BM25, by_words.percent(), *[""] * 5]]
        for method, seeds in found.items():
            values = np.mean([row["values"] for row in seeds], axis=0)
            fused = np.mean([row["fused"] for row in seeds], axis=0)
            change = paired_bootstrap_difference(before, values)
            own = [f"{100 * np.mean(row['values']):.1f}" for row in seeds]
            costs = [np.mean([row[name] for row in seeds]) for name in COSTS]
            rows.append(
                [
                    LABELS[method],
                    bootstrap_interval(values).percent(),
                    "" if method == UNTOUCHED else change.percent("+.1f"),
                    ", ".join(own) if len(own) > 1 else "",
                    bootstrap_interval(fused).percent(),
                    *(f"{cost:.1f}" if cost else "" for cost in costs),
                ]
            )
        heads = [f"{len(self._queries)} queries", METRIC, "change", "by seed"]
        return table([*heads, "fused with BM25", *COSTS], rows)

    def _figures(self, search: adaptation.Search, minutes: float, gib: float) -> Row:
        found = adaptation.judged(
            self._probe, {"": search}, self._bm25, threading.Event()
        )
        rows = {"values": "", "fused": fused_name(""), "bm25": BM25}
        values = {name: found[label][METRIC].tolist() for name, label in rows.items()}
        return {**values, **dict(zip(COSTS, (minutes, gib), strict=True))}

    def _searched(self, model: PretrainedRetriever, minutes: float, gib: float) -> Row:
        search = adaptation.dense(
            model, self.corpus, threading.Event(), self._numerics, self._donors
        )
        return self._figures(search, minutes, gib)

    def _untouched(self, seed: int) -> Row:
        """Measures the encoder as it was published."""
        if not self.is_projected:
            return self._begun(seed)
        run = PretrainedRetriever.open(find_model(self._run, [WARM_START]))
        search = adaptation.without_projection(run, self.corpus, self._numerics)
        return self._figures(search, 0.0, 0.0)

    def _begun(self, seed: int) -> Row:
        """Measures what training began with."""
        del seed
        run = find_model(self._run, [WARM_START])
        return self._searched(
            PretrainedRetriever.open(run, before_training=True), 0.0, 0.0
        )

    def _realm(self, seed: int) -> Row:
        """Measures the chain itself; the reader's warm start is in its minutes."""
        del seed
        run = find_model(self._run, [PRETRAIN])
        cost = (read_report(self._run) or {"cost": {"bytes": 0}})["cost"]
        return self._searched(
            PretrainedRetriever.open(run),
            sum(minutes_of(self._run, stage) for stage in (WARM_START, PRETRAIN)),
            cost["bytes"] / 2**30,
        )

    def _taught(self, seed: int) -> Row:
        """Trains the warm start of the chain with a seed, without the reader.

        Its teacher, the encoder as it was, has embedded the text in the chain.
        """
        folder = self._work / f"taught-{seed}"
        if not folder.exists():
            copy_first_index(pathlib.Path(self._run, WARM_START.name), folder)
        settings = {"MODEL_DIR": str(folder), "SEED": seed, "TASK": ""}
        command = [
            *(sys.executable, "-m", "tpu_launch", "local"),
            f"--gin_file={self._run}/chain.gin",
            f"--gin.STAGES={json.dumps([WARM_START.command])}",
            *(
                f"--gin.{WARM_START.name}/{name}={json.dumps(value)}"
                for name, value in settings.items()
            ),
        ]
        spent = run_step(command, folder.with_suffix(".log"))
        model = PretrainedRetriever.open(find_model(str(folder), [WARM_START]))
        return self._searched(model, minutes_of(folder, WARM_START), spent.peak_gib)

    def _peer(self, method: str, seed: int) -> Row:
        """Trains and embeds with sentence-transformers."""
        place = self._work / f"{method}-{seed}.npz"
        flags = self._flags
        words = [
            *(flags.peers, "-m", "bench.peers.adapt_torch", method, self._case()),
            *("--minutes", flags.minutes, "--seed", seed, "--output", place),
        ]
        spent = run_json([str(word) for word in words])
        rows = np.load(place)
        queries, blocks = rows["queries"], rows["blocks"]

        def search(probe: adaptation.Probe, rows: range) -> adaptation.Scores:
            del probe
            return queries[rows.start : rows.stop] @ blocks.T

        row = self._figures(search, spent["minutes"], spent["peak_gib"])
        place.unlink()
        return row

    def require_same_start(self) -> None:
        """Requires that peers begin with the encoder that `realm adapt` began with."""
        ours, theirs = (
            np.mean(self.row(method, 0)["values"])
            for method in (UNTOUCHED, PEER_UNTOUCHED)
        )
        if abs(ours - theirs) > _TOLERANCE:
            raise BadInputError(
                f"expected --encoder to be what {self._run} began with, of {METRIC} "
                f"{ours:.3f}, got one of {theirs:.3f}; give the same folder"
            )

    def _case(self) -> pathlib.Path:
        """Writes what the peers read, once."""
        case = self._work / "case"
        if (case / "queries.jsonl").exists():
            return case
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self._flags.encoder, case / "encoder")
        blocks = self.corpus.texts(np.arange(self.corpus.num_blocks))
        sentences = [
            (number, block.body[start:end])
            for number, block in enumerate(blocks)
            for start, end in block.sentences
            if len(block.body[start:end].split()) >= _FEWEST_WORDS
        ]
        step = max(1, len(sentences) // _MAX_SENTENCES)
        sentences = sentences[::step]
        negatives, margins = self._negatives(sentences)
        np.savez(case / "negatives.npz", blocks=negatives, margins=margins)
        for name, rows in (
            ("blocks", [(block.title, block.body) for block in blocks]),
            ("sentences", sentences),
            ("queries", [self._as_read(query.text) for query in self._queries]),
        ):
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            (case / f"{name}.jsonl").write_text(lines)
        return case

    def _as_read(self, query: str) -> str:
        """Returns what the towers read of a query, without what they cut."""
        pieces = self.corpus.vocabulary.encode(query).offsets[: self._length - 2]
        return query[: pieces[-1, 1]] if len(pieces) else ""

    def _negatives(
        self, sentences: Sequence[tuple[int, str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns blocks like each sentence by BM25, and how much better its own is."""
        found, margins = [], []
        for own, text in sentences:
            scores = self._bm25.scores([text])[0]
            scores[np.isinf(scores)] = 0.0
            right = scores[own]
            scores[own] = -np.inf
            best = np.argpartition(-scores, _NEGATIVES)[:_NEGATIVES]
            found.append(best)
            margins.append(right - scores[best])
        return np.array(found), np.array(margins, np.float32)


def minutes_of(folder: str | pathlib.Path, stage: StageSpec) -> float:
    """Returns the minutes of a stage's updates."""
    at = (
        folder
        if pathlib.Path(folder, "metrics.jsonl").exists()
        else f"{folder}/{stage.name}"
    )
    time = time_of(str(at), stage.name)
    return time.seconds / 60 if time else 0.0


if __name__ == "__main__":
    with one_line_errors():
        main()
