"""A small corpus of invented articles, made once."""

import pytest

from realm_jax.data.corpus import build_corpus
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece

TOWNS = ("Ansk", "Brel", "Čudo", "Dorm", "Élan", "Fosk", "Gant", "Hult")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Towns with a river, a founder and a year each, in blocks of a sentence or two."""
    documents = [
        Document(
            title=town,
            text=f"{town} lies on the river {TOWNS[i - 1]}ava. It was founded by Karel "
            f"von {TOWNS[i - 3]} in {1500 + 40 * i}. Its Bells are known — as far as "
            f"{TOWNS[i - 2]}.",
            source_id=town,
        )
        for i, town in enumerate(TOWNS)
    ]
    directory = tmp_path_factory.mktemp("towns")
    vocabulary = WordPiece.train(
        [document.text for document in documents], 150, directory / "vocab.txt"
    )
    return build_corpus(
        documents,
        directory / "corpus",
        vocabulary=vocabulary,
        tagger=RuleTagger(),
        chunk_length=56,
    )
