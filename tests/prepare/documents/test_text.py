"""A folder of plain text, and of Markdown as prose."""

import gzip
import os

import pytest

from realm_jax.data.documents import Document
from realm_jax.data.records import BadRecord
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.documents.text import TextFolder, read_markdown

FILES = {
    "a/z.txt": b"The last of a.",
    "a-b/Rome.v2.txt": "\ufeffRome.\r\n\r\nIt is old.\rVery.".encode(),
    "b.txt": "한강은 서울을 지난다.".encode(),
    "b/empty.txt": b"",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in {**FILES, "notes.md": b"no text file"}.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "texts"


def test_each_file_is_a_document_in_the_order_of_paths(folder, read_shards):
    expected = [
        Document("z", "The last of a.", "a/z.txt"),
        Document("Rome.v2", "Rome.\n\nIt is old.\nVery.", "a-b/Rome.v2.txt"),
        Document("empty", "", "b/empty.txt"),
        Document("b", "한강은 서울을 지난다.", "b.txt"),
    ]
    assert list(read_all(open_source(f"text:{folder}"))) == expected
    shards = read_shards(TextFolder(str(folder), shard_bytes=1))
    assert len(shards) == 3  # The empty file goes with the one behind it.
    assert [r for shard in shards for r in shard] == expected


def test_files_that_cannot_be_read_are_bad_records(folder):
    (folder / "b.txt").write_bytes(b"ab\xff")
    (folder / "b/empty.txt").unlink()
    read = list(read_all(TextFolder(str(folder), max_file_bytes=20)))
    assert [type(record) for record in read] == [Document, BadRecord, BadRecord]
    _, large, bad = read
    assert bad.where == str(folder / "b.txt")
    assert "the text in UTF-8, got the byte 0xff as byte 3;" in bad.reason
    assert large.where == str(folder / "a-b/Rome.v2.txt")
    assert "at most 20 bytes, got 28" in large.reason


def test_a_name_that_is_no_utf8_is_read(folder):
    with open(os.fsencode(folder) + b"/\xff.txt", "wb") as file:
        file.write(b"Text.")
    assert Document("\ufffd", "Text.", "\ufffd.txt") in read_all(
        TextFolder(str(folder))
    )


def test_the_fingerprint_is_of_names_and_contents(folder, tmp_path):
    fingerprint = TextFolder(str(folder)).fingerprint()
    moved = folder.rename(tmp_path / "moved")
    assert TextFolder(str(moved)).fingerprint() == fingerprint
    (moved / "b.txt").rename(moved / "c.txt")
    renamed = TextFolder(str(moved)).fingerprint()
    assert renamed != fingerprint
    (moved / "c.txt").write_bytes(b"other")
    assert TextFolder(str(moved)).fingerprint() not in (fingerprint, renamed)


PAGE = """---
layout: page
---
# Loading *data*

The [loader](https://example.com/x "t") reads `files` in
**parallel**, see <https://example.com>. ![A picture](p.png)

## Usage

```python
load("x")  # Not a sentence.
```

    an indented block

- One item.
- Another, with <b>HTML</b>.

> A quotation\\*.

<div>A block of HTML.</div>

| a | b |
|---|---|
| 1 | 2 |

Setext
------
[ref]: https://example.com/ref
The [end][ref].
"""


def test_prose_alone_is_kept():
    assert read_markdown(PAGE) == (
        "Loading data",
        "The loader reads files in parallel, see .\n\nOne item.\n\nAnother, with HTML."
        "\n\nA quotation*.\n\nThe end.",
    )
    # Without a heading there is no title.
    assert read_markdown("Just text.\n\nMore.") == ("", "Just text.\n\nMore.")
    assert read_markdown("") == ("", "")


def test_a_folder_has_text_and_markdown_plain_or_gzipped(tmp_path):
    for name, content in {
        "a.md": b"# First\n\nOne.",
        "b/no_heading.markdown": b"Two.",
        "c.txt.gz": gzip.compress(b"Three."),
        "d.v2.md.gz": gzip.compress("# Größe\r\n\r\nFour.".encode()),
        "e.png": b"\x89PNG",
        "f.html": b"<p>No text.</p>",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    expected = [
        Document("First", "One.", "a.md"),
        Document("no_heading", "Two.", "b/no_heading.markdown"),
        Document("c", "Three.", "c.txt.gz"),
        Document("Größe", "Four.", "d.v2.md.gz"),
    ]
    assert list(read_all(open_source(str(tmp_path)))) == expected
    assert list(read_all(open_source(f"folder:{tmp_path}"))) == expected
