"""Implements the Open-QA span reader, which scores every short span of a body.

It follows the authors' code of ORQA (Lee et al. 2019), section 5: a dense layer of 512
features is split into a start and an end half; the score of a span is a linear function
of LayerNorm(ReLU(start_i + end_j)).

The scorer is trained on questions; a warm start can train it before, by span selection
(`objectives/open_qa.py`). Its parameters are then part of a `KnowledgeEncoder`,
beside the masked-LM head, under the names used here.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from realm_jax.models import layers
from realm_jax.models.bert import PAD_ID, BertConfig

MAX_SPAN = 10
"""Length of the longest span, in wordpieces."""

SPAN_EPSILON = 1e-3
"""Epsilon of the scorer's LayerNorm in ORQA's published readers."""

SPAN_SCORER_SIZE = 256
"""Features of a span's start, and of its end."""


class SpanScores(NamedTuple):
    """Output of the reader.

    Attributes:
      logits: float32 score of each span; spans are numbered as in `span_bounds`.
      valid: False for a span that is not wholly inside the body.
    """

    logits: Float[Array, "... span"]
    valid: Bool[Array, "... span"]


class SpanReader(nn.Module):
    """BERT with the span scorer.

    The encoder's parameters are under "bert", as in `KnowledgeEncoder`, so that
    fine-tuning can start from the pre-trained encoder.

    Attributes:
      max_span: length of the longest span, in wordpieces.
      layer_norm_epsilon: epsilon of the scorer's LayerNorm.
    """

    config: BertConfig
    max_span: int = MAX_SPAN
    layer_norm_epsilon: float = SPAN_EPSILON

    def rolled(self) -> "SpanReader":
        """Returns the same reader with its encoder rolled (`BertConfig.rolled`)."""
        return self.clone(config=self.config.rolled())

    def setup(self):
        """Creates the encoder and the scorer."""
        self.bert = self.config.make_encoder()
        self.span_dense, self.span_norm, self.span_output = span_layers(
            self.config, self.layer_norm_epsilon
        )

    def __call__(
        self,
        joined_ids: Int[Array, "... joined"],
        segment_ids: Int[Array, "... joined"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> SpanScores:
        """Scores every span of every sequence, `[CLS] question [SEP] body [SEP]`.

        Segments are 0 for the question and 1 for the body; see `Encoder` for the rest.
        """
        leading, length = joined_ids.shape[:-1], joined_ids.shape[-1]
        ids = joined_ids.reshape(-1, length)
        segments = segment_ids.reshape(ids.shape)
        scores = score_spans(
            self.bert(ids, segments, deterministic, packed_length).sequence,
            ids,
            segments,
            (self.span_dense, self.span_norm, self.span_output),
            self.max_span,
        )
        shape = (*leading, length * self.max_span)
        return SpanScores(scores.logits.reshape(shape), scores.valid.reshape(shape))


SpanLayers = tuple[layers.Dense, layers.LayerNorm, layers.Dense]


def span_layers(config: BertConfig, layer_norm_epsilon: float) -> SpanLayers:
    """Creates the layers span_dense, span_norm and span_output of a scorer."""
    return (
        layers.Dense(
            features=(2 * SPAN_SCORER_SIZE,),
            kernel_axes=("embed", None),
            stddev=config.initializer_range,
        ),
        layers.LayerNorm(layer_norm_epsilon),
        layers.Dense(
            features=(1,),
            kernel_axes=("norm", None),
            stddev=config.initializer_range,
        ),
    )


def score_spans(
    sequence: Float[Array, "batch length embed"],
    ids: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    scorer: SpanLayers,
    max_span: int,
) -> SpanScores:
    """Scores every span, given the encoder's last hidden states of joined wordpieces.

    Segments are 0 for the question and 1 for the body. `scorer` are bound layers, as
    created by `span_layers`.
    """
    dense, norm, output = scorer
    starts, ends = jnp.split(dense(sequence), 2, axis=-1)
    # [sequence, start, width, half]: the end of width w is w pieces after the start.
    hidden = nn.relu(starts[:, :, None] + _shifted(ends, max_span))
    logits = output(norm(hidden))
    return SpanScores(
        logits.reshape(len(ids), -1), span_validity(ids, segment_ids, max_span)
    )


def span_bounds(
    length: int, max_span: int = MAX_SPAN
) -> tuple[Int[np.ndarray, " span"], Int[np.ndarray, " span"]]:
    """Returns the first and last position of each span, in the order of the scores.

    Span `start * max_span + width` covers `start` to `start + width`, inclusive; spans
    that extend beyond the sequence are never valid.
    """
    starts = np.repeat(np.arange(length), max_span)
    return starts, starts + np.tile(np.arange(max_span), length)


def span_validity(
    ids: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    max_span: int,
) -> Bool[Array, "batch span"]:
    """Marks the spans that lie wholly in the body: segment 1 without its last [SEP]."""
    is_token = ids != PAD_ID
    is_last = is_token & ~_shifted(is_token[..., None], 2)[:, :, 1, 0]
    is_body = is_token & (segment_ids == 1) & ~is_last
    # The body is contiguous, so a span's first and last piece suffice.
    ends = _shifted(is_body[..., None], max_span)[..., 0]
    return (is_body[:, :, None] & ends).reshape(ids.shape[0], -1)


def _shifted(x: Array, count: int) -> Array:
    """Maps [batch, length, ...] to [batch, length, count, ...], x[i + w] or 0."""
    padding = [(0, 0), (0, count - 1), *[(0, 0)] * (x.ndim - 2)]
    padded, length = jnp.pad(x, padding), x.shape[1]
    return jnp.stack([padded[:, w : w + length] for w in range(count)], axis=2)
