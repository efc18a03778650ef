"""Reads raw Natural Questions as ORQA made NQ-open of them (Lee et al. 2019).

A question keeps the short answers of all its annotations that have at most five tokens,
and the page is dropped. One without is a record without answers: those with a long
answer, with yes or no, or with nothing. A page has megabytes of HTML, so lines are read
one at a time.
"""

import re
from collections.abc import Iterator
from typing import Any

from etils import epath

from realm_jax.data.records import json_object, text_field
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.files import (
    is_compressed,
    read_range,
    unpack,
    whole_file,
)
from realm_jax.prepare.documents.lines import split_lines
from realm_jax.prepare.open_qa.formats import Record

MAX_ANSWER_TOKENS = 5
_MAX_LINE_BYTES = 1 << 28
_TAG = re.compile(r"<[^>]*>")


def natural_questions(path: str) -> Iterator[Record]:
    """Yields the questions of a file, in the original or in the simplified format.

    The original has `document_tokens`, the simplified one `document_text`, whose tokens
    are between spaces.
    """
    if is_compressed(path):
        chunks = unpack(path, path)
    else:
        chunks = read_range(whole_file(epath.Path(path)))
    for number, line in enumerate(split_lines(chunks, _MAX_LINE_BYTES), start=1):
        where = f"{path}:{number}"
        if line.content is None:
            raise _wrong("a line", where, f"one of {line.length:,} bytes")
        if line.content.strip():
            yield _question(json_object(line.content, where), where)


def _question(record: dict[str, Any], where: str) -> Record:
    try:
        tokens = _tokens(record)
        spans = [
            (answer["start_token"], answer["end_token"])
            for annotation in record["annotations"]
            for answer in annotation["short_answers"]
        ]
        answers = [_words(tokens, *span) for span in spans]
        name = str(record["example_id"])
    except (KeyError, TypeError, IndexError) as error:
        raise _wrong(
            "document_tokens or document_text, annotations with short_answers, and an "
            "example_id",
            where,
            f"{type(error).__name__}: {error}",
        ) from error
    short = [words for words in answers if 0 < len(words) <= MAX_ANSWER_TOKENS]
    texts = tuple(dict.fromkeys(" ".join(words) for words in short))
    return Record(text_field(record, "question_text", where), texts, id=name)


def _tokens(record: dict[str, Any]) -> list[str]:
    """Returns the tokens of the page, "" for those of HTML."""
    if "document_tokens" in record:
        tokens = record["document_tokens"]
        return ["" if token["html_token"] else token["token"] for token in tokens]
    tokens = record["document_text"].split(" ")
    return ["" if _TAG.fullmatch(token) else token for token in tokens]


def _words(tokens: list[str], start: int, end: int) -> list[str]:
    if not 0 <= start < end <= len(tokens):
        raise IndexError(f"tokens {start} to {end} of {len(tokens)}")
    return [token for token in tokens[start:end] if token]


def _wrong(expected: str, where: str, found: str) -> BadInputError:
    return BadInputError(
        f"{where}: expected {expected}, got {found}; is it a file of Natural Questions?"
    )
