"""Measures what `realm init --start` answers about a text that it has not seen.

    python -m bench.own_text articles.jsonl --questions questions.jsonl \\
        --start runs/quickstart --work FOLDER [--page PAGE --place NAME]

TEXT and the questions are as `realm init` takes them. First the model answers all
questions as it is. Then it is fine-tuned on them five times, by the chain that
`realm init` writes: each time a fifth is asked that was not trained on, and a tenth is
dev. Each reads what its retriever finds, and what that finds together with BM25
(`realm ask --hybrid`). Minutes are those of the commands from the files to the first
answer, of the first of the five. A fold that is there is not run again.
"""

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.command import command_line, make_parser, publish, reporting, run_step
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.documents import stable_uniform
from realm_jax.data.questions import records_of
from realm_jax.evaluation.compare import PREDICTIONS_NAME
from realm_jax.evaluation.comparisons import AFTER_FINETUNING, BM25
from realm_jax.evaluation.run import BASELINE_PREDICTIONS_NAME
from realm_jax.metrics.retrieval import bootstrap_interval, paired_bootstrap_difference

_FOLDS = 5
_ROW = "row.json"
_PREDICTIONS = {
    "alone": PREDICTIONS_NAME,
    "hybrid": BASELINE_PREDICTIONS_NAME.format("hybrid"),
}

Row = dict[str, Any]
"""`minutes` of the commands; whether each question is answered exactly, by its text, of
the retriever's blocks ("alone") and of those found by words as well ("hybrid")."""


class Bench:
    """The commands of a user, each in a folder of its own below `--work`."""

    def __init__(self, flags: argparse.Namespace):
        self._flags = flags
        self._realm = pathlib.Path(sys.executable).parent / "realm"
        # Those that have a split are divided anew.
        self._records = [
            {name: value for name, value in record.items() if name != "split"}
            for _, record in records_of(flags.questions)
        ]

    def as_it_is(self) -> Row:
        """Asks the model all questions, of the prepared text."""
        folder = self._flags.work / "as_it_is"
        corpus = f"--corpus={folder}/my/corpus"
        model = [self._flags.start, corpus, "--allow_corpus_mismatch"]
        minutes = self._run(folder, [], ["ask", *model])
        questions = self._write("all", self._records)
        measured = ["--baselines=hybrid", f"--output={folder}/my/evaluate"]
        self._step(folder, [self._realm, "evaluate", *model, questions, *measured])
        return {"minutes": minutes, **_answered(folder)}

    def fold(self, number: int) -> Row:
        """Trains on seven tenths of the questions, and asks those of a fifth."""
        folder = self._flags.work / f"fold_{number}"
        questions = self._write(folder.name, _divided(self._records, number))
        minutes = self._run(folder, [questions], ["ask", folder / "my"])
        return {"minutes": minutes, **_answered(folder)}

    def _write(self, name: str, records: Iterable[Row]) -> str:
        """Writes questions; returns the option that names them."""
        path = self._flags.work / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return f"--questions={path}"

    def _run(
        self, folder: pathlib.Path, questions: Sequence[str], ask: Sequence[object]
    ) -> float:
        """Runs the three commands in an empty folder; returns their minutes."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        source, start = f"--source={self._flags.text}", f"--start={self._flags.start}"
        chain = f"--gin_file={folder}/my/chain.gin"
        return sum(
            self._step(folder, command)
            for command in (
                [self._realm, "init", folder / "my", source, start, *questions],
                [sys.executable, "-m", "tpu_launch", "local", chain],
                [self._realm, *ask, self._records[0]["question"]],
            )
        )

    def _step(self, folder: pathlib.Path, command: Sequence[object]) -> float:
        return run_step(command, folder / "output.txt").seconds / 60


def _divided(records: Sequence[Row], fold: int) -> Iterable[Row]:
    """Yields the questions with their splits in a fold."""
    order = sorted(
        range(len(records)),
        key=lambda row: stable_uniform("fold", records[row]["question"]),
    )
    for place, row in enumerate(order):
        is_dev = place % _FOLDS == (fold + 1) % _FOLDS and place // _FOLDS % 2
        split = "dev" if is_dev else "train"
        yield records[row] | {"split": "test" if place % _FOLDS == fold else split}


def _answered(folder: pathlib.Path) -> Row:
    """Reads what `realm evaluate` has written."""
    place = folder / "my/evaluate"
    found: Row = {
        name: {
            answer["question"]: float(answer["correct"])
            for answer in map(json.loads, (place / file).open())
        }
        for name, file in _PREDICTIONS.items()
    }
    comparison = json.loads((place / "report.json").read_text())["comparison"]
    for row in (*comparison["rows"], *comparison["baselines"]):
        if row["label"] in (AFTER_FINETUNING, BM25):
            found[row["label"]] = row["metrics"]["recall@5"]["mean"]
    return found


def as_text(as_it_is: Row, folds: Sequence[Row], command: str) -> str:
    """Returns the table, with the recall of all questions below it."""
    questions = sorted(as_it_is["alone"])

    def values(rows: Sequence[Row], name: str) -> np.ndarray:
        found = {key: value for row in rows for key, value in row[name].items()}
        return np.array([found[question] for question in questions])

    first = values([as_it_is], "alone")
    lines = []
    for label, rows in (
        ("as it is", [as_it_is]),
        (f"fine-tuned on {len(questions) * 7 // 10}, five-fold", folds),
    ):
        alone, hybrid = values(rows, "alone"), values(rows, "hybrid")
        change = paired_bootstrap_difference(first, alone).percent("+.1f")
        gain = paired_bootstrap_difference(alone, hybrid).percent("+.1f")
        lines.append(
            (
                *(label, f"{rows[0]['minutes']:.1f}"),
                *(bootstrap_interval(alone).percent(), change if rows is folds else ""),
                *(bootstrap_interval(hybrid).percent(), gain),
            )
        )
    heads = (
        *(f"{len(questions)} questions", "minutes to an answer", "exact match"),
        *("change", "by words as well", "change by words"),
    )
    recalls = ", ".join(
        f"{name} {100 * as_it_is[label]:.1f}"
        for name, label in (("the retriever", AFTER_FINETUNING), (BM25, BM25))
    )
    return (
        f"    {command}\n\n{table(heads, lines)}\n\n"
        f"Recall@5: {recalls}. {today()}, {machine()}."
    )


def main() -> None:
    """Measures what is missing, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("text", metavar="TEXT", help="as `realm init --source` has it")
    parser.add_argument("--questions", required=True, help="JSON lines of questions")
    parser.add_argument("--start", required=True, help="a finished quickstart")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="for the runs")
    parser.add_argument("--place", default="", help="which of the page's tables it is")
    flags = parser.parse_args()
    name = "-".join(filter(None, ["own_text", flags.place]))
    places = argparse.Namespace(page=flags.page)
    with reporting(name, places):
        bench = Bench(flags)
        rows = []
        for number in (None, *range(_FOLDS)):
            part = "as_it_is" if number is None else f"fold_{number}"
            path = flags.work / part / _ROW
            if not path.exists():
                row = bench.as_it_is() if number is None else bench.fold(number)
                path.write_text(json.dumps(row, indent=1) + "\n")
            rows.append(json.loads(path.read_text()))
            print(part, {key: rows[-1][key] for key in ("minutes", BM25)}, flush=True)
        named = {"TEXT": flags.text, "QUESTIONS": flags.questions, "FOLDER": flags.work}
        command = command_line("own_text", named)
        publish(name, as_text(rows[0], rows[1:], command), rows, places)


if __name__ == "__main__":
    main()
