"""Measures ORQA, REALM and their baselines on three published sets of questions.

    python -m bench.open_qa --corpus FILE --questions FOLDER --output runs/open_qa \
        --page docs/results.md

FILE is text as `realm prepare` reads it. FOLDER has EntityQuestions, WebQuestions and
CuratedTREC as JSON lines, one file a split, whose names begin with those of the sets in
lower case (`webquestions.train.jsonl`). Where there is no dev file, dev is the tenth of
train that ORQA held out.

From MiniLM's weights, with the settings of gin/runs/quickstart.gin and `_SETTINGS`: ICT
for the retriever and masked sentences for the reader, then fine-tuning on the train
questions of all sets (ORQA), or REALM and the same fine-tuning (REALM). Nothing is
chosen on dev. Each set's dev questions are then answered by both, and REALM's reader
reads what the baselines find. The commands are those of a user; each resumes or is
skipped where it is done, so that this one is resumed by running it again.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any

from bench.command import command_line, make_parser, publish, reporting, run_step
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.documents import TRAIN
from realm_jax.data.questions import Question, records_of, write_questions
from realm_jax.errors import BadInputError
from realm_jax.evaluation.answer_errors import Outcome
from realm_jax.evaluation.compare import PREDICTIONS_NAME
from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    BM25,
    EXACT_MATCH,
    F1,
    MOMENTS,
    RANDOM_BLOCKS,
    recall_name,
)
from realm_jax.evaluation.open_qa import Baseline
from realm_jax.evaluation.report import JSON_NAME
from realm_jax.evaluation.run import (
    BASELINE_PREDICTIONS_NAME,
    CONTROL_PREDICTIONS_NAME,
    RECALL_AT,
)
from realm_jax.metrics.retrieval import Interval
from realm_jax.prepare.open_qa.sets import DEV, is_dev
from realm_jax.stages import EVALUATE

SETS = ("EntityQuestions", "WebQuestions", "CuratedTREC")

# Of all runs.
_SETTINGS = """\
include "gin/runs/quickstart.gin"

ROOT = "{output}/{run}"
NAME = "open_qa"
SOURCE = "{output}/passages.jsonl"
QUESTIONS = "{output}/questions/all.jsonl"
NUM_READ = 5

prepare/EXAMPLES = ["salient", "ict", "questions"]

# MiniLM's retriever at a rate for models that were pre-trained, 2e-5.
warm_start/BATCH_SIZE = 16
warm_start/RETRIEVER_RATE = 0.04
warm_start/TRAIN_STEPS = {warm_start}
warm_start/WARMUP_STEPS = None

pretrain/TRAIN_STEPS = {pretrain}
pretrain/WARMUP_STEPS = None
pretrain/REFRESH_PERIOD = {pretrain}
pretrain/MAX_STALENESS_STEPS = None
pretrain/QUESTIONS = ""

finetune/TRAIN_STEPS = {finetune}
finetune/WARMUP_STEPS = None
finetune/EVALUATION_PERIOD = {finetune}
finetune/QUESTIONS = ""

"""

_RUNS = {
    "orqa": """\
STAGES = ["prepare", "warm-start", "finetune"]
warm_start/PAIRS_TASK = "open_qa_ict"
""",
    "realm": """\
STAGES = ["pretrain", "finetune"]
CORPUS = "{output}/orqa/corpus"
pretrain/WARM_START = "{output}/orqa/warm_start"
""",
    # Nothing is trained: MiniLM with the projection that the others start from.
    "minilm": """\
