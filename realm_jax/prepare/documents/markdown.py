"""Reads the prose of a Markdown file: its paragraphs and lists.

Headings, code, tables, HTML, images and the syntax of links are left out, which are no
sentences. CommonMark's own parser finds them.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable("table")
# YAML between two lines of dashes, as static site generators have it.
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_BREAKS = ("softbreak", "hardbreak")


def read_markdown(text: str) -> tuple[str, str]:
    """Returns the first heading, "" if there is none, and the paragraphs.

    An empty line stands between two paragraphs, or items of a list.
    """
    tokens = _PARSER.parse(_FRONT_MATTER.sub("", text, count=1))
    found: dict[str, list[str]] = {"heading_open": [], "paragraph_open": []}
    for opening, token in pairwise(tokens):
        if token.type == "inline" and opening.type in found:
            plain = " ".join("".join(_plain(token.children or ())).split())
            found[opening.type].append(plain)
    headings, paragraphs = (list(filter(None, texts)) for texts in found.values())
    return next(iter(headings), ""), "\n\n".join(paragraphs)


def _plain(tokens: Sequence[Token]) -> Iterator[str]:
    """Yields the text of inline elements, without addresses that stand for a link."""
    is_address = False
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            is_address = token.type == "link_open" and token.info == "auto"
        elif token.type in ("text", "code_inline") and not is_address:
            yield token.content
        elif token.type in _BREAKS:
            yield " "
