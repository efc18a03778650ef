"""Defines the batches that packages exchange, and the names of array dimensions.

Dimension names, used in every jaxtyping annotation of the package:

  batch       examples in a step
  candidate   documents per example, including the null document at position 0
  query       query wordpieces, `[CLS] x [SEP]`, padded
  document    document wordpieces, `[CLS] title [SEP] body [SEP]`, padded
  joined      joined wordpieces, `[CLS] x [SEP] body [SEP]`, padded
  mask        scored masked positions per example
  length      wordpieces of any padded sequence
  embed       hidden size of an encoder
  projection  size of a retrieval embedding (128 in the paper)
  vocab       wordpieces in the vocabulary
  block       blocks of the knowledge corpus
  neighbour   results of a search
  span        candidate answer spans of a sequence
  answer      answers of a question
"""

import dataclasses
from typing import TypeAlias

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from realm_jax.errors import BadInputError
from realm_jax.ranges import require_ranges, whole

Array: TypeAlias = jax.Array | np.ndarray

NULL_BLOCK = -1
"""Block id of the null document."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Padded lengths of a run, in wordpieces (the paper's as defaults).

    Attributes:
      query: wordpieces of `[CLS] x [SEP]`, a query or question.
      document: wordpieces of `[CLS] title [SEP] body [SEP]`, the embedder's
        input.
      joined: wordpieces of `[CLS] x [SEP] body [SEP]`, the reader's input.
    """

    query: int = 96
    document: int = 288
    joined: int = 384

    def __post_init__(self):
        # [CLS], [SEP] and a wordpiece between them.
        require_ranges(self, query=whole(3), document=whole(3), joined=whole(3))
        if self.joined <= self.query:
            raise BadInputError(
                f"expected JOINED_LENGTH above QUERY_LENGTH ({self.query}), got "
                f"{self.joined}; raise it, as the reader's input is a query and a body"
            )


@flax.struct.dataclass
class PretrainBatch:
    """Masked sentences.

    Attributes:
      query_ids: `[CLS] x [SEP]` with the masked wordpieces replaced by [MASK].
      mask_positions: positions of the masked pieces in `query_ids`; 0 where unused.
      mask_ids: the wordpieces that were masked; 0 where unused.
      mask_weights: 1.0 for a scored mask, 0.0 for padding.
      source_block: the block the sentence was taken from, -1 if none.
    """

    query_ids: Int[Array, "batch query"]
    mask_positions: Int[Array, "batch mask"]
    mask_ids: Int[Array, "batch mask"]
    mask_weights: Float[Array, "batch mask"]
    source_block: Int[Array, " batch"]


@flax.struct.dataclass
class InverseClozeBatch:
    """Pairs of a sentence and the block it was taken from, in the same row.

    Attributes:
      query_ids: `[CLS] sentence [SEP]`.
      document_ids: `[CLS] title [SEP] body [SEP]`, in most rows without the sentence.
      document_segment_ids: 0 for title and padding, 1 for body.
      block_ids: the block each pair was taken from.
    """

    query_ids: Int[Array, "batch query"]
    document_ids: Int[Array, "batch document"]
    document_segment_ids: Int[Array, "batch document"]
    block_ids: Int[Array, " batch"]


@flax.struct.dataclass
class QuestionBatch:
    """Questions with the wordpieces of their answers.

    Attributes:
      question_ids: `[CLS] question [SEP]`.
      answer_ids: the wordpieces of each answer, 0 where unused. An answer longer than
        the axis is left out, because no span could match it.
      question_index: the row of the question in its file, by which predictions are
        joined with references.
      answer_patterns: the code points of each answer that is a regular expression, 0
        where unused; None in a set without patterns. The host matches them in the text.
      answer_texts: the code points of each answer in `answer_ids` as
        `data/words.py` normalises it, 0 where unused or longer than the axis.
        The host compares them with what has the same wordpieces, as wordpieces can
        lack accents and vowel signs. None: wordpieces decide.
    """

    question_ids: Int[Array, "batch query"]
    answer_ids: Int[Array, "batch answer piece"]
    question_index: Int[Array, " batch"]
    answer_patterns: Int[Array, "batch answer character"] | None = None
    answer_texts: Int[Array, "batch answer character"] | None = None


@flax.struct.dataclass
class Neighbours:
    """Results of a search, best first.

    Attributes:
      ids: block ids; -1 where fewer than k blocks exist.
      scores: inner products; -inf where ids is -1.
    """

    ids: Int[Array, "batch neighbour"]
    scores: Float[Array, "batch neighbour"]


@flax.struct.dataclass
class Candidates:
    """The documents a step scores and reads; the null document is at position 0.

    Attributes:
      block_ids: -1 for the null document.
      document_ids: `[CLS] title [SEP] body [SEP]`, the embedder's input.
      document_segment_ids: 0 for title, 1 for body.
      joined_ids: `[CLS] x [SEP] body [SEP]`, the reader's input.
      joined_segment_ids: 0 for the query, 1 for the body.
      valid: False for an empty slot, which gets no probability.
    """

    block_ids: Int[Array, "batch candidate"]
    document_ids: Int[Array, "batch candidate document"]
    document_segment_ids: Int[Array, "batch candidate document"]
    joined_ids: Int[Array, "batch candidate joined"]
    joined_segment_ids: Int[Array, "batch candidate joined"]
    valid: Bool[Array, "batch candidate"]
