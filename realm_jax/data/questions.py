"""Reads and writes questions with their answers, and converts them to arrays."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from realm_jax.data.blocks import DOCUMENTS_FILE, BlockStore, read_documents
from realm_jax.data.features import (
    Example,
    FeatureSpecs,
    int32,
    query_row,
    stack,
)
from realm_jax.data.records import answers_field, json_object, read_text, text_field
from realm_jax.data.wordpiece import WordPiece
from realm_jax.data.words import normalise_answer, normalise_title
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store

QUERY_LENGTH = 96
MAX_ANSWERS = 8
MAX_ANSWER_LENGTH = 10
"""Longest span the reader considers, in wordpieces."""
MAX_ANSWER_TEXT = 64
"""Longest answer that labels compare as a text too, in characters."""
MAX_PATTERN_LENGTH = 512
"""Longest regular expression as an answer, in characters; CuratedTREC needs 267."""

_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Question:
    """A question as read from its file.

    Attributes:
      id: identifies the question; predictions are joined with references by it. One
        that has none is called by its row.
      index: its row in the file or set, counted from 0 without blank lines.
      answers: acceptable answers, at least one.
      split: train, dev, test or any other name in the file.
      answers_are_patterns: the answers are regular expressions, as in CuratedTREC.
    """

    id: str
    index: int
    question: str
    answers: tuple[str, ...]
    split: str
    title: str | None = None
    topic: str | None = None
    answers_are_patterns: bool = False


def read_questions(
    path: str | os.PathLike[str], split: str | None = None
) -> list[Question]:
    """Reads a JSON-lines file of questions, local or gs://, plain or gzipped (`.gz`).

    Args:
      path: lines with the fields question, answers (a list of texts) and split, and
        optionally id, title, topic and answers_are_patterns (true or false).
      split: of which questions are wanted, None for all. A file in which no question
        has a split is all of this one.
    """
    name = os.fspath(path)
    records = list(records_of(name))
    if split is not None and not any("split" in record for _, record in records):
        records = [(line, {**record, "split": split}) for line, record in records]
    questions = list(parse_records(name, records))
    splits = sorted({question.split for question in questions})
    kept = [q for q in questions if split is None or q.split == split]
    if not kept:
        wanted = "questions" if split is None else f"questions of the split {split!r}"
        raise BadInputError(
            f"expected {wanted} in {path}, got none among {len(questions)} of the "
            f"splits {splits}; name another split or file."
        )
    return kept


def write_questions(
    path: str | os.PathLike[str], questions: Iterable[Question]
) -> None:
    """Writes a file for `read_questions`, atomically.

    Args:
      questions: in the order of their index, which is their row in the file.
    """
    lines = [json.dumps(_record(q), ensure_ascii=False) + "\n" for q in questions]
    folder, name = os.path.split(os.fspath(path))
    open_store(folder or ".").write(name, "".join(lines).encode())


def questions_fingerprint(questions: Iterable[Question]) -> str:
    """Returns a SHA-256 (hex) of all that is known of questions, in their order."""
    lines = (json.dumps(_record(question)) + "\n" for question in questions)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def question_specs(
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    max_pattern_length: int = 0,
) -> FeatureSpecs:
    """Returns the features of one example of `types.QuestionBatch`.

    `answer_patterns` is among them if `max_pattern_length` is not 0.
    """
    specs = {
        "question_ids": int32(query_length),
        "answer_ids": int32(max_answers, max_answer_length),
        "answer_texts": int32(max_answers, MAX_ANSWER_TEXT),
        "question_index": int32(),
    }
    if max_pattern_length:
        specs["answer_patterns"] = int32(max_answers, max_pattern_length)
    return specs


def question_examples(
    questions: Sequence[Question],
    vocabulary: WordPiece,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    max_pattern_length: int = 0,
) -> Example:
    """Converts questions to arrays of `question_specs`, in the given order.

    A question has its answers in `answer_ids` or its patterns in `answer_patterns`.

    Args:
      query_length: wordpieces of `[CLS] question [SEP]`; longer questions are
        truncated.
      max_answer_length: longest answer, in wordpieces. Longer ones are left out,
        because no span of the reader could match them.
      max_pattern_length: longest pattern, in characters. 0 leaves patterns out, which
        suffices to answer the questions, but not to train on them.
    """
    specs = question_specs(
        query_length, max_answers, max_answer_length, max_pattern_length
    )
    encoded = vocabulary.encode_batch([question.question for question in questions])
    examples = []
    for question, encoding in zip(questions, encoded, strict=True):
        texts, patterns = question.answers, ()
        if question.answers_are_patterns:
            texts, patterns = (), question.answers
        ids, normalised = _answers(texts, vocabulary, max_answers, max_answer_length)
        example = {
            "question_ids": query_row(encoding.ids, query_length, vocabulary),
            "answer_ids": _padded(ids, specs["answer_ids"].shape),
            "answer_texts": _padded(normalised, specs["answer_texts"].shape),
            "question_index": question.index,
        }
        if max_pattern_length:
            shape = specs["answer_patterns"].shape
            example["answer_patterns"] = _pattern_rows(question, patterns, shape)
        examples.append(example)
    return stack(examples, specs)


def cut_questions(
    question_ids: Int[np.ndarray, "question query"], length: int
) -> Int[np.ndarray, "question cut"]:
    """Returns questions of at most `length` wordpieces; [SEP] stays the last of each.

    A question that was cut is the one that `query_row` makes of its text.
    """
    if question_ids.shape[1] <= length:
        return question_ids
    cut = question_ids[:, :length].copy()
    last = np.count_nonzero(question_ids, axis=1) - 1
    sep = question_ids[np.arange(len(question_ids)), last]
    cut[:, -1] = np.where(last >= length, sep, cut[:, -1])
    return cut


def pattern_length(questions: Iterable[Question]) -> int:
    """Returns the `max_pattern_length` of a set: 0 if no answer is a pattern."""
    any_pattern = any(question.answers_are_patterns for question in questions)
    return MAX_PATTERN_LENGTH if any_pattern else 0


def require_patterns_fit(questions: Iterable[Question], max_length: int) -> None:
    """Checks that the patterns of questions can be stored as arrays."""
    for question in questions:
        for pattern in question.answers if question.answers_are_patterns else ():
            # Code point 0 is padding; a pattern can spell it as \0.
            if len(pattern) > max_length or "\0" in pattern:
                raise BadInputError(
                    f"expected patterns of at most {max_length} characters and none "
                    f"of them NUL, got {pattern!r:.40} of {len(pattern)} in the "
                    f"question {question.id!r}; raise max_pattern_length or correct "
                    "the pattern."
                )


def decode_patterns(rows: Int[np.ndarray, "answer character"]) -> tuple[str, ...]:
    """Returns the patterns of a question from its `answer_patterns`."""
    return tuple(text for text in decode_texts(rows) if text)


def decode_texts(rows: Int[np.ndarray, "answer character"]) -> list[str]:
    """Returns the text of each row of `answer_texts`, "" where it is unused."""
    return ["".join(map(chr, row[row > 0])) for row in rows]


def _answers(
    answers: Sequence[str], vocabulary: WordPiece, max_answers: int, max_length: int
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Returns wordpieces and normalised text of each answer that is kept."""
    kept: dict[tuple[str, tuple[int, ...]], None] = {}
    encodings = vocabulary.encode_batch(answers)
    for answer, encoding in zip(answers, encodings, strict=True):
        if 0 < len(encoding) <= max_length:
            # Spellings that differ only in case are the same.
            kept[normalise_answer(answer), tuple(encoding.ids.tolist())] = None
    pairs = list(kept)[:max_answers]
    texts = [text if len(text) <= MAX_ANSWER_TEXT else "" for text, _ in pairs]
    return [ids for _, ids in pairs], [list(map(ord, text)) for text in texts]


