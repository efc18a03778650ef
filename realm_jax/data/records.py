"""Text files and the fields of JSON records, with errors that name the place."""

import gzip
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.storage import UnavailableStoreError, open_store

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns a text file, local or gs://, plain or gzipped (`.gz`).

    Raises:
      BadInputError: it cannot be read, or is not UTF-8; the line is named.
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
        raise BadInputError(
            f"{location}:{line}: expected UTF-8, but the line cannot be read "
            f"({error}); convert the file."
        ) from error


def json_object(line: str, place: str) -> dict[str, Any]:
    """Returns the object that a line of JSON is.

    Raises:
      BadInputError: it is none; `place` is named.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{place}: expected a JSON object, got {line!r:.60} ({error}); correct the "
            "line."
        ) from error
    if not isinstance(record, dict):
        raise BadInputError(
            f"{place}: expected a JSON object, got {line!r:.60}; correct the line."
        )
    return record


def text_field(record: dict[str, Any], field: str, place: str) -> str:
    """Returns a field that is a text and not blank.

    Raises:
      BadInputError: it is something else; `place` is named.
    """
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(
            f"{place}: expected {field!r} to be a text, got {value!r:.60}; correct the "
            "line."
        )
    return _without_surrogates(value)


def answers_field(record: dict[str, Any], field: str, place: str) -> tuple[str, ...]:
    """Returns a field that is a list of texts, none blank, and at least one.

    Raises:
      BadInputError: it is something else; `place` is named.
    """
    answers = record.get(field)
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise BadInputError(
            f"{place}: expected {field!r} to be a list of at least one text and none "
            f"of them blank, got {answers!r:.60}; correct the line."
        )
    return tuple(_without_surrogates(answer) for answer in answers)


def _read_bytes(location: str) -> bytes:
    if "://" in location:
        folder, _, name = location.rpartition("/")
        content = open_store(folder).read(name)
    else:
        content = Path(location).expanduser().read_bytes()
    return gzip.decompress(content) if location.endswith(".gz") else content


def _without_surrogates(text: str) -> str:
    # Half of a pair of surrogates is no character and has no UTF-8.
    return _SURROGATE.sub("\ufffd", text)
