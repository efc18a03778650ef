"""Implements span selection of masked answers in a document (Glass et al. 2020).

A masked sentence serves as an unlabelled question: where its document contains the
answer, a span reader can learn from it what it learns from questions, which words to
look for, and where an answer begins and ends. An extension; in REALM, fine-tuning
starts with a randomly initialised span scorer.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Float

from realm_jax.objectives.open_qa import (
    AnswerMarginalization,
    negative_log_mass,
    span_log_probs,
)
from realm_jax.types import Array


@flax.struct.dataclass
class SpanSelection:
    """Sums over a batch of masked sentences, each read with one document.

    Attributes:
      loss_total: -log of the probability of the spans that are an answer.
      correct: number of sentences whose most probable span is an answer.
      count: number of sentences whose document contains an answer; the loss of the
        others is 0.
    """

    loss_total: Float[Array, ""]
    correct: Float[Array, ""]
    count: Float[Array, ""]


def span_selection(
    span_logits: Float[Array, "batch span"],
    span_valid: Bool[Array, "batch span"],
    span_is_answer: Bool[Array, "batch span"],
) -> SpanSelection:
    """Computes a softmax over the body's spans; all answer spans are correct.

    Args:
      span_logits: scores of the span scorer.
      span_valid: False where a span does not exist.
      span_is_answer: True for a span that was masked in the sentence. Ignored outside
        the body.
    """
    log_spans = span_log_probs(
        # With one document each, the retrieval score cancels.
        jnp.zeros((len(span_logits), 1)),
        span_logits[:, None],
        span_valid[:, None],
        AnswerMarginalization.PRODUCT,
    )[:, 0]
    right = span_is_answer & span_valid
    best = jnp.argmax(log_spans, axis=-1)
    has_answer = right.any(axis=-1)
    found = jnp.take_along_axis(right, best[:, None], axis=-1)[:, 0]
    return SpanSelection(
        loss_total=negative_log_mass(log_spans, right).sum(),
        correct=jnp.asarray(found.sum(), jnp.float32),
        count=jnp.asarray(has_answer.sum(), jnp.float32),
    )