def _pattern_rows(
    question: Question, patterns: Sequence[str], shape: tuple[int, ...]
) -> np.ndarray:
    max_answers, max_length = shape
    require_patterns_fit([question], max_length)
    kept = list(dict.fromkeys(patterns))[:max_answers]
    return _padded([list(map(ord, pattern)) for pattern in kept], shape)


def _padded(rows: Sequence[Sequence[int]], shape: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(shape, np.int32)
    for row, values in zip(padded, rows, strict=False):
        row[: len(values)] = values
    return padded


def records_of(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line of a file that is not empty."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, json_object(line, f"{path}:{number}")


def parse_records(
    path: str, records: Iterable[tuple[int, dict[str, Any]]]
) -> Iterator[Question]:
    """Yields the questions in the objects of a file, given with their lines."""
    seen: dict[str, int] = {}
    for index, (number, record) in enumerate(records):
        question = _parse_question(record, f"{path}:{number}", index)
        if question.id in seen:
            raise BadInputError(
                f"{path}:{number}: expected an id of its own, got {question.id!r} as "
                f"on line {seen[question.id]}; change one of them."
            )
        seen[question.id] = number
        yield question


def _parse_question(record: dict[str, Any], place: str, index: int) -> Question:
    """Returns the question in a JSON object."""
    are_patterns = record.get("answers_are_patterns", False)
    if not isinstance(are_patterns, bool):
        raise BadInputError(
            f"{place}: expected 'answers_are_patterns' to be true or false, got "
            f"{are_patterns!r:.60}; correct the line."
        )
    return Question(
        id=_optional_text(record, "id", place) or f"question-{index + 1}",
        index=index,
        question=text_field(record, "question", place),
        answers=answers_field(record, "answers", place),
        split=_split(record, place),
        title=_optional_text(record, "title", place),
        topic=_optional_text(record, "topic", place),
        answers_are_patterns=are_patterns,
    )


def _split(record: dict[str, Any], place: str) -> str:
    if "split" not in record:
        raise BadInputError(
            f"{place}: expected a 'split', train, dev or test, got none; name one in "
            "each line, or let `realm init` divide the questions."
        )
    return text_field(record, "split", place)


def _optional_text(record: dict[str, Any], field: str, place: str) -> str | None:
    return None if record.get(field) is None else text_field(record, field, place)


def _record(question: Question) -> dict[str, Any]:
    record = dataclasses.asdict(question)
    del record["index"]
    return {name: value for name, value in record.items() if value not in (None, False)}


def describe_unknown_titles(
    questions: Sequence[Question], known: Collection[str]
) -> str | None:
    """Returns a line that counts questions about unknown articles, if there are any.

    Args:
      known: the titles of the articles, as `normalise_title` makes them.
    """
    titles = [question.title for question in questions if question.title is not None]
    unknown = [title for title in titles if normalise_title(title) not in known]
    if not unknown:
        return None
    named = list(dict.fromkeys(unknown))
    listed = ", ".join(f"{title!r:.80}" for title in named[:_NAMED])
    more = f" and {len(named) - _NAMED:,} more" * (len(named) > _NAMED)
    return (
        f"{len(unknown):,} of {len(titles):,} questions with a title name an article "
        f"that is not in the text: {listed}{more}; nothing counts as found for them"
    )


def unknown_titles(store: BlockStore, questions: Sequence[Question]) -> str | None:
    """Returns `describe_unknown_titles` for a corpus; reads a block of each document.

    Without titles among the questions nothing is read.
    """
    if all(question.title is None for question in questions):
        return None
    return describe_unknown_titles(questions, set(_titles(store)))


def _titles(store: BlockStore) -> Iterator[str]:
    firsts = np.arange(store.num_blocks)
    if DOCUMENTS_FILE in store.info["files"]:
        counts = np.array(read_documents(store)["num_blocks"])
        firsts = (np.cumsum(counts) - counts)[counts > 0]
    return (normalise_title(text.title) for text in store.iter_texts(firsts))
