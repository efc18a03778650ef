"""Opens the source of documents that is named on the command line or in gin."""

import re
from collections.abc import Callable

from etils import epath

from realm_jax.data.documents import document_from_json
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.files import (
    find_below,
    find_files,
    require_readable,
)
from realm_jax.prepare.documents.lines import (
    LineSource,
    Parse,
    article_from_json,
    page_from_json,
)
from realm_jax.prepare.documents.source import SHARD_BYTES, DocumentSource
from realm_jax.prepare.documents.text import AnyTextFolder, TextFolder

_KIND = re.compile(r"([A-Za-z_]\w*):(?!//)(.*)", re.DOTALL)
_JSON_LINES = re.compile(r"\.(?:jsonl?|ndjson)(?:\.gz|\.bz2)?$")


def open_source(spec: str, *, shard_bytes: int = SHARD_BYTES) -> DocumentSource:
    """Opens a source of documents.

    Args:
      spec: JSON lines by their suffix, `articles.jsonl` or `articles.jsonl.gz`, a
        folder, which is one of the kind `folder`, or `kind:what`:

        | kind | what |
        |---|---|
        | `json` | a file or a pattern of files, JSON lines |
        | `text` | a folder of *.txt |
        | `folder` | a folder of *.txt, *.md and *.markdown, plain or .gz |
        | `wikiextractor` | the folder that WikiExtractor wrote with --json |
        | `tfds` | a prepared dataset, `wikipedia/20190301.en` or with `@/data/dir` |
        | `realm_wikipedia` | a pattern of TFRecords, the annotated Wikipedia of REALM |
        | `cc_news` | a file or a pattern of files, CC-News as JSON lines |

        Files and folders are local or on gs://.
    """
    require_readable(spec)
    kind, what = _parse(spec)
    if not what:
        raise BadInputError(
            f"expected a path or a dataset behind {kind!r}, got {spec!r}; name what to "
            "read."
        )
    return _OPENERS[kind](what, shard_bytes=shard_bytes)


def _lines(kind: str, what: str, parse: Parse) -> Callable[..., LineSource]:
    def opened(path: str, *, shard_bytes: int) -> LineSource:
        if kind == "wikiextractor" and epath.Path(path).expanduser().is_dir():
            paths = find_below(path, what, lambda name: name.startswith("wiki_"))
        else:
            paths = find_files(path, what)
        return LineSource(kind, paths, parse, shard_bytes=shard_bytes)

    return opened


def _tfds(what: str, *, shard_bytes: int) -> DocumentSource:
    from realm_jax.prepare.documents.tfds import TfdsSource

    name, _, data_dir = what.partition("@")
    return TfdsSource(name, data_dir or None, shard_bytes=shard_bytes)


def _realm_wikipedia(what: str, *, shard_bytes: int) -> DocumentSource:
    from realm_jax.prepare.documents.realm_wikipedia import RealmWikipedia

    return RealmWikipedia(what, shard_bytes=shard_bytes)


_OPENERS: dict[str, Callable[..., DocumentSource]] = {
    "json": _lines("json", "JSON lines with title and text", document_from_json),
    "text": TextFolder,
    "folder": AnyTextFolder,
    "wikiextractor": _lines(
        "wikiextractor", "WikiExtractor's files wiki_00 and so on", page_from_json
    ),
    "tfds": _tfds,
    "realm_wikipedia": _realm_wikipedia,
    "cc_news": _lines("cc_news", "CC-News as JSON lines", article_from_json),
}


def _parse(spec: str) -> tuple[str, str]:
    kinds = ", ".join(_OPENERS)
    if match := _KIND.match(spec):
        kind, what = match.groups()
        if kind not in _OPENERS:
            raise BadInputError(
                f"expected a kind of source out of {kinds}, got {kind!r}; correct "
                f"{spec!r}."
            )
        return kind, what
    if not _JSON_LINES.search(spec):
        if spec and epath.Path(spec).expanduser().is_dir():
            return "folder", spec
        raise BadInputError(
            "expected JSON lines (.jsonl, .jsonl.gz), a folder of text, or kind:path "
            f"with a kind out of {kinds}, got {spec!r}; put the kind before it, or "
            "convert a file of another kind to JSON lines."
        )
    return "json", spec
