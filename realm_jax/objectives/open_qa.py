"""Implements the retriever and reader losses of Open-QA (ORQA, section 5).

Span selection (Glass et al. 2020) trains the reader without questions: where its
document contains what was masked, a sentence teaches it which words to look for, and
where an answer begins and ends. An extension; in REALM, fine-tuning starts with a
randomly initialised span scorer.
"""

import enum

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from realm_jax.types import Array


class AnswerMarginalization(enum.Enum):
    """Combination of retrieval and reading.

    JOINT_SOFTMAX: one softmax over all spans of all blocks, after each block's
      retrieval score is added to its spans (the authors' code).
    PRODUCT: p(z|x) p(span|z,x), a softmax over blocks times one over the spans of a
      block (the paper's formula).
    """

    JOINT_SOFTMAX = "joint_softmax"
    PRODUCT = "product"


@flax.struct.dataclass
class OpenQa:
    """Sums over a batch of questions; divide by the counts.

    Attributes:
      loss_total: sum of retriever loss and reader loss.
      retriever_total: -log of the retrieval mass on blocks that contain an answer.
      reader_total: -log of the mass on correct spans.
      retriever_count: questions with a positive among the retrieved blocks.
      reader_count: questions with a correct span in a block that was read.
      count: number of questions.
    """

    loss_total: Float[Array, ""]
    retriever_total: Float[Array, ""]
    reader_total: Float[Array, ""]
    retriever_count: Float[Array, ""]
    reader_count: Float[Array, ""]
    count: Float[Array, ""]


def span_log_probs(
    retrieval_scores: Float[Array, "batch candidate"],
    span_logits: Float[Array, "batch candidate span"],
    span_valid: Bool[Array, "batch candidate span"],
    marginalization: AnswerMarginalization,
) -> Float[Array, "batch candidate span"]:
    """Computes log p(z, span|x) over every span of every block that is read.

    Args:
      retrieval_scores: f(x, z) of the blocks that are read.
      span_logits: the reader's score of each span.
      span_valid: False where a span does not exist; its log-probability is -inf.
      marginalization: combination of retrieval and reading.
    """
    logits = jnp.where(span_valid, span_logits, -jnp.inf)
    match marginalization:
        case AnswerMarginalization.JOINT_SOFTMAX:
            joint = logits + retrieval_scores[:, :, None]
            log_mass = jax.nn.logsumexp(joint, axis=(1, 2), keepdims=True)
            return joint - _finite(log_mass)
        case AnswerMarginalization.PRODUCT:
            readable = span_valid.any(axis=-1)
            log_blocks = jax.nn.log_softmax(
                jnp.where(readable, retrieval_scores, -jnp.inf), axis=-1
            )
            log_mass = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            return log_blocks[:, :, None] + logits - _finite(log_mass)


def open_qa(
    retrieval_scores: Float[Array, "batch neighbour"],
    block_has_answer: Bool[Array, "batch neighbour"],
    log_spans: Float[Array, "batch candidate span"],
    span_is_answer: Bool[Array, "batch candidate span"],
) -> OpenQa:
    """Sums the retriever's and the reader's loss; a term without a positive is 0.

    Args:
      retrieval_scores: f(x, z) of every retrieved block (5000 in the paper); -inf for
        an empty slot.
      block_has_answer: True for a block that contains an answer.
      log_spans: log p(z, span|x) from `span_log_probs`, of the blocks that are read.
      span_is_answer: True for a span that is an answer.
    """
    log_blocks = jax.nn.log_softmax(retrieval_scores, axis=-1)
    retriever = negative_log_mass(log_blocks, block_has_answer)
    batch = log_spans.shape[0]
    reader = negative_log_mass(
        log_spans.reshape(batch, -1), span_is_answer.reshape(batch, -1)
    )
    return OpenQa(
        loss_total=retriever.sum() + reader.sum(),
        retriever_total=retriever.sum(),
        reader_total=reader.sum(),
        retriever_count=_any(block_has_answer),
        # An answer at an invalid span, such as in the question, has no loss.
        reader_count=_any(span_is_answer & jnp.isfinite(log_spans)),
        count=jnp.asarray(batch, jnp.float32),
    )


def negative_log_mass(
    log_probs: Float[Array, "batch item"], positive: Bool[Array, "batch item"]
) -> Float[Array, " batch"]:
    """Returns -log of the positives' total probability, 0 where there is none."""
    has_positive = jnp.any(positive & jnp.isfinite(log_probs), axis=-1)
    # The inner `where` keeps the gradient of rows without a positive free of NaN.
    masked = jnp.where(
        has_positive[:, None], jnp.where(positive, log_probs, -jnp.inf), 0.0
    )
    return jnp.where(has_positive, -jax.nn.logsumexp(masked, axis=-1), 0.0)


def _any(positive: Bool[Array, "batch *items"]) -> Float[Array, ""]:
    axes = tuple(range(1, positive.ndim))
    return positive.any(axis=axes).sum().astype(jnp.float32)


def _finite(log_mass: Array) -> Array:
    """Replaces -inf (an empty softmax) by 0, so that -inf - log_mass stays -inf."""
    return jnp.where(jnp.isfinite(log_mass), log_mass, 0.0)


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

    `span_valid` is False where a span does not exist; `span_is_answer` is True for one
    that was masked in the sentence, and ignored outside the body.
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
