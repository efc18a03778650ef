"""Finds the questions whose article is missing, as a misspelt title would make it."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from realm_jax.data.blocks import DOCUMENTS_FILE, BlockStore
from realm_jax.data.document_table import read_documents
from realm_jax.data.normalisation import normalise_title
from realm_jax.data.questions import Question

_BLOCKS_AT_A_TIME = 1024
_NAMED = 3


def describe_unknown_titles(
    questions: Sequence[Question], known: Collection[str]
) -> str | None:
    """Returns a line that counts questions about unknown articles and names some.

    Args:
      known: the titles of the articles, as `normalise_title` makes them.

    Returns:
      The line; None if each question with a title has its article.
    """
    titles = [question.title for question in questions if question.title is not None]
    unknown = [title for title in titles if normalise_title(title) not in known]
    if not unknown:
        return None
    named = list(dict.fromkeys(unknown))
    listed = ", ".join(f"{title!r:.80}" for title in named[:_NAMED])
    more = f" and {len(named) - _NAMED:,} more" * (len(named) > _NAMED)
    return (
        f"{len(unknown):,} of {len(titles):,} questions with a title name an article "
        f"that is not in the text: {listed}{more}; nothing counts as found for them"
    )


def unknown_titles(store: BlockStore, questions: Sequence[Question]) -> str | None:
    """Returns `describe_unknown_titles` for a corpus; reads a block of each document.

    Without titles among the questions nothing is read.
    """
    if all(question.title is None for question in questions):
        return None
    return describe_unknown_titles(questions, set(_titles(store)))


def _titles(store: BlockStore) -> Iterator[str]:
    firsts = np.arange(store.num_blocks)
    if DOCUMENTS_FILE in store.info["files"]:
        counts = np.array(read_documents(store)["num_blocks"])
        firsts = (np.cumsum(counts) - counts)[counts > 0]
    for start in range(0, len(firsts), _BLOCKS_AT_A_TIME):
        for text in store.texts(firsts[start : start + _BLOCKS_AT_A_TIME]):
            yield normalise_title(text.title)
