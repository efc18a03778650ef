"""The retriever's distribution over documents, and losses of it.

Two losses train the retriever alone: the inverse cloze task, to find a sentence's block
(ORQA, section 4), and distillation, to learn the distribution of a teacher (Izacard and
Grave 2021, whose teacher is a reader).
"""

import enum

import flax.struct
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

    The null document is one of them. `valid` is False for an empty slot, which gets
    log-probability -inf.
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

    Block -1 is the null document, or no source; `valid` is False for an empty slot.
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


@flax.struct.dataclass
class Distillation:
    """Sums over a batch of queries; divide by `count`.

    Attributes:
      loss_total: summed Kullback-Leibler divergence from the teacher, in nats.
      agreed: number of queries whose best document is the teacher's.
      count: number of queries.
    """

    loss_total: Float[Array, ""]
    agreed: Float[Array, ""]
    count: Float[Array, ""]


def distillation(
    query_embeddings: Float[Array, "batch projection"],
    document_embeddings: Float[Array, "batch candidate projection"],
    teacher: Float[Array, "batch candidate"],
) -> Distillation:
    """Computes KL(teacher || p(z|x)) over the candidates of each query.

    `teacher` is the teacher's p(z|x), which sums to 1 for each query.
    """
    log_probs = retrieval_log_probs(
        query_embeddings, document_embeddings, jnp.ones(teacher.shape, bool)
    )
    # 0 log 0 is 0.
    log_teacher = jnp.log(jnp.where(teacher > 0, teacher, 1.0))
    divergence = (teacher * (log_teacher - log_probs)).sum(axis=-1)
    agreed = log_probs.argmax(axis=-1) == teacher.argmax(axis=-1)
    return Distillation(
        loss_total=divergence.sum(),
        agreed=agreed.sum().astype(divergence.dtype),
        count=jnp.asarray(len(teacher), divergence.dtype),
    )


@flax.struct.dataclass
class InverseCloze:
    """Sums over a batch of sentence-block pairs; divide by `count`.

    Attributes:
      loss_total: summed negative log-probability of the correct block.
      correct: number of sentences that rank their own block first.
      count: number of pairs.
    """

    loss_total: Float[Array, ""]
    correct: Float[Array, ""]
    count: Float[Array, ""]


def inverse_cloze(
    query_embeddings: Float[Array, "batch projection"],
    document_embeddings: Float[Array, "batch projection"],
    block_ids: Int[Array, " batch"],
) -> InverseCloze:
    """Computes a softmax over the blocks of the global batch; row i's own is correct.

    Under `jit` the batch axis may be sharded: the product below then gathers the
    blocks of every device, so negatives come from the global batch. A row that was
    taken from the same block is not a negative: its column is left out of the softmax.
    """
    scores = query_embeddings @ document_embeddings.T
    own = jnp.eye(scores.shape[0], dtype=bool)
    duplicate = (block_ids[:, None] == block_ids[None, :]) & ~own
    log_probs = jax.nn.log_softmax(jnp.where(duplicate, -jnp.inf, scores), axis=-1)
    right = jnp.diagonal(log_probs)
    return InverseCloze(
        loss_total=-right.sum(),
        correct=(right >= log_probs.max(axis=-1)).sum().astype(scores.dtype),
        count=jnp.asarray(scores.shape[0], scores.dtype),
    )
