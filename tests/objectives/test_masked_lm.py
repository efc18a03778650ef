import math

import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.objectives import masked_lm
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.pretraining import Evidence, marginal_likelihood

BATCH, CANDIDATES, MASKS = 3, 4, 5


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    log_retrieval = np.log(rng.dirichlet(np.ones(CANDIDATES), BATCH))
    log_tokens = np.log(rng.uniform(0.01, 1.0, (BATCH, CANDIDATES, MASKS)))
    weights = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], float)
    return log_retrieval, log_tokens, weights


def slow_loss(log_retrieval, log_tokens, weights, marginalization):
    """The definition, one float64 at a time."""
    total, count = 0.0, 0
    for b in range(BATCH):
        masks = [m for m in range(MASKS) if weights[b, m]]
        by_token = marginalization is Marginalization.PER_TOKEN
        for group in [[m] for m in masks] if by_token else [masks] if masks else []:
            p = sum(
                math.exp(log_retrieval[b, z])
                * math.prod(math.exp(log_tokens[b, z, m]) for m in group)
                for z in range(CANDIDATES)
            )
            total, count = total - math.log(p), count + 1
    return total, count


@pytest.mark.parametrize("marginalization", Marginalization)
def test_loss_equals_a_loop_in_float64(arrays, marginalization):
    got = masked_lm.marginal_likelihood(*map(jnp.asarray, arrays), marginalization)
    total, count = slow_loss(*arrays, marginalization)
    assert float(got.loss_total) == pytest.approx(total, rel=1e-5)
    assert float(got.loss_count) == count
    # An empty slot adds nothing.
    log_retrieval, log_tokens, weights = arrays
    wider = np.concatenate([log_tokens, np.zeros((BATCH, 1, MASKS))], axis=1)
    padded = np.concatenate([log_retrieval, np.full((BATCH, 1), -np.inf)], axis=1)
    got = masked_lm.marginal_likelihood(
        *map(jnp.asarray, (padded, wider, weights)), marginalization
    )
    assert float(got.loss_total) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("marginalization", Marginalization)
def test_normalising_over_the_batch_changes_every_term(arrays, marginalization):
    log_retrieval, log_tokens, weights = arrays
    log_share = np.array([-0.1, -2.0, -1.0])
    of_batch = log_retrieval + log_share[:, None]
    total, count = slow_loss(of_batch, log_tokens, weights, marginalization)
    log_retrieval, log_tokens, weights = map(jnp.asarray, arrays)
    embeddings = jnp.zeros((BATCH, CANDIDATES, 2))
    blocks = jnp.zeros((BATCH, CANDIDATES), int)
    evidence = Evidence(
        likelihood=masked_lm.marginal_likelihood(
            log_retrieval, log_tokens, weights, marginalization
        ),
        log_retrieval=log_retrieval,
        log_share=jnp.asarray(log_share),
        log_tokens=log_tokens,
        mask_weights=weights,
        query_embeddings=embeddings[:, 0],
        document_embeddings=embeddings,
        block_ids=blocks,
        source_block=blocks[:, 0],
        valid=blocks == 0,
    )
    loss, _ = marginal_likelihood(evidence)
    assert float(loss) == pytest.approx(total / count, rel=1e-5)
