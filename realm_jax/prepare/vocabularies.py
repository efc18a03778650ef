"""Vocabularies trained on the text of a corpus."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare.documents.source import DocumentSource, read_all
from realm_jax.storage import Store

SIZE = 8192
"""Wordpieces of a vocabulary that is trained, unless another number is asked for."""


@dataclasses.dataclass(frozen=True)
class VocabularyTraining:
    """How a vocabulary is trained.

    Attributes:
      size: wordpieces.
      lowercase: whether text is lowercased.
      strip_accents: whether accents are removed; None as BERT does, if it lowercases.
    """

    size: int = SIZE
    lowercase: bool = True
    strip_accents: bool | None = None

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
        rules = {"lowercase": self.lowercase, "strip_accents": self.strip_accents}
        accents = "" if self.strip_accents is None else f"-{self.strip_accents}"
        case = "lower" if self.lowercase else "cased"
        name = f"vocab-{fingerprint[:16]}-{self.size}-{case}{accents}.txt"
        # The corpus will keep a copy of its own.
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
