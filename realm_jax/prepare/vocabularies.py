"""Trains vocabularies on the text of a corpus."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare.documents.source import DocumentSource, read_all
from realm_jax.storage import Store

SIZE = 8192
"""Default size of a trained vocabulary, in wordpieces."""


@dataclasses.dataclass(frozen=True)
class VocabularyTraining:
    """Configuration of a vocabulary's training.

    Attributes:
      size: number of wordpieces.
      lowercase: whether text is lowercased.
      strip_accents: whether accents are removed; None follows BERT, which strips them
        if it lowercases.
    """

    size: int = SIZE
    lowercase: bool = True
    strip_accents: bool | None = None

    def train(
        self, source: DocumentSource, fingerprint: str, scratch: Store
    ) -> WordPiece:
        """Trains a vocabulary, or loads the one of an earlier run on the same text.

        Args:
          source: source of the text.
          fingerprint: fingerprint of the source.
          scratch: store that keeps the vocabulary for a run that resumes.

        Raises:
          BadInputError: the source cannot be read, or has too little text.
        """
        rules = {"lowercase": self.lowercase, "strip_accents": self.strip_accents}
        accents = "" if self.strip_accents is None else f"-{self.strip_accents}"
        case = "lower" if self.lowercase else "cased"
        name = f"vocab-{fingerprint[:16]}-{self.size}-{case}{accents}.txt"
        # A temporary folder suffices, as the corpus keeps its own copy.
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "vocab.txt"
            if scratch.exists(name):
                path.write_bytes(scratch.read(name))
                return WordPiece.load(path, **rules)
            trained = WordPiece.train(_texts(source), self.size, path, **rules)
            scratch.write(name, path.read_bytes())
            return trained


def _texts(source: DocumentSource) -> Iterator[str]:
    for record in read_all(source):
        if isinstance(record, Document):
            yield record.title
            yield record.text
