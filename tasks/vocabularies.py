"""Which vocabulary a corpus gets: one that is given, or one trained on its text."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from realm_jax.storage import Store
from tasks.documents.source import DocumentSource, read_all


@dataclasses.dataclass(frozen=True)
class VocabularyChoice:
    """A vocabulary to load or to train.

    Attributes:
      path: a BERT `vocab.txt`, or "".
      knowledge: a prepared corpus whose vocabulary it is, or "".
      size: wordpieces of one that is trained.
      lowercase: whether text is lowercased.
      strip_accents: whether accents are removed; None as BERT does, if it lowercases.
    """

    path: str
    knowledge: str
    size: int
    lowercase: bool
    strip_accents: bool | None

    def given(self) -> WordPiece | None:
        """Returns the vocabulary that is there already, None if one is to be trained.

        Raises:
          BadInputError: it cannot be read.
        """
        if self.knowledge:
            return BlockStore.open(self.knowledge).vocabulary
        return self._load(self.path) if self.path else None

    def training(self) -> dict[str, int | bool | None] | None:
        """Returns how one is trained on the text, None if one is given."""
        if self.path or self.knowledge:
            return None
        return {
            "size": self.size,
            "lowercase": self.lowercase,
            "strip_accents": self.strip_accents,
        }

    def train(
        self, source: DocumentSource, fingerprint: str, scratch: Store
    ) -> WordPiece:
        """Trains one, or returns what an earlier run has trained on the same text.

        Args:
          source: of the text.
          fingerprint: of the source.
          scratch: where it is kept for a run that resumes.

        Raises:
          BadInputError: the source cannot be read, or has too little text.
        """
        accents = "" if self.strip_accents is None else f"-{self.strip_accents}"
        case = "lower" if self.lowercase else "cased"
        name = f"vocab-{fingerprint[:16]}-{self.size}-{case}{accents}.txt"
        # The corpus will keep a copy of its own.
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "vocab.txt"
            if scratch.exists(name):
                path.write_bytes(scratch.read(name))
                return self._load(path)
            trained = WordPiece.train(
                _texts(source),
                self.size,
                path,
                lowercase=self.lowercase,
                strip_accents=self.strip_accents,
            )
            scratch.write(name, path.read_bytes())
            return trained

    def _load(self, path: str | pathlib.Path) -> WordPiece:
        return WordPiece.load(
            path, lowercase=self.lowercase, strip_accents=self.strip_accents
        )


def _texts(source: DocumentSource) -> Iterator[str]:
    for record in read_all(source):
        if isinstance(record, Document):
            yield record.title
            yield record.text
