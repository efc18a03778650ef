"""The span reader for Open-QA: scores every short span of a document's body.

ORQA (Lee et al. 2019), section 5, as the authors' code has it: one dense layer of 512
split into a start and an end half; a span is LayerNorm(ReLU(start_i + end_j)), then one
number.

The scorer is trained with questions; by span selection a warm start can train it before
there are any (`objectives/span_selection.py`). It then lies beside the masked-LM head
of a `KnowledgeEncoder`, under the names it has here.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from realm_jax.models import layers
from realm_jax.models.bert import PAD_ID, Bert, BertConfig

MAX_SPAN = 10
"""Wordpieces of the longest span."""

SPAN_EPSILON = 1e-3
"""Of the scorer's LayerNorm in ORQA's published readers."""

_HALF = 256


class SpanScores(NamedTuple):
    """What the reader returns.

    Attributes:
      logits: float32, one a span; spans are numbered as in `span_bounds`.
      valid: False for a span that is not wholly inside the body.
    """

    logits: Float[Array, "... span"]
    valid: Bool[Array, "... span"]


class SpanReader(nn.Module):
    """BERT with the span scorer.

    The encoder lies under "bert", as in `KnowledgeEncoder`, so that fine-tuning starts
    from the pre-trained one.

    Attributes:
      config: the encoder.
      max_span: wordpieces of the longest span.
      layer_norm_epsilon: 1e-3 in ORQA's published readers.
    """

    config: BertConfig
    max_span: int = MAX_SPAN
    layer_norm_epsilon: float = SPAN_EPSILON

    def setup(self):
        """Creates the encoder and the scorer."""
        self.bert = Bert(self.config)
        self.span_dense, self.span_norm, self.span_output = span_layers(
            self.config, self.layer_norm_epsilon
        )

    def __call__(
        self,
        joined_ids: Int[Array, "... joined"],
        segment_ids: Int[Array, "... joined"],
        deterministic: bool = True,
    ) -> SpanScores:
        """Scores every span of every sequence.

        Args:
          joined_ids: `[CLS] question [SEP] body [SEP]`, 0 where padded.
          segment_ids: 0 for the question, 1 for the body.
          deterministic: no dropout; otherwise an rng named "dropout" is needed.
        """
        leading, length = joined_ids.shape[:-1], joined_ids.shape[-1]
        ids = joined_ids.reshape(-1, length)
        segments = segment_ids.reshape(ids.shape)
        scores = score_spans(
            self.bert(ids, segments, deterministic).sequence,
            ids,
            segments,
            (self.span_dense, self.span_norm, self.span_output),
            self.max_span,
        )
        shape = (*leading, length * self.max_span)
        return SpanScores(scores.logits.reshape(shape), scores.valid.reshape(shape))


SpanLayers = tuple[layers.Dense, layers.LayerNorm, layers.Dense]


def span_layers(config: BertConfig, layer_norm_epsilon: float) -> SpanLayers:
    """Makes a scorer: for the attributes span_dense, span_norm and span_output."""
    return (
        layers.Dense(
            features=(2 * _HALF,),
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
    """Scores every span of what an encoder returned for joined wordpieces.

    Args:
      sequence: the encoder's last hidden states.
      ids: what it read, 0 where padded.
      segment_ids: 0 for the question, 1 for the body.
      scorer: bound layers, as `span_layers` makes them.
      max_span: wordpieces of the longest span.
    """
    dense, norm, output = scorer
    starts, ends = jnp.split(dense(sequence), 2, axis=-1)
    # [sequence, start, width, half]: the end of width w stands w pieces further.
    hidden = nn.relu(starts[:, :, None] + _shifted(ends, max_span))
    logits = output(norm(hidden))
    return SpanScores(
        logits.reshape(len(ids), -1), span_validity(ids, segment_ids, max_span)
    )


def span_bounds(
    length: int, max_span: int = MAX_SPAN
) -> tuple[Int[np.ndarray, " span"], Int[np.ndarray, " span"]]:
    """First and last position of each span, in the order of the reader's scores.

    Span `start * max_span + width` reaches from `start` to `start + width`; those that
    reach beyond the sequence are never valid.
    """
    starts = np.repeat(np.arange(length), max_span)
    return starts, starts + np.tile(np.arange(max_span), length)


def span_validity(
    ids: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    max_span: int,
) -> Bool[Array, "batch span"]:
    """True for the spans whose wordpieces all belong to the body.

    The body is segment 1 without its final [SEP].
    """
    is_token = ids != PAD_ID
    is_last = is_token & ~_shifted(is_token[..., None], 2)[:, :, 1, 0]
    is_body = is_token & (segment_ids == 1) & ~is_last
    # The body is one run, so its first and last piece decide.
    ends = _shifted(is_body[..., None], max_span)[..., 0]
    return (is_body[:, :, None] & ends).reshape(ids.shape[0], -1)


def _shifted(x: Array, count: int) -> Array:
    """[batch, length, ...] -> [batch, length, count, ...]: x[i + w], 0 past the end."""
    padding = [(0, 0), (0, count - 1), *[(0, 0)] * (x.ndim - 2)]
    padded, length = jnp.pad(x, padding), x.shape[1]
    return jnp.stack([padded[:, w : w + length] for w in range(count)], axis=2)
