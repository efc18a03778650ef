"""A small corpus of invented articles, made once."""

import pytest

from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from tests.corpus_builder import build_corpus

_TOWNS = ("Ansk", "Brel", "Čudo", "Dorm", "Élan", "Fosk", "Gant", "Hult")
_TEXT = (
    "{0} is a town on the river {1}. It was founded by Karel {1} in {2}.\n"
    "The mills of {0} burnt down on 16 February {3}. Trade with {4} ended then! "
    "Today {0} is known for its bells, which the painter Maria {4} drew in {5}."
)


@pytest.fixture(scope="session")
def small_store(tmp_path_factory):
    """Articles of five sentences and of a single one, in blocks of two or three."""
    documents = []
    for i, town in enumerate(_TOWNS):
        founder, painter, year = _TOWNS[i - 1], _TOWNS[i - 2], 1500 + 50 * i
        text = _TEXT.format(town, founder, year, year + 7, painter, year + 31)
        documents.append(Document(town, text, f"town-{i}"))
    documents.append(Document("Ilm", "Ilm is a river near Hult.", "river-0"))
    directory = tmp_path_factory.mktemp("small")
    vocabulary = WordPiece.train(
        [document.text for document in documents], 400, directory / "vocab.txt"
    )
    return build_corpus(documents, directory / "corpus", vocabulary, chunk_length=48)
