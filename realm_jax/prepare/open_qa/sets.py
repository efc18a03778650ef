"""Defines the published Open-QA sets, and finds their questions.

They are in files with known names, or in a dataset of TFDS. Importing this module
imports TensorFlow.
"""

import fnmatch
import logging
import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from jaxtyping import Bool

from realm_jax.data.questions import Question, read_questions
from realm_jax.data.records import read_text
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.tfds import (
    data_folder,
    prepared_dataset,
    read_split,
)
from realm_jax.prepare.open_qa import formats
from realm_jax.prepare.open_qa.formats import Record
from realm_jax.storage import open_store

TRAIN, DEV, TEST = SPLITS = ("train", "dev", "test")
JSON_LINES = "json_lines"

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A folder or a file, local or gs://; `tfds:NAME`; or the file of each split.

NAME is `dataset/config:version`, where config and version are optional, optionally
followed by `@FOLDER`, the folder in which TFDS has prepared it.
"""

Layout: TypeAlias = Mapping[str, str]
"""Published file name of each split.

`*` matches any number of files in one folder.
"""

_TFDS = "tfds:"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionSet:
    """Published form of a set.

    Attributes:
      read: yields the records of a file, given its path.
      layouts: the names of its files, for each form in which it is published.
      tfds_splits: name of each split in TFDS, if TFDS has the set.
      tfds_record: converts an example of TFDS to a record.
      answers_are_patterns: whether its answers are regular expressions.
      topic_in_name: whether its file names begin with the topic of the questions.
    """

    read: Callable[[str], Iterable[Record]]
    layouts: Sequence[Layout]
    tfds_splits: Mapping[str, str] = field(default_factory=dict)
    tfds_record: Callable[[Mapping[str, Any]], Record] | None = None
    answers_are_patterns: bool = False
    topic_in_name: bool = False


def read_set(kind: str, source: Source) -> list[Question]:
    """Reads a set, with those of the splits train, dev and test that it has.

    The official development set is the test split where the test set has no published
    answers. A set without a dev split gets one, see `is_dev`. A question without an id
    gets one from its position in the set, because predictions are joined by id.

    Args:
      kind: a key of `SETS`, or "json_lines" for `read_questions`.
    """
    if kind == JSON_LINES and not isinstance(source, Mapping):
        return read_questions(source)
    if kind not in SETS:
        raise BadInputError(
            f"expected a kind of questions ({', '.join(SETS)}, or {JSON_LINES} in one "
            f"file), got {kind!r}; name one of these."
        )
    known = SETS[kind]
    dataset = tfds_name(source)
    if dataset is None:
        records = _read_files(kind, known, source)
    else:
        records = _read_dataset(kind, known, dataset)
    questions = _questions(records, known.answers_are_patterns)
    count = sum(map(len, records.values()))
    if len(questions) < count:
        _log.warning(
            "%s: left out %d of %d questions, which have no answer",
            source,
            count - len(questions),
            count,
        )
    if not questions:
        raise BadInputError(
            f"expected questions of {kind} in {source}, got none; is it whole?"
        )
    return questions if DEV in records else _with_dev_split(questions)


def is_dev(questions: Sequence[str]) -> Bool[np.ndarray, " question"]:
    """Marks the questions of a train split that are held out as dev.

    ORQA's rule (Lee et al. 2019) selects a tenth: FarmHash's fingerprint64 of the
    question, modulo 100000, ends in 0. NQ-open keeps 79,168 questions and holds out
    8,757; WebQuestions 3,417 and 361; CuratedTREC 1,353 and 133.
    """
    texts = tf.constant([question.encode() for question in questions], tf.string)
    # This op is fingerprint64 modulo the number of buckets, on every platform.
    return tf.strings.to_hash_bucket_fast(texts, 100_000).numpy() % 10 == 0


def _with_dev_split(questions: list[Question]) -> list[Question]:
    held_out = is_dev([question.question for question in questions])
    return [
        replace(question, split=DEV) if question.split == TRAIN and held else question
        for question, held in zip(questions, held_out, strict=True)
    ]


def _questions(
    records: Mapping[str, Sequence[Record]], answers_are_patterns: bool
) -> list[Question]:
    """Converts the records that have answers to questions with unique ids."""
    seen: Counter[str | None] = Counter()
    questions = []
    for split, in_split in records.items():
        for record in in_split:
            seen[record.id] += 1
            again = f"#{seen[record.id]}" if seen[record.id] > 1 else ""
            if record.answers:
                question = Question(
                    id=f"{record.id}{again}",
                    index=len(questions),
                    question=record.question,
                    answers=record.answers,
                    split=split,
                    topic=record.topic,
                    answers_are_patterns=answers_are_patterns,
                )
                questions.append(question)
    return questions


def _read_files(
    kind: str, known: QuestionSet, source: Source
) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = {}
    for split, paths in files_by_split(source, known.layouts).items():
        records[split] = []
        for path in paths:
            topic = None
            if known.topic_in_name:
                topic = posixpath.basename(path).split(".")[0]
            place = "-".join(filter(None, [kind, split, topic]))
            for row, record in enumerate(known.read(path)):
                name = record.id or f"{place}-{row}"
                records[split].append(record._replace(id=name, topic=topic))
    return records


def _read_dataset(
    kind: str, known: QuestionSet, dataset: str
) -> dict[str, list[Record]]:
    if known.tfds_record is None:
        offered = [name for name in SETS if SETS[name].tfds_record]
        raise BadInputError(
            f"expected a kind that TFDS has ({', '.join(offered)}), got {kind!r}; name "
            "its files instead."
        )
    ours = {theirs: split for split, theirs in known.tfds_splits.items()}
    records: defaultdict[str, list[Record]] = defaultdict(list)
    for split, example in read_tfds(dataset, ours):
        try:
            record = known.tfds_record(example)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInputError(
                f"expected examples of {kind} in {dataset}, got the features "
                f"{', '.join(example)}; name another dataset, or another kind."
            ) from error
        name = record.id or example["tfds_id"].decode()
        records[ours[split]].append(record._replace(id=name))
    return records


def _whole(reader: formats.Reader) -> Callable[[str], Iterable[Record]]:
    """Returns a reader of files that are read at once."""
    return lambda path: reader(read_text(path), path)


def _texts(values: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.decode() for value in values))


def _record(answers: str) -> Callable[[Mapping[str, Any]], Record]:
    return lambda example: Record(
        example["question"].decode(), _texts(example[answers])
    )


def _trivia_qa_record(example: Mapping[str, Any]) -> Record:
    answer, name = example["answer"], example["question_id"].decode()
    answers = formats.trivia_answers(
        answer["value"].decode(),
        _texts(answer["aliases"]),
        _texts(answer["normalized_aliases"]),
        name,
    )
    return Record(example["question"].decode(), answers, id=name)


def _squad_record(example: Mapping[str, Any]) -> Record:
    answers, name = _texts(example["answers"]["text"]), example["id"].decode()
    return Record(example["question"].decode(), answers, id=name)


def _train_and_test(train: str, test: str) -> Layout:
    return {TRAIN: train, TEST: test}


def _resplit(name: str) -> Layout:
    """Returns the names of the files that ORQA's script writes and ORQA published."""
    return {split: f"{name}.resplit.{split}.jsonl" for split in SPLITS}


