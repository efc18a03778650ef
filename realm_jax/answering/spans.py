"""Finds the best answer span of each question over the blocks that were read."""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from realm_jax.models.span_reader import SpanReader, SpanScores
from realm_jax.objectives.open_qa import AnswerMarginalization, span_log_probs
from realm_jax.types import Array


class Spans(NamedTuple):
    """Best spans and answer probabilities of a batch of questions.

    Attributes:
      best: index of the best span, counted over all blocks.
      log_probability: its log p(z, span|x).
      log_documents: log p(z|x) of each block.
      log_answers: log p(y|z,x) of each block, where y is the best span's wordpieces.
      begins: True at the positions where these wordpieces begin.
    """

    best: Int[Array, " question"]
    log_probability: Float[Array, " question"]
    log_documents: Float[Array, "question read"]
    log_answers: Float[Array, "question read"]
    begins: Bool[Array, "question read joined"]


# Static arguments compare by value, so a new index or corpus causes no recompilation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def find_spans(
    reader: SpanReader,
    marginalization: AnswerMarginalization,
    params: PyTree,
    ids: Int[Array, "question read joined"],
    segment_ids: Int[Array, "question read joined"],
    scores: Float[Array, "question read"],
    begins_word: Bool[Array, "question read joined"],
    ends_word: Bool[Array, "question read joined"],
) -> Spans:
    """Returns the best span of whole words of each question.

    Args:
      marginalization: combination of retrieval and reading, as in training.
      ids: `[CLS] x [SEP] body [SEP]` of each block that is read.
      segment_ids: 1 for body and the last [SEP].
      scores: f(x, z); -inf for a block that was not found.
      begins_word, ends_word: True at the first and at the last piece of every word of a
        body.
    """
    spans = cast(SpanScores, reader.apply({"params": params}, ids, segment_ids))
    ends = _windows(ends_word, reader.max_span)
    whole = (begins_word[..., None] & ends).reshape(spans.valid.shape)
    valid = spans.valid & whole & jnp.isfinite(scores)[:, :, None]
    log_probs = span_log_probs(scores, spans.logits, valid, marginalization)
    flat = log_probs.reshape(len(scores), -1)
    best = flat.argmax(axis=-1)
    same = valid & _same_pieces(ids, best, reader.max_span)
    log_documents = jax.nn.logsumexp(log_probs, axis=-1)
    log_joint = jax.nn.logsumexp(jnp.where(same, log_probs, -jnp.inf), axis=-1)
    return Spans(
        best,
        flat.max(axis=-1),
        log_documents,
        log_joint - log_documents,
        same.reshape(*ids.shape, -1).any(axis=-1),
    )


def _same_pieces(
    ids: Int[Array, "question read joined"],
    best: Int[Array, " question"],
    max_span: int,
) -> Bool[Array, "question read span"]:
    """Marks the spans with the wordpieces of the best one, including itself."""
    length, windows = ids.shape[-1], _windows(ids, max_span)
    document, span = jnp.divmod(best, length * max_span)
    start, width = jnp.divmod(span, max_span)
    # Row by row, so that devices which have a part of the questions exchange nothing.
    wanted = jax.vmap(lambda rows, *place: rows[place])(windows, document, start)
    widths = jnp.arange(max_span)
    beyond = widths > width[:, None, None, None]
    begins = ((windows == wanted[:, None, None]) | beyond).all(axis=-1)
    same = begins[..., None] & (widths == width[:, None, None, None])
    return same.reshape(*ids.shape[:-1], -1)


def _windows(
    values: Shaped[Array, "question read joined"], max_span: int
) -> Shaped[Array, "question read joined width"]:
    """Returns the values at each position and after it, 0 beyond the last."""
    length = values.shape[-1]
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, max_span - 1)))
    return jnp.stack([padded[..., w : w + length] for w in range(max_span)], -1)
