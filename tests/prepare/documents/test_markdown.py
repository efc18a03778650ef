"""Markdown as prose, and a folder of it."""

import gzip

from realm_jax.data.documents import Document
from realm_jax.prepare.documents.markdown import read_markdown
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all

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


def test_text_without_a_heading_has_no_title():
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
