"""Provides the size of a corpus, measured if it is prepared or else as configured."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from realm_jax import ranges
from realm_jax.data.blocks import BlockStore
from realm_jax.data.example_files import SENTENCE_START
from realm_jax.data.examples import read_specs
from realm_jax.data.features import FeatureSpecs
from realm_jax.data.inverse_cloze import DOCUMENT_LENGTH, PairRows
from realm_jax.data.inverse_cloze import QUERY_LENGTH as INVERSE_CLOZE_QUERY_LENGTH
from realm_jax.data.masking import MAX_MASKS, QUERY_LENGTH, SpanRows

# Characters of a wordpiece in the stored texts, which are compressed.
_TEXT_BYTES = 5
# Wordpieces of a sentence of Wikipedia, and salient spans in it, rounded to more bytes.
_SENTENCE = 28
_SPANS = 2


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
      num_sentences: number of sentences; 0 for an estimate from the lengths.
      examples: size of the examples that are read, in bytes; 0 for an estimate from the
        sentences.
      longest: wordpieces of the longest block, without special ones; 0 for as many as
        the models read.
      specs: features of the examples of each task that is known.
    """

    num_blocks: int = 13_353_718
    vocab_size: int = 30_522
    mean_length: float = 0.0
    disk: int = 0
    source: str = "as stated; CORPUS is not here"
    num_sentences: int = 0
    examples: int = 0
    longest: int = 0
    specs: Mapping[str, FeatureSpecs] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ranges.require_ranges(
            self,
            num_blocks=ranges.whole(1),
            vocab_size=ranges.whole(1),
            mean_length=ranges.NOT_NEGATIVE,
            disk=ranges.whole(0),
            num_sentences=ranges.whole(0),
            examples=ranges.whole(0),
            longest=ranges.whole(0),
        )

    def disk_bytes(self, document_length: int) -> int:
        """Returns the size of its files in bytes; an estimate if `disk` is 0."""
        length = self.mean_length or document_length
        guess = self.num_blocks * length * (self.id_dtype.itemsize + _TEXT_BYTES)
        return self.disk or int(guess)

    def examples_bytes(
        self, document_length: int, *, spans: bool = True, pairs: bool = True
    ) -> int:
        """Returns the size of the examples in bytes; an estimate if `examples` is 0.

        Args:
          spans: whether the estimate counts masked sentences, the spans of each.
          pairs: whether it counts sentence-block pairs, one of each sentence. Questions
            are so few that they count as nothing.
        """
        length = self.mean_length or document_length
        num_sentences = self.num_sentences or self.num_blocks * length / _SENTENCE
        size = (self.num_blocks, document_length)
        each = 0
        if spans:
            row = SpanRows(QUERY_LENGTH, MAX_MASKS).row_bytes(*size)
            each += _SPANS * row + SENTENCE_START.itemsize
        if pairs:
            rows = PairRows(INVERSE_CLOZE_QUERY_LENGTH, DOCUMENT_LENGTH)
            each += rows.row_bytes(*size)
        return self.examples or int(num_sentences * each)

    @property
    def id_dtype(self) -> np.dtype:
        """Dtype in which ids are stored; see `WordPiece.id_dtype`."""
        return np.min_scalar_type(self.vocab_size - 1)

    def share_embedded(
        self, document_length: int, padding: float, prompt_length: int
    ) -> float:
        """Returns the work of embedding its documents, relative to full length.

        Args:
          padding: share of the computation that is padding, when blocks of similar
            length are embedded together.
          prompt_length: wordpieces that each document has in addition.
        """
        if not self.mean_length:
            return 1.0
        length = min(document_length, self.mean_length / (1 - padding))
        return (length + prompt_length) / (document_length + prompt_length)


def of_corpus(path: str, tasks: Sequence[str] | None = None) -> CorpusSize | None:
    """Returns the size of a prepared corpus, None if there is none here.

    Args:
      tasks: the tasks whose examples are counted; None for all.
    """
    if not path or not (pathlib.Path(path) / "corpus.json").exists():
        return None
    store = BlockStore.open(path)
    ids = np.arange(store.num_blocks)
    wordpieces = store.title_lengths(ids) + store.body_lengths(ids)
    folder = pathlib.Path(path)
    files = [file for file in folder.iterdir() if file.is_file()]
    places = ["**"] if tasks is None else [f"{task}/**" for task in tasks]
    found = (file for place in places for file in folder.glob(f"examples/{place}/*"))
    examples = [file for file in found if file.is_file()]
    return CorpusSize(
        store.num_blocks,
        store.vocabulary.size,
        float(wordpieces.mean()) + 3,
        sum(file.stat().st_size for file in files),
        "of CORPUS",
        store.info.get("num_sentences", 0),
        sum(file.stat().st_size for file in examples),
        int(wordpieces.max()),
        {
            task: read_specs(train)
            for task in tasks or ()
            if (train := folder / "examples" / task / "train").is_dir()
        },
    )
