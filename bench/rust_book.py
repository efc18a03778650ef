"""The Rust book, with the questions of its interactive edition as queries.

    git clone https://github.com/cognitive-engineering-lab/rust-book
    python -m bench.rust_book rust-book --output FOLDER

writes the pages in Markdown to FOLDER/pages and FOLDER/queries.jsonl, for
`realm adapt FOLDER/pages --queries=FOLDER/queries.jsonl`. That edition adds quizzes to
a book that others wrote. A query is the prose of what a quiz asks, without code and
without the answers to choose from; the page with the quiz is what it has to find.
Quizzes about programs, which pages of their own hold, are left out.
"""

import collections
import json
import pathlib
import re
import tomllib
from collections.abc import Iterator

from bench.command import make_parser, one_line_errors
from realm_jax.errors import BadInputError

_QUIZ = re.compile(r"\{\{#quiz \.\./(quizzes/[\w.-]+)\}\}")
_DIRECTIVE = re.compile(r"^\{\{#.*\}\}$", re.MULTILINE)
_CODE = re.compile(r"^```.*?(?:^```$|\Z)", re.DOTALL | re.MULTILINE)
_MARKUP = re.compile(r"[`*]|^>", re.MULTILINE)
_ABOUT_PROGRAMS = re.compile(r"inventory|design-challenge|experiment-intro")
_ASKING = ("MultipleChoice", "ShortAnswer")


def main() -> None:
    """Writes pages and queries."""
    parser = make_parser(__doc__)
    parser.add_argument("book", type=pathlib.Path, help="a checkout of the edition")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="a folder")
    flags = parser.parse_args()
    write(flags.book, flags.output)


def write(book: pathlib.Path, output: pathlib.Path) -> None:
    """Writes `pages` and `queries.jsonl`."""
    pages = sorted((book / "src").glob("*.md"))
    if not pages:
        raise BadInputError(
            f"expected pages of the Rust book in {book / 'src'}, got none; clone its "
            "interactive edition, and name the checkout"
        )
    (output / "pages").mkdir(parents=True, exist_ok=True)
    asked: dict[str, list[str]] = collections.defaultdict(list)
    for page in pages:
        text = page.read_text()
        (output / "pages" / page.name).write_text(_DIRECTIVE.sub("", text))
        for quiz in _QUIZ.findall(text):
            for question in _questions(book / quiz):
                asked[question].append(page.name)
    with (output / "queries.jsonl").open("w") as file:
        for question, names in asked.items():
            if len(names) == 1 and not _ABOUT_PROGRAMS.search(names[0]):
                query = {"id": question, "question": question, "gold_ids": names}
                file.write(json.dumps(query) + "\n")


def _questions(quiz: pathlib.Path) -> Iterator[str]:
    for entry in tomllib.loads(quiz.read_text())["questions"]:
        if entry["type"] in _ASKING:
            prose = _CODE.sub("", entry["prompt"]["prompt"])
            yield " ".join(_MARKUP.sub("", prose).split())


if __name__ == "__main__":
    with one_line_errors():
        main()
