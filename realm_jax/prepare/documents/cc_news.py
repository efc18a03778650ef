"""Reads CC-News, the news articles that news-please extracts from Common Crawl.

It accepts two variants of the format: that of news-please (`NewsArticle`, with
`maintext`) and that of the published data set `cc_news` (with `text`), also in TFDS.
"""

import json
from collections.abc import Mapping
from typing import Any

from realm_jax.data.documents import Document
from realm_jax.data.records import RecordError, clean_text, json_object, shorten
from realm_jax.prepare.documents.files import find_files
from realm_jax.prepare.documents.lines import LineSource
from realm_jax.prepare.documents.source import SHARD_BYTES

# The first field that is present and not empty is used. A description is the lead of
# an article whose body could not be extracted.
TEXT_FIELDS = ("maintext", "text", "description")
_TITLE_FIELDS = ("title", "title_page", "title_rss")
_ID_FIELDS = ("url", "filename", *_TITLE_FIELDS)


def cc_news(pattern: str, *, shard_bytes: int = SHARD_BYTES) -> LineSource:
    """Returns a source of the articles in JSON-lines files."""
    paths = find_files(pattern, "CC-News as JSON lines")
    return LineSource("cc_news", paths, article_from_json, shard_bytes=shard_bytes)


def article_from_json(line: bytes, where: str) -> Document:
    """Reads a line of CC-News."""
    return article_from_fields(json_object(line, where), where)


def article_from_fields(fields: Mapping[str, Any], where: str) -> Document:
    """Converts the fields of an article to a document, identified by its address.

    Args:
      fields: strings or None; the crawler sets fields that it did not find to None.
    """
    if not any(name in fields for name in TEXT_FIELDS):
        raise RecordError(
            where,
            f"expected one of the fields {', '.join(TEXT_FIELDS)}, got "
            f"{shorten(', '.join(fields))}; correct the record.",
        )
    return Document(
        title=_first(fields, _TITLE_FIELDS, where),
        text=_first(fields, TEXT_FIELDS, where),
        source_id=_first(fields, _ID_FIELDS, where),
    )


def _first(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = fields.get(name)
        if not isinstance(value, str | None):
            raise RecordError(
                where,
                f"expected {name!r} to be a string or null, got "
                f"{shorten(json.dumps(value, default=str))}; correct the record.",
            )
        if value and value.strip():
            return clean_text(value)
    return ""