SETS: Mapping[str, QuestionSet] = {
    "nq_open": QuestionSet(
        _whole(formats.question_answer_lines),
        [
            _train_and_test("NQ-open.train.jsonl", "NQ-open.dev.jsonl"),
            _resplit("NaturalQuestions"),
            _train_and_test("NaturalQuestions-train.txt", "NaturalQuestions-dev.txt"),
        ],
        _train_and_test("train", "validation"),
        _record("answer"),
    ),
    "natural_questions": QuestionSet(
        formats.natural_questions,
        [
            _train_and_test("nq-train-*.jsonl", "nq-dev-*.jsonl"),
            _train_and_test(
                "v1.0-simplified_simplified-nq-train.jsonl",
                "v1.0-simplified_nq-dev-all.jsonl",
            ),
        ],
    ),
    "web_questions": QuestionSet(
        _whole(formats.web_questions),
        [
            _train_and_test(
                "webquestions.examples.train.json", "webquestions.examples.test.json"
            ),
            _resplit("WebQuestions"),
            _train_and_test("WebQuestions-train.txt", "WebQuestions-test.txt"),
        ],
        _train_and_test("train", "test"),
        _record("answers"),
    ),
    "curated_trec": QuestionSet(
        _whole(formats.curated_trec),
        [
            _train_and_test("CuratedTrec-train.txt", "CuratedTrec-test.txt"),
            _resplit("CuratedTrec"),
            _train_and_test("large2180-train.tsv", "large2180-test.tsv"),
            {
                TRAIN: "curatedtrec-train.json",
                DEV: "curatedtrec-dev.json",
                TEST: "curatedtrec-test.qa.csv",
            },
        ],
        answers_are_patterns=True,
    ),
    "trivia_qa": QuestionSet(
        _whole(formats.trivia_qa),
        [_train_and_test("unfiltered-web-train.json", "unfiltered-web-dev.json")],
        _train_and_test("train", "validation"),
        _trivia_qa_record,
    ),
    "entity_questions": QuestionSet(
        _whole(formats.question_answer_list),
        [{split: f"{split}/*.{split}.json" for split in SPLITS}],
        topic_in_name=True,
    ),
    "squad_open": QuestionSet(
        _whole(formats.squad),
        [
            _train_and_test("train-v1.1.json", "dev-v1.1.json"),
            _train_and_test("train-v2.0.json", "dev-v2.0.json"),
        ],
        _train_and_test("train", "validation"),
        _squad_record,
    ),
}
"""The sets by kind."""


