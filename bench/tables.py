"""Formats tables, and writes them where the documentation has their place.

A place is what stands between `<!-- bench: NAME -->` and the next `<!-- end -->`.
"""

import pathlib
import re
from collections.abc import Iterable, Sequence

from realm_jax.errors import BadInputError


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find_place(page: pathlib.Path, name: str) -> tuple[str, re.Pattern[str]]:
    """Returns a page's text, and the pattern that matches a place in it."""
    try:
        before = page.read_text()
    except OSError as error:
        raise BadInputError(
            f"expected a page to write to in {page}, got none ({error.strerror}); name "
            "one that is there"
        ) from error
    place = re.compile(
        rf"(<!-- bench: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL
    )
    if not place.search(before):
        raise BadInputError(
            f"expected <!-- bench: {name} --> and <!-- end --> in {page}, got neither "
            "or one of them; add both lines where the tables are to stand"
        )
    return before, place


def replace_place(page: pathlib.Path, name: str, text: str) -> None:
    """Replaces the text of a place in a page."""
    before, place = find_place(page, name)
    page.write_text(place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", before))