STAGES = ["warm-start"]
CORPUS = "{output}/orqa/corpus"
warm_start/PAIRS_TASK = ""
warm_start/TRAIN_STEPS = 0
""",
}

# Of a set.
_MEASURED = """\
STAGES = ["evaluate"]
CORPUS = "{output}/orqa/corpus"
QUESTIONS = "{output}/questions/{run}.jsonl"
evaluate/SPLIT = "dev"
evaluate/MASKED_TASK = ""
evaluate/STARTING_POINT = "{output}/minilm/warm_start"
evaluate/WARM_STARTED = "{output}/orqa/warm_start"
evaluate/PRETRAINED = "{output}/realm/pretrain"
evaluate/FINETUNED = "{output}/realm/finetune"
evaluate/CONTROL_FINETUNED = "{output}/orqa/finetune"
evaluate/BASELINES = ["closed_book", "random", "bm25", "starting_point", "oracle"]
evaluate/TITLE = "{run}, ORQA and REALM"
"""

_RECALLS = tuple(map(recall_name, RECALL_AT))
_HEADS = ("", *_RECALLS, EXACT_MATCH, F1, "not read, wrong block, wrong span")


def write_text(
    corpus: str, folder: pathlib.Path, one_in: int, path: pathlib.Path
) -> set[str]:
    """Writes passages, JSON lines, and returns their ids.

    They are one in so many of the corpus, and those that answer a question of dev in
    the `folder` of the sets, as its `gold_ids` say.
    """
    gold = {
        passage
        for name in SETS
        for record in _records(folder, name, DEV)
        for passage in record.get("gold_ids", ())
    }
    kept = [
        record
        for number, record in records_of(corpus)
        if number % one_in == 0 or record["id"] in gold
    ]
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    path.write_text("".join(lines))
    return {record["id"] for record in kept}


def write_sets(folder: pathlib.Path, passages: Set[str], output: pathlib.Path) -> None:
    """Writes a file of each set's questions, and `all.jsonl` with those of all.

    Questions of other passages than those given are left out.
    """
    output.mkdir(parents=True, exist_ok=True)
    every: list[Question] = []
    for name in SETS:
        questions = _read_set(folder, name, passages)
        write_questions(output / f"{name}.jsonl", questions)
        every += questions
    renumbered = (dataclasses.replace(q, index=row) for row, q in enumerate(every))
    write_questions(output / "all.jsonl", renumbered)


def _records(folder: pathlib.Path, name: str, split: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{name.lower()}*.{split}.jsonl"))
    if split == TRAIN and not paths:
        raise BadInputError(
            f"expected {name.lower()}.{split}.jsonl in {folder}, got none; name the "
            "folder of the sets"
        )
    return [record for path in paths for _, record in records_of(str(path))]


def _read_set(folder: pathlib.Path, name: str, passages: Set[str]) -> list[Question]:
    questions = [
        _question(record, f"{name}-{split}-{number}", split)
        for split in (TRAIN, DEV)
        for number, record in enumerate(_records(folder, name, split))
        if not (gold := record.get("gold_ids")) or not passages.isdisjoint(gold)
    ]
    if not any(question.split == DEV for question in questions):
        held_out = is_dev([question.question for question in questions])
        questions = [
            dataclasses.replace(question, split=DEV) if held else question
            for question, held in zip(questions, held_out, strict=True)
        ]
    return [dataclasses.replace(q, index=row) for row, q in enumerate(questions)]


def _question(record: Mapping[str, Any], name: str, split: str) -> Question:
    pattern = record.get("answer_regex")
    return Question(
        id=name,
        index=0,
        question=record["question"],
        answers=(pattern,) if pattern else tuple(record["answers"]),
        split=split,
        answers_are_patterns=bool(pattern),
    )


def write_chains(output: pathlib.Path, updates: Mapping[str, int]) -> None:
    """Writes the gin file of each run and of each set, with the updates of stages."""
    for run, text in {**_RUNS, **dict.fromkeys(SETS, _MEASURED)}.items():
        filled = (_SETTINGS + text).format(output=output, run=run, **updates)
        (output / f"{run}.gin").write_text(filled)


def commands(output: pathlib.Path) -> Iterator[list[str]]:
    """Yields what trains and measures, in order.

    The searches make the indexes of the starts, which later stages copy.
    """
    search = [str(pathlib.Path(sys.executable).parent / "realm"), "search", "--k=1"]
    local = [sys.executable, "-m", "tpu_launch", "local"]
    first = '--gin.STAGES=["prepare", "warm-start"]'
    yield [*local, f"--gin_file={output}/orqa.gin", first]
    yield [*search, f"{output}/orqa/warm_start", SETS[0]]
    yield [*local, f"--gin_file={output}/realm.gin"]
    yield [*local, f"--gin_file={output}/orqa.gin"]
    yield [*local, f"--gin_file={output}/minilm.gin"]
    yield [*search, f"{output}/minilm/warm_start", SETS[0]]
    for name in SETS:
        if not (output / name / EVALUATE.name / JSON_NAME).exists():
            yield [*local, f"--gin_file={output}/{name}.gin"]


def measured(folder: pathlib.Path) -> dict[str, Any]:
    """Returns rows and differences of a set, from the folder of its report.

    "rows" are label -> metric -> [mean, low, high], "lost" label -> shares of the
    questions, "differences" what -> metric -> [mean, low, high].
    """
    report = json.loads((folder / JSON_NAME).read_text())
    comparison, same = report["comparison"], report["same_reader"]
    rows = {
        row["label"]: row["metrics"]
        for row in (*same["rows"], *comparison["baselines"], *comparison["rows"])
    }
    for row in same["rows"]:
        rows[row["label"]] = row["metrics"] | rows[row["label"]]
    control = [
        figure
        for figure in report["control"]["figures"]
        if figure["moment"] == MOMENTS[AFTER_FINETUNING]
    ]
    rows["ORQA"] = {figure["metric"]: figure["without_realm"] for figure in control}
    differences = {
        "ORQA": {figure["metric"]: figure["difference"] for figure in control}
    }
    for found in same["differences"]:
        differences.setdefault(found["before"], {})[found["metric"]] = found["interval"]
    files = {"ORQA": CONTROL_PREDICTIONS_NAME, AFTER_FINETUNING: PREDICTIONS_NAME}
    files |= {
        baseline.label: BASELINE_PREDICTIONS_NAME.format(baseline.value)
        for baseline in Baseline
        if baseline is not Baseline.CLOSED_BOOK
    }
    lost = {label: _lost(folder / name) for label, name in files.items()}
    return {"rows": rows, "lost": lost, "differences": differences}


def _lost(predictions: pathlib.Path) -> list[float]:
    lines = predictions.read_text().splitlines()
    counts = Counter(json.loads(line)["outcome"] for line in lines)
    wrong = (Outcome.NOT_READ, Outcome.WRONG_BLOCK, Outcome.WRONG_SPAN)
    return [counts[outcome.value] / len(lines) for outcome in wrong]


_NAMES = {
    Baseline.CLOSED_BOOK.label: "closed book, the majority answer",
    RANDOM_BLOCKS: RANDOM_BLOCKS,
    BM25: BM25,
    BEFORE_TRAINING: "MiniLM, untrained",
    AFTER_WARM_START: "ICT, no questions",
    AFTER_REALM: "REALM, no questions",
    "ORQA": "ORQA: ICT, fine-tuned",
    AFTER_FINETUNING: "REALM: the same with REALM between",
    Baseline.ORACLE.label: "oracle block",
}


def as_text(results: Mapping[str, dict[str, Any]], command: str) -> str:
    """Returns a table of each set in Markdown, and what REALM adds to the others."""
    parts = [f"    {command}"]
    for name, result in results.items():
        rows, lost = result["rows"], result["lost"]
        lines = [
            (
                _NAMES[label],
                *(
                    _cell(rows[label].get(metric))
                    for metric in (*_RECALLS, EXACT_MATCH, F1)
                ),
                ", ".join(f"{100 * share:.1f}" for share in lost.get(label, ())),
            )
            for label in _NAMES
        ]
        count = rows[AFTER_FINETUNING][EXACT_MATCH]["count"]
        parts += [f"**{name}**, {count} questions of dev:", table(_HEADS, lines)]
    others = results[SETS[0]]["differences"]
    heads = ("REALM minus, paired, points of exact match", *results)
    lines = [
        (
            _NAMES[label],
            *(
                _cell(result["differences"][label][EXACT_MATCH], "+.1f")
                for result in results.values()
            ),
        )
        for label in others
    ]
    parts += [table(heads, lines), f"{today()}, {machine()}."]
    return "\n\n".join(parts)


def _cell(interval: Mapping[str, Any] | None, form: str = ".1f") -> str:
    if interval is None:
        return ""
    return Interval(**interval).percent(form)


def main() -> None:
    """Trains and measures what is missing, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--questions", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder")
    parser.add_argument(
        "--one_in", type=int, default=1, help="of so many passages, for a shorter run"
    )
    parser.add_argument("--warm_start", type=int, default=180, help="updates")
    parser.add_argument("--pretrain", type=int, default=30, help="updates of REALM")
    parser.add_argument("--finetune", type=int, default=180, help="updates")
    flags = parser.parse_args()
    output: pathlib.Path = flags.output
    stages = ("warm_start", "pretrain", "finetune")
    updates = {stage: getattr(flags, stage) for stage in stages}
    places = argparse.Namespace(page=flags.page)
    with reporting("open_qa", places):
        output.mkdir(parents=True, exist_ok=True)
        text = output / "passages.jsonl"
        passages = write_text(flags.corpus, flags.questions, flags.one_in, text)
        write_sets(flags.questions, passages, output / "questions")
        write_chains(output, updates)
        for command in commands(output):
            run_step(command, output / "output.txt")
        results = {name: measured(output / name / EVALUATE.name) for name in SETS}
        command = command_line(
            "open_qa", {"FILE": flags.corpus, "FOLDER": flags.questions}
        )
        publish("open_qa", as_text(results, command), results, places)


if __name__ == "__main__":
    main()
