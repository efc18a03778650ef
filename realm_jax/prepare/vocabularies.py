"""Trains vocabularies on the text of a corpus."""

import dataclasses
import hashlib
import pathlib
import string
import tempfile
from collections.abc import Iterator

from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import Summary, documents_of, read_part, write_part
from realm_jax.prepare.documents.source import DocumentSource, read_all
from realm_jax.ranges import require_ranges, whole
from realm_jax.storage import Store

SIZE = 8192
"""Default size of a trained vocabulary, in wordpieces."""

# A small text may lack letters, and a question mark, that questions are made of.
_ALWAYS = string.digits + string.ascii_letters + string.punctuation + "‘’“”–—…"


@dataclasses.dataclass(frozen=True)
class VocabularyTraining:
    """Configuration of a vocabulary's training.

    Attributes:
      strip_accents: whether accents are removed; None follows BERT, which strips them
        if it lowercases.
    """

    size: int = SIZE
    lowercase: bool = True
    strip_accents: bool | None = None

    def __post_init__(self):
        require_ranges(self, size=whole(1))

    def train(
        self,
        source: DocumentSource,
        fingerprint: str,
        scratch: Store,
        *,
        name: str = "the source",
        characters: str = "",
        max_bad_lines: int = 0,
    ) -> WordPiece:
        """Trains a vocabulary, or loads the one of an earlier run on the same text.

        Printable ASCII, typographic quotes and dashes are in every trained vocabulary,
        whatever the text.

        Args:
          scratch: store that keeps the vocabulary for a run that resumes.
          characters: further characters that the vocabulary must hold.
        """
        wanted = {c for c in _ALWAYS + characters if not c.isspace()}
        alphabet = "".join(sorted(wanted))
        digest = hashlib.sha256(alphabet.encode()).hexdigest()
        rules = {"lowercase": self.lowercase, "strip_accents": self.strip_accents}
        accents = "" if self.strip_accents is None else f"-{self.strip_accents}"
        case = "lower" if self.lowercase else "cased"
        rest = f"{self.size}-{case}{accents}-{digest[:8]}"
        file = f"vocab-{fingerprint[:16]}-{rest}"
        # A temporary folder suffices, as the corpus keeps its own copy.
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "vocab.txt"
            if (kept := read_part(scratch, file)) is not None:
                path.write_bytes(kept)
                return WordPiece.load(path, **rules)
            trained = WordPiece.train(
                _texts(source, name, max_bad_lines),
                self.size,
                path,
                characters=alphabet,
                **rules,
            )
            write_part(scratch, file, path.read_bytes())
            return trained


def _texts(source: DocumentSource, name: str, max_bad_lines: int) -> Iterator[str]:
    """Yields titles and texts; damage is refused here, before hours of work."""
    summary = Summary()
    is_blank = True
    for document in documents_of(read_all(source), summary, max_bad_lines):
        is_blank &= not document.text.strip()
        yield document.title
        yield document.text
    if is_blank:
        raise BadInputError(
            f"expected documents with text in {name}, got {summary.documents} without "
            f"any, {summary.bad_records} damaged and {summary.left_out.total()} left "
            "out; check the file."
        )
