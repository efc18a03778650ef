"""Measures ORQA, REALM and their baselines on three published sets of questions.

    python -m bench.open_qa --corpus FILE --questions FOLDER --output runs/open_qa \
        --page docs/results.md

FILE is text as `realm prepare` reads it. FOLDER has EntityQuestions, WebQuestions and
CuratedTREC as JSON lines, one file a split, whose names begin with those of the sets in
lower case (`webquestions.train.jsonl`). Where there is no dev file, dev is the tenth of
train that ORQA held out.

From MiniLM's weights, with the settings of gin/runs/quickstart.gin where `_CHAIN` has
no others: ICT for the retriever and masked sentences for the reader, then fine-tuning
on the train questions of all sets (ORQA), or REALM and the same fine-tuning (REALM).
Nothing is chosen on dev. Each set's dev questions are then answered by both, and
REALM's reader reads what the baselines find. The commands are those of a user; each
resumes or is skipped where it is done, so that this one is resumed by running it again.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from bench.command import (
    one_line_errors,
    require_room,
    run_step,
)
from realm_jax.data.questions import Question, records_of, write_questions
from realm_jax.data.splits import TRAIN
from realm_jax.errors import BadInputError
from realm_jax.prepare.open_qa.sets import DEV, is_dev

SETS = ("EntityQuestions", "WebQuestions", "CuratedTREC")

_CHAIN = """\
include "gin/runs/quickstart.gin"

ROOT = "{output}/{run}"
NAME = "open_qa"
SOURCE = "{output}/passages.jsonl"
QUESTIONS = "{output}/questions/all.jsonl"
STAGES = {stages}
{corpus_of}

NUM_READ = 5

prepare/EXAMPLES = ["salient", "ict", "questions"]

# MiniLM's retriever at a rate for models that were pre-trained, 2e-5.
warm_start/PAIRS_TASK = "{pairs}"
warm_start/BATCH_SIZE = 16
warm_start/RETRIEVER_RATE = 0.04
warm_start/TRAIN_STEPS = {warm_start}
warm_start/WARMUP_STEPS = None

pretrain/WARM_START = "{output}/orqa/warm_start"
pretrain/TRAIN_STEPS = {pretrain}
pretrain/WARMUP_STEPS = None
pretrain/REFRESH_PERIOD = {pretrain}
pretrain/QUESTIONS = ""

finetune/TRAIN_STEPS = {finetune}
finetune/WARMUP_STEPS = None
finetune/EVALUATION_PERIOD = {finetune}
finetune/QUESTIONS = ""
"""


@dataclasses.dataclass(frozen=True)
class Updates:
    """Updates of each stage."""

    warm_start: int
    pretrain: int
    finetune: int


def write_text(
    corpus: str, folder: pathlib.Path, one_in: int, path: pathlib.Path
) -> set[str]:
    """Writes one passage in so many, and those that answer a question of dev.

    Args:
      corpus: JSON lines of passages.
      folder: that of the sets, whose questions may have `gold_ids`.
      one_in: the passages are those whose number is a multiple of it.
      path: the file to write.

    Returns:
      The ids of the passages that were written.
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

    Args:
      folder: the sets.
      passages: the text; questions of other passages are left out.
      output: the folder to write to.

    Raises:
      BadInputError: a set is missing or has another format.
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


def write_chains(output: pathlib.Path, updates: Updates) -> None:
    """Writes the gin files of the chains: minilm, which trains nothing, orqa, realm."""
    prepared = f'CORPUS = "{output}/orqa/corpus"'
    nothing = dataclasses.replace(updates, warm_start=0)
    for run, stages, corpus_of, pairs, steps in (
        ("orqa", ["prepare", "warm-start", "finetune"], "", "open_qa_ict", updates),
        ("minilm", ["warm-start"], prepared, "", nothing),
        ("realm", ["pretrain", "finetune"], prepared, "", updates),
    ):
        text = _CHAIN.format(
            output=output,
            run=run,
            stages=json.dumps(stages),
            corpus_of=corpus_of,
            pairs=pairs,
            **dataclasses.asdict(steps),
        )
        (output / f"{run}.gin").write_text(text)


def commands(output: pathlib.Path) -> Iterator[list[str]]:
    """Yields what trains the chains, in order.

    The searches make the indexes of the starts, which later stages copy.
    """
    realm = str(pathlib.Path(sys.executable).parent / "realm")
    local = [sys.executable, "-m", "tpu_launch", "local"]
    first = '--gin.STAGES=["prepare", "warm-start"]'
    yield [*local, f"--gin_file={output}/orqa.gin", first]
    yield [realm, "search", f"{output}/orqa/warm_start", SETS[0], "--k=1"]
    yield [*local, f"--gin_file={output}/realm.gin"]
    yield [*local, f"--gin_file={output}/orqa.gin"]
    yield [*local, f"--gin_file={output}/minilm.gin"]
    corpus = f"--corpus={output}/orqa/corpus"
    yield [realm, "search", f"{output}/minilm/warm_start", SETS[0], "--k=1", corpus]


def main() -> None:
    """Trains and measures what is missing, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--questions", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder")
    parser.add_argument("--page", type=pathlib.Path, help="write the table here, too")
    parser.add_argument(
        "--one_in", type=int, default=1, help="of so many passages, for a shorter run"
    )
    parser.add_argument("--warm_start", type=int, default=180, help="updates")
    parser.add_argument("--pretrain", type=int, default=30, help="updates of REALM")
    parser.add_argument("--finetune", type=int, default=180, help="updates")
    flags = parser.parse_args()
    output: pathlib.Path = flags.output
    updates = Updates(flags.warm_start, flags.pretrain, flags.finetune)
    with one_line_errors():
        require_room("open_qa", argparse.Namespace(page=flags.page))
        output.mkdir(parents=True, exist_ok=True)
        text = output / "passages.jsonl"
        passages = write_text(flags.corpus, flags.questions, flags.one_in, text)
        write_sets(flags.questions, passages, output / "questions")
        write_chains(output, updates)
        for command in commands(output):
            run_step(command, output / "output.txt")


if __name__ == "__main__":
    main()
