"""Registers an objective of one's own: the reader teaches the retriever, as in Atlas.

    python examples/own_objective.py

prints what the objective asks of the retriever for one sentence. A run trains with it:

    realm pretrain --import_module=examples.own_objective \
        --gin.pretrain/OBJECTIVE='"perplexity_distillation"' ...

REALM trains the retriever through p(y|x), which one good document satisfies. Perplexity
distillation (Izacard et al. 2022, section 2.2) asks for p(z|x) to be the distribution
that the reader's likelihoods make of the same documents.
"""

import jax
import jax.numpy as jnp

from realm_jax.objectives import pretraining


@pretraining.register_objective("perplexity_distillation")
def perplexity_distillation(evidence: pretraining.Evidence):
    """Computes KL(softmax_z log p(y|z,x) || p(z|x)) - log p(y|x)."""
    likelihood, valid = evidence.likelihood, evidence.valid
    weights, count = likelihood.weights, jnp.maximum(likelihood.weights.sum(), 1.0)
    divergence = divergence_from_reader(
        evidence.log_retrieval, likelihood.log_candidates, valid
    )
    # The reader alone learns from p(y|x): its gradient stops at p(z|x).
    mixture = jax.lax.stop_gradient(evidence.log_retrieval) + likelihood.log_candidates
    log_marginal = jax.nn.logsumexp(mixture, axis=-1)
    loss = ((divergence - log_marginal) * weights).sum() / count
    return loss, {"distillation": ((divergence * weights).sum(), weights.sum())}


def divergence_from_reader(log_retrieval, log_candidates, valid):
    """Returns KL(reader || retriever) of each sentence; the reader gets no gradient."""
    log_candidates = jax.lax.stop_gradient(log_candidates)
    log_teacher = jax.nn.log_softmax(
        jnp.where(valid, log_candidates, -jnp.inf), axis=-1
    )
    # Empty slots are -inf in both.
    difference = jnp.where(valid, log_teacher - log_retrieval, 0.0)
    return (jnp.exp(log_teacher) * difference).sum(axis=-1)


def main() -> None:
    """Runs the example."""
    log_retrieval = jnp.log(jnp.array([[0.6, 0.3, 0.1]]))
    log_candidates = jnp.array([[-9.0, -8.0, -2.0]])
    valid = jnp.ones((1, 3), bool)
    gradient = jax.grad(
        lambda scores: divergence_from_reader(
            jax.nn.log_softmax(scores), log_candidates, valid
        ).sum()
    )(log_retrieval)
    print("p(z|x)   ", *(f"{value:+.2f}" for value in jnp.exp(log_retrieval)[0]))
    print("gradient ", *(f"{value:+.2f}" for value in gradient[0]))


if __name__ == "__main__":
    main()
