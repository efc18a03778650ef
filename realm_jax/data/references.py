"""Refers to sentences of a block store, and lays examples out from them.

What an example repeats of its block is not stored with it. A row is a few integers: the
block, the wordpieces of its body that are the sentence, and what a task drew. Each kind
of row says which these are and how a batch is made of them: `masking.SpanRows`,
`random_masking.PieceRows` and `inverse_cloze.PairRows`. The tasks lay out their
examples by the same functions, so a batch is the same whether rows are stored whole.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int, Int64

from realm_jax.data import layout
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.features import Example, FeatureSpecs, int32
from realm_jax.data.wordpiece import Encoding
from realm_jax.errors import BadInputError

BLOCK, FIRST, END = "block", "first", "end"
ABOUT = "A row is a sentence: wordpieces [first, end) of the body of a block"
"""What the columns of every kind of row mean, for readers of examples.json."""


@dataclasses.dataclass(frozen=True)
class SentenceRows(abc.ABC):
    """A kind of row: its columns, and the batch that is made of them.

    Subclasses are frozen dataclasses, too, and their fields whole numbers.

    Attributes:
      kind: name in examples.json.
      about: what the columns mean, in words.
    """

    kind: ClassVar[str]
    about: ClassVar[str]

    @property
    @abc.abstractmethod
    def specs(self) -> FeatureSpecs:
        """Features of an example in a batch."""

    @property
    @abc.abstractmethod
    def own_columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape in a row, and dtype on disk, of the columns of this kind alone."""

    @property
    def columns(self) -> FeatureSpecs:
        """The columns of a row as a task makes them, int32."""
        shapes = {name: shape for name, (shape, _) in self.own_columns.items()}
        names = (BLOCK, FIRST, END)
        return {name: int32(*shapes.get(name, ())) for name in (*names, *shapes)}

    def dtypes(self, num_blocks: int, longest_body: int) -> dict[str, np.dtype]:
        """Returns the narrowest dtype of each column that fits all rows of a corpus."""
        places = np.min_scalar_type(longest_body)
        return {
            **{BLOCK: np.min_scalar_type(num_blocks - 1)},
            **{FIRST: places, END: places},
            **{name: dtype for name, (_, dtype) in self.own_columns.items()},
        }

    def row_bytes(self, num_blocks: int, longest_body: int) -> int:
        """Returns the bytes of a row on disk; the arguments are those of `dtypes`."""
        dtypes = self.dtypes(num_blocks, longest_body)
        return sum(
            dtypes[name].itemsize * math.prod(spec.shape)
            for name, spec in self.columns.items()
        )

    @abc.abstractmethod
    def lay_out(self, store: BlockStore, rows: Mapping[str, np.ndarray]) -> Example:
        """Returns the examples of rows, as arrays of `specs` along a leading axis.

        Args:
          rows: an array of each column, rows along the first axis.
        """


class References(NamedTuple):
    """What rows refer to."""

    layout: SentenceRows
    corpus: BlockStore


class Sentences(NamedTuple):
    """Sentences of blocks, by their place in the body.

    Attributes:
      first: the first wordpiece of each sentence in the body of its block.
      end: the wordpiece after its last one.
    """

    blocks: layout.Documents[np.ndarray]
    first: Int64[np.ndarray, " row"]
    end: Int64[np.ndarray, " row"]

    @property
    def pieces(self) -> layout.Documents[np.ndarray]:
        """The wordpieces of the sentences, as bodies without titles."""
        return layout.parts_of_bodies(self.blocks, self.first, self.end)


def find_sentences(store: BlockStore, rows: Mapping[str, np.ndarray]) -> Sentences:
    """Returns the sentences that rows refer to."""
    blocks = store.documents(rows[BLOCK])
    first, end = (rows[name].astype(np.int64) for name in (FIRST, END))
    inside = (first >= 0) & (first < end) & (end <= blocks.body_lengths)
    if not inside.all():
        row = int(inside.argmin())
        raise BadInputError(
            f"expected sentences in the blocks of {store.directory}, got wordpieces "
            f"{first[row]} to {end[row]} of block {rows[BLOCK][row]}, whose body has "
            f"{blocks.body_lengths[row]}; prepare the examples again."
        )
    return Sentences(blocks, first, end)


def require_masks(valid: Bool[np.ndarray, " row"], rows: Mapping[str, np.ndarray]):
    """Requires that rows mask wordpieces of their sentences."""
    if not valid.all():
        row = int(valid.argmin())
        raise BadInputError(
            f"expected masks within the sentence from wordpiece {rows[FIRST][row]} to "
            f"{rows[END][row]} of block {rows[BLOCK][row]}, got others; prepare the "
            "examples again."
        )


def read_blocks(
    store: BlockStore, block_ids: Int[np.ndarray, " block"]
) -> list[tuple[BlockText, Encoding]]:
    """Returns the texts of blocks with the wordpieces of their bodies.

    These must be those that the store has, which examples are laid out from.
    """
    texts = store.texts(block_ids)
    bodies = store.vocabulary.encode_batch([text.body for text in texts])
    longest = max((len(body.ids) for body in bodies), default=0)
    stored = store.body_ids(block_ids, longest)
    lengths = store.body_lengths(block_ids)
    for block, body, ids, length in zip(
        block_ids, bodies, stored, lengths, strict=True
    ):
        if len(body.ids) != length or not np.array_equal(body.ids, ids[:length]):
            raise BadInputError(
                f"expected the wordpieces of block {block} of {store.directory} to be "
                "those of its text, but they differ; prepare the corpus again."
            )
    return list(zip(texts, bodies, strict=True))


def as_rows(
    columns: Mapping[str, npt.ArrayLike], specs: FeatureSpecs
) -> dict[str, np.ndarray]:
    """Returns columns in the dtypes and shapes of `specs`; there may be no row."""
    return {
        name: np.asarray(columns[name], spec.dtype).reshape(-1, *spec.shape)
        for name, spec in specs.items()
    }
