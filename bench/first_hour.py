"""Times a newcomer's first hour: a text of one's own, from its file to an answer.

    python -m bench.first_hour HANDBOOK --output=runs/first_hour --page=docs/data.md
    python -m bench.first_hour HANDBOOK --output=runs/first_hour --page=docs/data.md \
        --start=runs/quickstart

The commands are README's, as a user gives them: `realm init`, the chain that it wrote,
and `realm ask`; without questions `realm search` in its place. The texts are those of
`bench/handbook.py`, in English, French and Russian; the 120 questions of each were
written from the text for this. Each language is trained twice, with its questions and
without. With `--start` both go on from that model, which was trained on English: with
questions it is fine-tuned, and without any it answers all of them as it is. A row that
is there is not measured again; an interrupted one begins anew.

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
    BM25,
    EXACT_MATCH,
    fused_name,
)

Row = dict[str, Any]

_NAMES = {"en": "English", "fr": "French", "ru": "Russian"}
# Whose words the vocabulary of MiniLM has.
_KNOWN = ("en", "fr")
_ASKED = {
    "en": "Which command is usually used to add a new user?",
    "fr": "Quel paquet faut-il pour gérer des ensembles RAID logiciels ?",
    "ru": "Какой пакет нужен для создания программных массивов дисков?",
}


def measure(
    handbook: pathlib.Path,
    language: str,
    asked: bool,
    folder: pathlib.Path,
    start: str = "",
) -> Row:
    """Runs a chain from an empty folder, with questions if they are to be `asked`.

    What is in the folder is dropped. With `start` the chain goes on from that model.
    Returns seconds of each command, sizes, and what was measured, as [mean, low, high];
    nothing is without either questions or `start`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    articles, run = folder / "articles.jsonl", folder / "my"
    log = folder / "output.txt"
    write_articles(handbook, language, articles)
    questions = f"--questions={QUESTIONS / language}.jsonl"
    settings = [questions] if asked else []
    find: list[object] = ["ask", run] if asked else ["search", run, "--k=1"]
    local = [sys.executable, "-m", "tpu_launch", "local"]
    realm = str(pathlib.Path(sys.executable).parent / "realm")
    as_it_is = [start, f"--corpus={run}/corpus", "--allow_corpus_mismatch"]
    if start:
        settings.append(f"--start={start}")
        if asked:
            local.append('--gin.BASELINES=["hybrid"]')
        else:
            find = ["ask", *as_it_is]
    seconds = {
        "init": run_step(
            [realm, "init", run, f"--source={articles}", *settings], log
        ).seconds,
        "chain": run_step([*local, f"--gin_file={run}/chain.gin"], log).seconds,
        "answer": run_step([realm, *find, _ASKED[language]], log).seconds,
    }
    if start and not asked:
        found = [questions, "--baselines=hybrid", f"--output={run}/evaluate"]
        run_step([realm, "evaluate", *as_it_is, *found], log)
    store, chain = BlockStore.open(run / "corpus"), (run / "chain.gin").read_text()
    row = {
        "language": language,
        "questions": asked,
        "documents": store.info.get("num_documents"),
        "blocks": store.num_blocks,
        "starts": start or ("MiniLM" if "minilm" in chain else "nothing"),
        "seconds": seconds,
    }
    if asked or start:
        report = (run / "evaluate/report.json").read_text()
        row["measured"] = _measured(json.loads(report))
    return row


def _measured(report: Mapping[str, Any]) -> dict[str, list[float]]:
    comparison = report["comparison"]
    rows = {
        row["label"]: row["metrics"]
        for row in (
            *comparison["rows"],
            *comparison["baselines"],
            *report["same_reader"]["rows"][:-1],
        )
    }
    found = {
        "before": (AFTER_WARM_START, "recall@5"),
        "after": (AFTER_REALM, "recall@5"),
        "finetuned": (AFTER_FINETUNING, "recall@5"),
        "BM25": (BM25, "recall@5"),
        "exact match": (AFTER_FINETUNING, EXACT_MATCH),
        "hybrid": (fused_name(AFTER_FINETUNING), EXACT_MATCH),
    }
    return {
        name: [rows[label][metric][key] for key in ("mean", "low", "high", "count")]
        for name, (label, metric) in found.items()
        if label in rows
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


def started_as_text(rows: Sequence[Row], command: str) -> str:
    """Returns the table of chains that go on from a trained model."""
    heads = (
        *("text", "trained on", "minutes to an answer", "asked", "recall@5", "BM25"),
        *("exact match", "by words as well"),
    )
    lines = []
    for row in rows:
        found = row["measured"]
        lines.append(
            (
                _NAMES[row["language"]],
                "84 questions" if row["questions"] else "none",
                *(_minutes(row), str(found["exact match"][-1])),
                *(_percent(found["finetuned"]), f"{100 * found['BM25'][0]:.0f}"),
                *(_percent(found["exact match"]), _percent(found["hybrid"])),
            )
        )
    return f"    {command}\n\n{table(heads, lines)}\n\n{today()}, {machine()}."


def _minutes(row: Row) -> str:
    return f"{sum(row['seconds'].values()) / 60:.1f}"


def _percent(interval: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in interval[:3])
    return f"{mean:.0f} [{low:.0f}, {high:.0f}]"


def main() -> None:
    """Measures what is missing, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("handbook", type=pathlib.Path, help="the package's folder html")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder")
    parser.add_argument("--start", default="", help="a finished quickstart")
    flags = parser.parse_args()
    places = argparse.Namespace(page=flags.page)
    name = "first_hour_start" if flags.start else "first_hour"
    with reporting(name, places):
        flags.output.mkdir(parents=True, exist_ok=True)
        rows = []
        for language in _KNOWN if flags.start else LOCALES:
            for asked in (True, False):
                made = f"{language}_{'asked' if asked else 'bare'}"
                folder = flags.output / (f"{made}_start" if flags.start else made)
                path = folder / "row.json"
                if not path.exists():
                    row = measure(flags.handbook, language, asked, folder, flags.start)
                    path.write_text(json.dumps(row, indent=1) + "\n")
                rows.append(json.loads(path.read_text()))
        command = command_line("first_hour", {"HANDBOOK": flags.handbook})
        text = started_as_text if flags.start else as_text
        publish(name, text(rows, command), rows, places)


if __name__ == "__main__":
    main()
