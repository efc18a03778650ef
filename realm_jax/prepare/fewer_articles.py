r"""Selects some of the articles of a JSON-lines file, for shorter runs.

    python -m realm_jax.prepare.fewer_articles ARTICLES.jsonl QUESTIONS.jsonl \
        FEWER.jsonl --drawn N

It keeps the articles that questions are about, those of the validation split, without
which too few masked sentences would be left for evaluation, and N others drawn at
random, in their order. Questions over fewer articles are easier: compare metrics only
over the same articles.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import sys
from collections.abc import Sequence

from realm_jax.data.documents import Document, document_from_fields, is_held_out
from realm_jax.data.questions import (
    describe_unknown_titles,
    read_questions,
    records_of,
)
from realm_jax.data.words import normalise_title
from realm_jax.errors import BadInputError


def choose(
    documents: Sequence[Document], asked: set[str], drawn: int, seed: int
) -> list[bool]:
    """Returns whether each article is kept.

    Args:
      asked: titles of articles that are always kept, as `normalise_title` makes them.
    """
    titles = [normalise_title(document.title) for document in documents]
    others = [number for number, title in enumerate(titles) if title not in asked]
    random.Random(seed).shuffle(others)
    chosen = set(others[:drawn])
    return [
        titles[number] in asked or number in chosen or is_held_out(document.source_id)
        for number, document in enumerate(documents)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("articles", help="JSON lines with title and text")
    parser.add_argument("questions", help="JSON lines with the title of an article")
    parser.add_argument("output", help="JSON lines to write")
    parser.add_argument("--drawn", type=int, required=True, help="other articles")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    flags = parser.parse_args(arguments)
    try:
        if flags.drawn < 0:
            raise BadInputError(f"expected --drawn of at least 0, got {flags.drawn}")
        records = list(records_of(flags.articles))
        documents = [
            document_from_fields(record, f"{flags.articles}:{number}")
            for number, record in records
        ]
        questions = read_questions(flags.questions)
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    asked = {normalise_title(q.title) for q in questions if q.title is not None}
    is_kept = choose(documents, asked, flags.drawn, flags.seed)
    kept = [record for _, record in itertools.compress(records, is_kept)]
    output = pathlib.Path(flags.output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    lines = (json.dumps(article, ensure_ascii=False) + "\n" for article in kept)
    try:
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, output)
    except OSError as error:
        print(f"expected to write {output}: {error}", file=sys.stderr)
        return 2
    print(f"{len(kept)} of {len(records)} articles")
    titles = {normalise_title(document.title) for document in documents}
    if unknown := describe_unknown_titles(questions, titles):
        print(unknown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
