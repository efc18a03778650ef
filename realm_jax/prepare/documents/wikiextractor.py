"""Reads WikiExtractor's output with `--json`: AA/wiki_00, AA/wiki_01, ..."""

import html

from etils import epath

from realm_jax.data.documents import (
    NO_ARTICLE,
    Document,
    LeftOut,
    is_article,
    title_and_text,
)
from realm_jax.data.records import clean_text, json_object
from realm_jax.prepare.documents.files import find_below, find_files
from realm_jax.prepare.documents.lines import LineSource
from realm_jax.prepare.documents.source import SHARD_BYTES


def wikiextractor(path: str, *, shard_bytes: int = SHARD_BYTES) -> LineSource:
    """Returns a source of the pages in the files `wiki_*`, plain, .bz2 or .gz.

    Args:
      path: a folder with such files at any depth, a single file, or a pattern of files.
    """
    what = "WikiExtractor's files wiki_00 and so on"
    if epath.Path(path).expanduser().is_dir():
        paths = find_below(path, what, lambda name: name.startswith("wiki_"))
    else:
        paths = find_files(path, what)
    return LineSource("wikiextractor", paths, page_from_json, shard_bytes=shard_bytes)


def page_from_json(line: bytes, where: str) -> Document | LeftOut:
    """Reads a page `{"id", "url", "title", "text"}`.

    WikiExtractor escapes HTML, and some of its versions begin the text with the title
    on a separate line; both are undone.
    """
    fields = json_object(line, where)
    title, text = map(html.unescape, title_and_text(fields, where))
    if not is_article(title):
        return LeftOut(where, NO_ARTICLE)
    first_line, _, rest = text.partition("\n")
    if title and first_line.strip() == title.strip():
        text = rest.lstrip("\n")
    return Document(title, text, clean_text(str(fields.get("id") or title)))
