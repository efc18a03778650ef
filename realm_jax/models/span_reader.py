"""The span reader of Open-QA fine-tuning (ORQA, Lee et al. 2019, section 3).

A span is scored from the encodings of its first and last wordpiece:
score = dense_1(LayerNorm(ReLU(start_i + end_j))), start and end being the two halves of
one dense layer. The encoder's parameters stand under `bert`, as in
`knowledge_encoder.KnowledgeEncoder`, so that fine-tuning can start from them.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from realm_jax.models import layers
from realm_jax.models.bert import PAD_ID, Bert, BertConfig

INVALID_SPAN_LOGIT = -1e9
"""Logit of a span that is no answer. Finite, so that a document without a body (the
null document) gives no NaN; beside any valid span its probability is exactly 0."""


@dataclass(frozen=True)
class SpanReaderConfig:
    """Encoder and span scorer.

    Attributes:
      bert: the encoder.
      max_span: wordpieces of the longest answer.
      hidden_size: features of a span, half of the dense layer's output.
      layer_norm_epsilon: of the scorer's LayerNorm; 1e-3 in ORQA.
    """

    bert: BertConfig
    max_span: int = 10
    hidden_size: int = 256
    layer_norm_epsilon: float = 1e-3


def span_bounds(length: int, max_span: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns first and last position of every span, shortest spans first.

    The order is that of the last axis of `SpanReader`'s logits: all spans of one
    wordpiece from left to right, then all of two, and so on.

    Args:
      length: positions of the sequence.
      max_span: wordpieces of the longest span.

    Returns:
      int32 starts and ends, both inclusive, each `[span]`.
    """
    widths = range(min(max_span, length))
    starts = [np.arange(length - width, dtype=np.int32) for width in widths]
    ends = [
        start + np.int32(width) for width, start in zip(widths, starts, strict=True)
    ]
    return np.concatenate(starts), np.concatenate(ends)


def valid_spans(
    joined_ids: Int[Array, "... joined"],
    segment_ids: Int[Array, "... joined"],
    max_span: int,
) -> Bool[Array, "... span"]:
    """Returns which spans lie wholly inside the body.

    The body is segment 1 without the final [SEP], which is the last token of a joined
    sequence. It is contiguous, so the two ends decide.

    Args:
      joined_ids: `[CLS] x [SEP] body [SEP]`, 0 where padded.
      segment_ids: 0 for the query, 1 for the body.
      max_span: wordpieces of the longest span.
    """
    length = joined_ids.shape[-1]
    num_tokens = jnp.sum(joined_ids != PAD_ID, axis=-1, keepdims=True)
    is_body = (segment_ids == 1) & (jnp.arange(length) < num_tokens - 1)
    starts, ends = span_bounds(length, max_span)
    return is_body[..., starts] & is_body[..., ends]


class SpanReader(nn.Module):
    """BERT with the span scorer."""

    config: SpanReaderConfig

    def setup(self):
        """Creates the encoder and the scorer."""
        config = self.config
        self.bert = Bert(config.bert)
        self.span_dense = layers.Dense(
            features=(2 * config.hidden_size,),
            kernel_axes=("embed", None),
            stddev=config.bert.initializer_range,
            dtype=jnp.dtype(config.bert.dtype),
        )
        self.span_norm = layers.LayerNorm(config.layer_norm_epsilon)
        self.span_score = layers.Dense(
            features=(1,),
            kernel_axes=(None, None),
            stddev=config.bert.initializer_range,
        )

    def __call__(
        self,
        joined_ids: Int[Array, "... joined"],
        segment_ids: Int[Array, "... joined"],
        deterministic: bool = True,
    ) -> Float[Array, "... span"]:
        """Returns float32 logits of the spans of `span_bounds(joined, max_span)`.

        Spans that do not lie inside the body get `INVALID_SPAN_LOGIT`.

        Args:
          joined_ids: `[CLS] x [SEP] body [SEP]`, 0 where padded.
          segment_ids: 0 for the query, 1 for the body.
          deterministic: no dropout; otherwise an rng named "dropout" is needed.
        """
        leading, length = joined_ids.shape[:-1], joined_ids.shape[-1]
        ids = joined_ids.reshape(-1, length)
        segments = segment_ids.reshape(-1, length)
        sequence = self.bert(ids, segments, deterministic).sequence
        start, end = jnp.split(self.span_dense(sequence).astype(jnp.float32), 2, -1)
        # One slice for each width: gathering all (start, end) pairs would make the
        # gradient a scatter.
        logits = jnp.concatenate(
            [
                self._score(start[:, : length - width] + end[:, width:])
                for width in range(min(self.config.max_span, length))
            ],
            axis=-1,
        )
        valid = valid_spans(ids, segments, self.config.max_span)
        logits = jnp.where(valid, logits, INVALID_SPAN_LOGIT)
        logits = layers.constrain(logits, "batch", "span")
        return logits.reshape(*leading, -1)

    def _score(
        self, spans: Float[Array, "batch start hidden"]
    ) -> Float[Array, "batch start"]:
        return self.span_score(self.span_norm(nn.relu(spans)))[..., 0]