def tfds_name(source: Source) -> str | None:
    """Returns NAME for `tfds:NAME`, None for any other source."""
    if isinstance(source, Mapping):
        return None
    location = os.fspath(source)
    return location.removeprefix(_TFDS) if location.startswith(_TFDS) else None


def files_by_split(source: Source, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """Returns the files of each existing split, in the order of `SPLITS`.

    Args:
      source: a file with a published name, plain or with `.gz`; a folder with such
        files at any depth; or the file of each split, with any name.
      layouts: the published forms of the set; the first that is found is used.
    """
    if isinstance(source, Mapping):
        if not source or set(source) - set(SPLITS):
            raise BadInputError(
                f"expected a file for any of {', '.join(SPLITS)}, got "
                f"{sorted(source)}; name the splits so."
            )
        return {s: [os.fspath(source[s])] for s in SPLITS if s in source}
    location = os.fspath(source)
    for layout in layouts:
        for split, pattern in layout.items():
            if _is_named(posixpath.basename(location), posixpath.basename(pattern)):
                return {split: [location]}
    return _files_in_folder(location, layouts)


def read_tfds(name: str, splits: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (split, example) of a prepared dataset, in the order of its files.

    Args:
      name: the dataset, optionally with `@FOLDER`; see `data_folder`.
      splits: the splits to read, by their names in TFDS.
    """
    dataset, _, folder = name.partition("@")
    builder = prepared_dataset(dataset, data_folder(folder))
    found = builder.info.splits
    for split in splits:
        if split not in found:
            raise BadInputError(
                f"expected the split {split!r} of {dataset} in {builder.data_dir}, "
                f"found {', '.join(found) or 'none'}; name another dataset."
            )
        for example in read_split(builder, split, dataset, add_tfds_id=True):
            yield split, example


def _files_in_folder(location: str, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    folder = open_store(location)
    names = folder.list()
    for layout in layouts:
        found = {s: _matching(names, layout[s], location) for s in layout}
        if any(found.values()):
            return {
                split: [f"{location.rstrip('/')}/{name}" for name in found[split]]
                for split in SPLITS
                if found.get(split)
            }
    known = " or ".join(" and ".join(layout.values()) for layout in layouts)
    raise BadInputError(
        f"expected {known} in {folder.url()}, found none of them; correct the path, or "
        "name the file of each split."
    )


def _matching(names: Sequence[str], pattern: str, location: str) -> list[str]:
    found = [
        name
        for name in names
        if _is_named(name, pattern) or _is_named(name, f"*/{pattern}")
    ]
    folders = {posixpath.dirname(name) for name in found}
    if len(folders) > 1 or (len(found) > 1 and "*" not in pattern):
        raise BadInputError(
            f"expected {pattern} once below {location}, found {', '.join(found[:2])}; "
            "name one of their folders, or the file of each split."
        )
    return found


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.removesuffix(".gz"), pattern)
