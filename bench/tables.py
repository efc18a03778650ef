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


def replace_place(page: pathlib.Path, name: str, text: str) -> None:
    """Replaces the text of a place in a page.

    Raises:
      BadInputError: the page has no such place.
    """
    before = page.read_text()
    place = re.compile(
        rf"(<!-- bench: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL
    )
    if not place.search(before):
        raise BadInputError(
            f"expected <!-- bench: {name} --> and <!-- end --> in {page}, got neither "
            "or one of them; add both lines where the tables are to stand"
        )
    page.write_text(place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", before))
