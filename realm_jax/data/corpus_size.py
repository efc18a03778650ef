"""Provides the size of a corpus, measured if it is prepared or else as configured."""

import dataclasses
import pathlib

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError

# Characters of a wordpiece in the stored texts, which are compressed.
_TEXT_BYTES = 5


@dataclasses.dataclass(frozen=True)
class CorpusSize:
    """The size of a corpus for planning; the defaults are the paper's Wikipedia.

    Attributes:
      num_blocks: number of blocks.
      vocab_size: number of wordpieces in its vocabulary.
      mean_length: mean length of a block in wordpieces, special ones included; 0 for as
        many as the models read.
      disk: size in bytes; 0 for an estimate from the lengths.
      source: where these values are from.
    """

    num_blocks: int = 13_353_718
    vocab_size: int = 30_522
    mean_length: float = 0.0
    disk: int = 0
    source: str = "as stated; CORPUS is not here"

    def __post_init__(self):
        if self.num_blocks < 1 or self.vocab_size < 1:
            raise BadInputError(
                "expected at least one block and one wordpiece of a corpus, got "
                f"{self.num_blocks} and {self.vocab_size}; correct CorpusSize"
            )

    def disk_bytes(self, document_length: int) -> int:
        """Returns the size of its files in bytes; an estimate if `disk` is 0."""
        length = self.mean_length or document_length
        guess = self.num_blocks * length * (self.id_dtype.itemsize + _TEXT_BYTES)
        return self.disk or int(guess)

    @property
    def id_dtype(self) -> np.dtype:
        """Dtype in which ids are stored; see `WordPiece.id_dtype`."""
        return np.min_scalar_type(self.vocab_size - 1)

    def share_embedded(self, document_length: int, padding: float) -> float:
        """Returns the work of embedding its documents, relative to full length.

        Args:
          document_length: full length of a document, in wordpieces.
          padding: share of the computation that is padding, when blocks of similar
            length are embedded together.
        """
        if not self.mean_length:
            return 1.0
        return min(1.0, self.mean_length / (1 - padding) / document_length)


def of_corpus(path: str) -> CorpusSize | None:
    """Returns the size of a prepared corpus, None if there is none here.

    Raises:
      BadInputError: there is one, but it cannot be read.
    """
    if not path or not (pathlib.Path(path) / "corpus.json").exists():
        return None
    store = BlockStore.open(path)
    ids = np.arange(store.num_blocks)
    wordpieces = store.title_lengths(ids).sum() + store.body_lengths(ids).sum()
    files = [file for file in pathlib.Path(path).iterdir() if file.is_file()]
    return CorpusSize(
        store.num_blocks,
        store.vocabulary.size,
        float(wordpieces / store.num_blocks) + 3,
        sum(file.stat().st_size for file in files),
        "of CORPUS",
    )
