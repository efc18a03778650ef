"""Implements distillation: a retriever learns the distribution of a teacher.

The loss of Izacard and Grave 2021, whose teacher is a reader.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Float

from realm_jax.objectives.retrieval import retrieval_log_probs
from realm_jax.types import Array


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

    Args:
      query_embeddings: Embed_input(x).
      document_embeddings: Embed_doc(z) of each candidate.
      teacher: the teacher's p(z|x), which sums to 1 for each query.
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
