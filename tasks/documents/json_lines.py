"""JSON lines: one object with `title` and `text` a line, plain, .gz or .bz2."""

from realm_jax.data.documents import document_from_json
from tasks.documents.files import find_files
from tasks.documents.lines import LineSource
from tasks.documents.source import SHARD_BYTES


def json_lines(pattern: str, *, shard_bytes: int = SHARD_BYTES) -> LineSource:
    """Returns the documents of a file, or of all files a pattern matches.

    Raises:
      BadInputError: there are none, or all of them are empty.
    """
    paths = find_files(pattern, "JSON lines with title and text")
    return LineSource("json", paths, document_from_json, shard_bytes=shard_bytes)
