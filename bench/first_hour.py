"""Times a newcomer's first hour: a text of one's own, from its file to an answer.

    python -m bench.first_hour HANDBOOK --output=runs/first_hour --page=docs/data.md

The commands are README's, as a user gives them: `realm init`, the chain that it wrote,
and `realm ask`; without questions `realm search` in its place. The texts are those of
`bench/handbook.py`, in English, French and Russian; the 120 questions of each were
written from the text for this. Each language is trained twice, with its questions and
without. A row that is there is not measured again; an interrupted one begins anew.

To be timed as on a fresh machine, run it in a fresh clone after `make env data`, with
nothing beside it.
"""

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.command import command_line, make_parser, publish, reporting, run_step
from bench.handbook import LOCALES, QUESTIONS, write_articles
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
)

Row = dict[str, Any]

_NAMES = {"en": "English", "fr": "French", "ru": "Russian"}
_ASKED = {
    "en": "Which command is usually used to add a new user?",
    "fr": "Quel paquet faut-il pour gérer des ensembles RAID logiciels ?",
    "ru": "Какой пакет нужен для создания программных массивов дисков?",
}


def measure(
    handbook: pathlib.Path, language: str, asked: bool, folder: pathlib.Path
) -> Row:
    """Runs a chain from an empty folder, with questions if they are to be `asked`.

    What is in the folder is dropped. Returns seconds of each command, sizes, and with
    questions what was measured, as [mean, low, high].
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    articles, run = folder / "articles.jsonl", folder / "my"
    log = folder / "output.txt"
    write_articles(handbook, language, articles)
    questions = [f"--questions={QUESTIONS / language}.jsonl"] if asked else []
    find = ["ask"] if asked else ["search", "--k=1"]
    local = [sys.executable, "-m", "tpu_launch", "local"]
    realm = str(pathlib.Path(sys.executable).parent / "realm")
    seconds = {
        "init": run_step(
            [realm, "init", run, f"--source={articles}", *questions], log
        ).seconds,
        "chain": run_step([*local, f"--gin_file={run}/chain.gin"], log).seconds,
        "answer": run_step(
            [realm, find[0], run, _ASKED[language], *find[1:]], log
        ).seconds,
    }
    store, chain = BlockStore.open(run / "corpus"), (run / "chain.gin").read_text()
    row = {
        "language": language,
        "questions": asked,
        "documents": store.info.get("num_documents"),
        "blocks": store.num_blocks,
        "starts": "MiniLM" if "minilm" in chain else "nothing",
        "seconds": seconds,
    }
    if asked:
        report = (run / "evaluate/report.json").read_text()
        row["measured"] = _measured(json.loads(report))
    return row


def _measured(report: Mapping[str, Any]) -> dict[str, list[float]]:
    comparison = report["comparison"]
    rows = {
        row["label"]: row["metrics"]
        for row in (*comparison["rows"], *comparison["baselines"])
    }
    found = {
        "before": rows[AFTER_WARM_START]["recall@5"],
        "after": rows[AFTER_REALM]["recall@5"],
        "BM25": rows["BM25"]["recall@5"],
        "exact match": rows[AFTER_FINETUNING]["exact match"],
    }
    return {
        name: [interval[key] for key in ("mean", "low", "high")]
        for name, interval in found.items()
    }


def as_text(rows: Sequence[Row], command: str) -> str:
    """Returns a table in Markdown, a row for both chains of a language."""
    heads = (
        *("text", "documents, blocks", "model starts from", "minutes to an answer"),
        *("without questions, to `search`", "recall@5 before REALM, after it"),
        *("BM25", "exact match"),
    )
    of = {(row["language"], row["questions"]): row for row in rows}
    lines = []
    for language, name in _NAMES.items():
        row, bare = of.get((language, True)), of.get((language, False))
        if not row or not bare:
            continue
        found = row["measured"]
        lines.append(
            (
                *(name, f"{row['documents']}, {row['blocks']:,}", row["starts"]),
                *(_minutes(row), _minutes(bare)),
                f"{_percent(found['before'])}, {_percent(found['after'])}",
                f"{100 * found['BM25'][0]:.0f}",
                _percent(found["exact match"]),
            )
        )
    return f"    {command}\n\n{table(heads, lines)}\n\n{today()}, {machine()}."


def _minutes(row: Row) -> str:
    return f"{sum(row['seconds'].values()) / 60:.1f}"


def _percent(interval: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in interval)
    return f"{mean:.0f} [{low:.0f}, {high:.0f}]"


def main() -> None:
    """Measures what is missing, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("handbook", type=pathlib.Path, help="the package's folder html")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder")
    flags = parser.parse_args()
    places = argparse.Namespace(page=flags.page)
    with reporting("first_hour", places):
        flags.output.mkdir(parents=True, exist_ok=True)
        rows = []
        for language in LOCALES:
            for asked in (True, False):
                folder = flags.output / f"{language}_{'asked' if asked else 'bare'}"
                path = folder / "row.json"
                if not path.exists():
                    row = measure(flags.handbook, language, asked, folder)
                    path.write_text(json.dumps(row, indent=1) + "\n")
                rows.append(json.loads(path.read_text()))
        command = command_line("first_hour", {"HANDBOOK": flags.handbook})
        publish("first_hour", as_text(rows, command), rows, places)


if __name__ == "__main__":
    main()
