"""Implements the knowledge-augmented encoder, which computes p(y|z,x).

It is a second BERT over the joined query and document, `[CLS] x [SEP] body [SEP]`, with
BERT's masked-LM head at the masked positions alone (Guu et al. 2020, section 3.2).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from realm_jax.models import layers
from realm_jax.models.bert import BertConfig
from realm_jax.models.span_reader import (
    MAX_SPAN,
    SPAN_EPSILON,
    SpanScores,
    score_spans,
    span_layers,
)


class KnowledgeEncoder(nn.Module):
    """BERT with its masked-LM head.

    Attributes:
      span_scorer: whether to add the span reader's scorer, for `span_selection`.
    """

    config: BertConfig
    span_scorer: bool = False

    def setup(self):
        """Creates the encoder and its heads."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        self.bert = config.make_encoder()
        self.head_dense = layers.Dense(
            features=(config.hidden_size,),
            kernel_axes=("embed", None),
            stddev=config.initializer_range,
            dtype=dtype,
        )
        self.head_norm = layers.LayerNorm(config.layer_norm_epsilon, dtype)
        self.head_bias = layers.parameter(
            self, "head_bias", nn.initializers.zeros, (config.vocab_size,), ("vocab",)
        )
        if self.span_scorer:
            self.span_dense, self.span_norm, self.span_output = span_layers(
                config, SPAN_EPSILON
            )

    def __call__(
        self,
        joined_ids: Int[Array, "... joined"],
        segment_ids: Int[Array, "... joined"],
        mask_positions: Int[Array, "... mask"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "... mask vocab"]:
        """Returns float32 logits of the wordpiece at each masked position.

        `segment_ids` are 0 for the query and 1 for the body. Leading axes of
        `mask_positions` broadcast against those of `joined_ids`, so that `[batch, 1,
        mask]` applies to all candidates. See `Encoder` for the rest.
        """
        ids = joined_ids.reshape(-1, joined_ids.shape[-1])
        segments = segment_ids.reshape(ids.shape)
        if self.span_scorer and self.is_initializing():
            sequence = self.bert(ids, segments, deterministic).sequence
            self._score_spans(sequence, ids, segments)
        leading, num_masks = joined_ids.shape[:-1], mask_positions.shape[-1]
        positions = jnp.broadcast_to(mask_positions, (*leading, num_masks))
        masked = self.bert.encode_positions(
            ids,
            segments,
            positions.reshape(-1, num_masks),
            deterministic,
            packed_length,
        )
        return self._logits(masked).reshape(*leading, num_masks, self.config.vocab_size)

    def token_log_probs(
        self,
        joined_ids: Int[Array, "... joined"],
        segment_ids: Int[Array, "... joined"],
        mask_positions: Int[Array, "... mask"],
        mask_ids: Int[Array, "... mask"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> Float[Array, "... mask"]:
        """Returns log p(token|z,x) of the masked wordpieces, float32.

        Leading axes of `mask_ids` broadcast as those of positions do in `__call__`.
        """
        logits = self(
            joined_ids, segment_ids, mask_positions, deterministic, packed_length
        )
        return self._log_probs(logits, mask_ids)

    def tokens_and_spans(
        self,
        joined_ids: Int[Array, "batch joined"],
        segment_ids: Int[Array, "batch joined"],
        mask_positions: Int[Array, "batch mask"],
        mask_ids: Int[Array, "batch mask"],
        deterministic: bool = True,
        packed_length: int | None = None,
    ) -> tuple[Float[Array, "batch mask"], SpanScores]:
        """Returns `token_log_probs` and the body's span scores from one forward pass.

        There is one document per sentence.
        """
        encoded = self.bert(joined_ids, segment_ids, deterministic, packed_length)
        sequence = encoded.sequence
        masked = jnp.take_along_axis(
            sequence, mask_positions[..., None], axis=1, mode="clip"
        )
        return (
            self._log_probs(self._logits(masked), mask_ids),
            self._score_spans(sequence, joined_ids, segment_ids),
        )

    def _logits(
        self, masked: Float[Array, "row mask embed"]
    ) -> Float[Array, "row mask vocab"]:
        """Returns the masked-LM head of the hidden states of masked positions."""
        hidden = layers.ACTIVATIONS[self.config.activation](self.head_dense(masked))
        logits = self.bert.token_logits(self.head_norm(hidden)) + self.head_bias
        return layers.constrain(logits, "batch", "mask", "activation_vocab")

    def _log_probs(self, logits: Array, mask_ids: Array) -> Float[Array, "... mask"]:
        # Compare and sum: a gather along a vocabulary axis sharded over devices would
        # first all-gather the logits.
        is_target = mask_ids[..., None] == jnp.arange(self.config.vocab_size)
        target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return target - jax.nn.logsumexp(logits, axis=-1)

    def _score_spans(
        self, sequence: Array, ids: Array, segment_ids: Array
    ) -> SpanScores:
        scorer = self.span_dense, self.span_norm, self.span_output
        return score_spans(sequence, ids, segment_ids, scorer, MAX_SPAN)
