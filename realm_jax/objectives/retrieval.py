"""The retriever as a distribution over candidate documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from realm_jax.types import Array


def retrieval_log_probs(
    query_embeddings: Float[Array, "batch projection"],
    document_embeddings: Float[Array, "batch candidate projection"],
    valid: Bool[Array, "batch candidate"],
) -> Float[Array, "batch candidate"]:
    """Computes log p(z|x) over the candidates of each query.

    p(z|x) = softmax_z f(x, z) with f(x, z) = Embed_input(x) . Embed_doc(z), a plain
    inner product without scaling (REALM, section 3.1). The sum of the softmax runs over
    the candidates alone (section 3.3).

    Args:
      query_embeddings: Embed_input(x).
      document_embeddings: Embed_doc(z) of each candidate, the null document included.
      valid: False for an empty slot, which gets log-probability -inf.
    """
    scores = jnp.einsum("bp,bkp->bk", query_embeddings, document_embeddings)
    return jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)


def retrieval_gradient(
    log_retrieval: Float[Array, "batch candidate"],
    log_likelihood: Float[Array, "batch candidate"],
) -> Float[Array, "batch candidate"]:
    """Computes r(z), the gradient of log p(y|x) with respect to the score f(x, z).

    r(z) = [p(y|z,x) / p(y|x) - 1] p(z|x) (REALM, section 3.3): a document that predicts
    the answer better than the mixture does is pushed up. Only diagnostics use this;
    training differentiates the marginal likelihood itself.

    Args:
      log_retrieval: log p(z|x).
      log_likelihood: log p(y|z,x).
    """
    log_marginal = jax.nn.logsumexp(
        log_retrieval + log_likelihood, axis=-1, keepdims=True
    )
    return (jnp.exp(log_likelihood - log_marginal) - 1.0) * jnp.exp(log_retrieval)
