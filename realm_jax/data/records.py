"""Reads text files, records and their fields, with errors that name the place."""

import codecs
import gzip
import json
import os
import re
import textwrap
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.errors import BadInputError
from realm_jax.storage import UnavailableStoreError, open_store

_GZIP = b"\x1f\x8b"
_NEWLINE = b"\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadRecord(NamedTuple):
    """A record that is damaged.

    Attributes:
      reason: what was expected, what was received, and what to do.
    """

    where: str
    reason: str


class RecordError(BadInputError):
    """Raised when a record cannot be read; `record` holds the place and the reason."""

    def __init__(self, where: str, reason: str):
        super().__init__(where, reason)
        self.record = BadRecord(where, reason)

    def __str__(self) -> str:
        return f"{self.record.where}: {self.record.reason}"


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the content of a text file, local or gs://, plain or gzipped (`.gz`).

    Raises:
      BadInputError: it cannot be read, or is not UTF-8; the message names the line.
      UnavailableStoreError: the bucket did not answer.
    """
    location = os.fspath(path)
    try:
        content = _read_bytes(location)
    except UnavailableStoreError:
        raise
    except (OSError, EOFError, zlib.error, BadInputError) as error:
        raise BadInputError(
            f"expected a text file at {location}, but it cannot be read "
            f"({error}); check the path."
        ) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{location}:{line}: {_not_utf8(error, 'line')}") from error


def json_object(line: str | bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        record = json.loads(line if isinstance(line, str) else line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecordError(where, _not_utf8(error, "line")) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(
            where,
            f"expected a JSON object, got {shorten(line)} ({error}); correct the line.",
        ) from error
    if not isinstance(record, dict):
        raise RecordError(
            where, f"expected a JSON object, got {shorten(line)}; correct the line."
        )
    return record


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """Returns a field that must be a string and not blank."""
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise RecordError(
            where,
            f"expected {field!r} to be a text, got {value!r:.60}; correct the line.",
        )
    return clean_text(value)


def answers_field(record: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    """Returns a field that must be a non-empty list of strings, none blank."""
    answers = record.get(field)
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise RecordError(
            where,
            f"expected {field!r} to be a list of at least one text and none of them "
            f"blank, got {answers!r:.60}; correct the line.",
        )
    return tuple(clean_text(answer) for answer in answers)


def decode(value: bytes, what: str, where: str) -> str:
    """Decodes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RecordError(where, _not_utf8(error, what)) from error


def clean_text(text: str) -> str:
    """Replaces lone surrogates, which JSON can represent and UTF-8 cannot."""
    return _SURROGATE.sub("\ufffd", text)


def shorten(value: bytes | str) -> str:
    """Shortens a value to fit into an error message, to 80 characters at most."""
    text = value[:400]
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return textwrap.shorten(text, 80, placeholder="…")


def _not_utf8(error: UnicodeDecodeError, what: str) -> str:
    """Returns what is wrong with bytes that are not UTF-8, and what to do."""
    content, start = error.object, error.start
    line, column = content.count(_NEWLINE, 0, start), content.rfind(_NEWLINE, 0, start)
    found = f"the byte 0x{content[start]:02x} as byte {start - column}"
    if _NEWLINE in content:
        found += f" of line {line + 1}"
    todo = "save the file as UTF-8."
    if content.startswith(_GZIP):
        found, todo = "gzipped data", "end the name of the file in .gz."
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "UTF-16"
    return f"expected the {what} in UTF-8, got {found}; {todo}"


def _read_bytes(location: str) -> bytes:
    if "://" in location:
        folder, _, name = location.rpartition("/")
        content = open_store(folder).read(name)
    else:
        content = Path(location).expanduser().read_bytes()
    return gzip.decompress(content) if location.endswith(".gz") else content
