"""Implements the inverse cloze task: find a sentence's block (ORQA, section 4)."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from realm_jax.types import Array


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
    blocks of every device, so negatives come from the global batch.

    Args:
      query_embeddings: embeddings of the sentences.
      document_embeddings: embeddings of the blocks.
      block_ids: the block each row was taken from. A row of the same block is not a
        negative: its column is left out of the softmax.
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
