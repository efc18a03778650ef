"""Computes the retriever's distribution over candidate documents."""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from realm_jax.types import NULL_BLOCK, Array


class Normalization(enum.Enum):
    """Documents over which p(z|x) sums to one while a retriever is trained.

    CANDIDATES: those retrieved for x, the approximation of the paper (section 3.3).
    BATCH: those and the documents retrieved for the other sentences of the batch, a
      closer approximation of the sum over the corpus. With CANDIDATES, a retriever can
      move every query towards documents that help many sentences without any penalty
      in the loss for retrieving them for all other sentences too.
    """

    CANDIDATES = "candidates"
    BATCH = "batch"


def retrieval_log_probs(
    query_embeddings: Float[Array, "batch projection"],
    document_embeddings: Float[Array, "batch candidate projection"],
    valid: Bool[Array, "batch candidate"],
) -> Float[Array, "batch candidate"]:
    """Computes log p(z|x) over the candidates of each query.

    p(z|x) = softmax_z f(x, z) with f(x, z) = Embed_input(x) . Embed_doc(z), an unscaled
    inner product (REALM, section 3.1). The softmax is normalised over the candidates
    alone (section 3.3).

    Args:
      query_embeddings: Embed_input(x).
      document_embeddings: Embed_doc(z) of each candidate, the null document included.
      valid: False for an empty slot, which gets log-probability -inf.
    """
    scores = jnp.einsum("bp,bkp->bk", query_embeddings, document_embeddings)
    return jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)


def log_share_of_batch(
    query_embeddings: Float[Array, "batch projection"],
    document_embeddings: Float[Array, "batch candidate projection"],
    block_ids: Int[Array, "batch candidate"],
    source_block: Int[Array, " batch"],
    valid: Bool[Array, "batch candidate"],
) -> Float[Array, " batch"]:
    """Computes the log share of x's own candidates in p(z|x) over the batch.

    log sum_{own z} exp f(x, z) - log sum_{z of the batch} exp f(x, z). Added to
    log p(y|x) over the own candidates, it gives log p(y|x) with `Normalization.BATCH`,
    where p(y|z,x) of documents not retrieved for x is taken to be 0: a lower bound of
    the sum over all of them.

    The documents of other rows exclude x's own candidates, null documents and the block
    that x was taken from. Under `jit` the batch axis may be sharded: the product below
    then gathers the documents of every device.

    Args:
      query_embeddings: Embed_input(x).
      document_embeddings: Embed_doc(z) of each candidate.
      block_ids: block of each candidate, -1 for the null document.
      source_block: the block that x was taken from, -1 if none.
      valid: False for an empty slot.
    """
    own = jnp.einsum("bp,bkp->bk", query_embeddings, document_embeddings)
    others = jnp.einsum("bp,ckp->bck", query_embeddings, document_embeddings)
    is_own = (block_ids[:, None, :, None] == block_ids[None, :, None, :]).any(axis=2)
    is_source = block_ids[None] == source_block[:, None, None]
    counts = (valid & (block_ids != NULL_BLOCK))[None] & ~is_own & ~is_source
    own = jnp.where(valid, own, -jnp.inf)
    others = jnp.where(counts, others, -jnp.inf).reshape(len(own), -1)
    # A single sum, because there may be no other documents.
    everything = jnp.concatenate([own, others], axis=-1)
    return jax.nn.logsumexp(own, axis=-1) - jax.nn.logsumexp(everything, axis=-1)
