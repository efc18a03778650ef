"""Questions with their answers, and the arrays made of them."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realm_jax.data.features import Example, FeatureSpecs, int32, query_row, stack
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

QUERY_LENGTH = 96
MAX_ANSWERS = 8
MAX_ANSWER_LENGTH = 10
"""Wordpieces of the longest span the reader considers."""


@dataclass(frozen=True)
class Question:
    """A question as its file has it.

    Attributes:
      id: identifies the question; predictions are joined with references by it.
      index: its row in the file, counted from 0, blank lines left out.
      question: the text.
      answers: acceptable answers, at least one.
      title: the article the answer stands in, if known.
      split: train, dev, test or whatever the file says.
      topic: what it is about, if known.
    """

    id: str
    index: int
    question: str
    answers: tuple[str, ...]
    split: str
    title: str | None = None
    topic: str | None = None


def read_questions(
    path: str | os.PathLike[str], split: str | None = None
) -> list[Question]:
    """Reads a JSON-lines file of questions.

    Args:
      path: lines with the fields id, question, answers (a list of texts) and split,
        and maybe title and topic.
      split: keep the questions of this split; None keeps all.

    Raises:
      BadInputError: the file cannot be read, a line is not a question, an id occurs
        twice, or the split is empty. The message names file and line.
    """
    questions = list(_parse_lines(Path(path)))
    splits = sorted({question.split for question in questions})
    kept = [q for q in questions if split is None or q.split == split]
    if not kept:
        wanted = "questions" if split is None else f"questions of the split {split!r}"
        raise BadInputError(
            f"expected {wanted} in {path}, got none among {len(questions)} of the "
            f"splits {splits}; name another split or file."
        )
    return kept


def question_specs(
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> FeatureSpecs:
    """Returns the features of one example of `types.QuestionBatch`."""
    return {
        "question_ids": int32(query_length),
        "answer_ids": int32(max_answers, max_answer_length),
        "question_index": int32(),
    }


def question_examples(
    questions: Sequence[Question],
    vocabulary: WordPiece,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> Example:
    """Returns the arrays of the questions.

    Args:
      questions: as `read_questions` returns them.
      vocabulary: the tokenizer of the corpus.
      query_length: wordpieces of `[CLS] question [SEP]`; what does not fit is cut.
      max_answers: answers kept for each question, the first ones.
      max_answer_length: an answer of more wordpieces is left out, for no span of the
        reader could ever match it.

    Returns:
      The features of `question_specs` along a leading axis, in the order given.
    """
    specs = question_specs(query_length, max_answers, max_answer_length)
    encoded = vocabulary.encode_batch([question.question for question in questions])
    examples = [
        {
            "question_ids": query_row(encoding.ids, query_length, vocabulary),
            "answer_ids": _answer_rows(
                question.answers, vocabulary, specs["answer_ids"].shape
            ),
            "question_index": question.index,
        }
        for question, encoding in zip(questions, encoded, strict=True)
    ]
    return stack(examples, specs)


def _answer_rows(
    answers: Sequence[str], vocabulary: WordPiece, shape: tuple[int, ...]
) -> np.ndarray:
    max_answers, max_length = shape
    pieces = (encoding.ids for encoding in vocabulary.encode_batch(answers))
    # Spellings that differ in case or accents only are one answer to the reader. A
    # dictionary keeps the order in which the answers are given.
    kept = dict.fromkeys(
        tuple(ids.tolist()) for ids in pieces if 0 < len(ids) <= max_length
    )
    rows = np.zeros(shape, np.int32)
    for row, ids in zip(rows, list(kept)[:max_answers], strict=False):
        row[: len(ids)] = ids
    return rows


def _parse_lines(path: Path) -> Iterator[Question]:
    seen: dict[str, int] = {}
    index = 0
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        question = _parse(line, f"{path}:{number}", index)
        if question.id in seen:
            raise BadInputError(
                f"{path}:{number}: expected an id of its own, got {question.id!r} as "
                f"on line {seen[question.id]}; change one of them."
            )
        seen[question.id] = number
        index += 1
        yield question


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"expected questions (UTF-8, one JSON object a line) at {path}, but it "
            f"cannot be read ({error}); check the path."
        ) from error


def _parse(line: str, place: str, index: int) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadInputError(
            f"{place}: expected a JSON object, got {line!r:.60} ({error}); correct the "
            "line."
        ) from error
    if not isinstance(record, dict):
        raise BadInputError(
            f"{place}: expected a JSON object, got {line!r:.60}; correct the line."
        )
    answers = record.get("answers")
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise BadInputError(
            f"{place}: expected 'answers' to be a list of at least one text, got "
            f"{answers!r:.60}; correct the line."
        )
    return Question(
        id=_text(record, "id", place),
        index=index,
        question=_text(record, "question", place),
        answers=tuple(answers),
        split=_text(record, "split", place),
        title=_optional_text(record, "title", place),
        topic=_optional_text(record, "topic", place),
    )


def _text(record: dict[str, Any], field: str, place: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(
            f"{place}: expected {field!r} to be a text, got {value!r:.60}; correct the "
            "line."
        )
    return value


def _optional_text(record: dict[str, Any], field: str, place: str) -> str | None:
    return None if record.get(field) is None else _text(record, field, place)
