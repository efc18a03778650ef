"""Retrieval, the inverse cloze task and distillation in float64, by loops and SciPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from realm_jax.objectives import retrieval
from realm_jax.objectives.masked_lm import Marginalization, marginal_likelihood


def test_log_probs_are_a_softmax_over_the_valid_documents():
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(3, 8)), rng.normal(size=(3, 5, 8))
    valid = np.array(
        [[True] * 5, [True, True, False, True, False], [True] + [False] * 4]
    )
    got = retrieval.retrieval_log_probs(*map(jnp.asarray, (queries, documents, valid)))
    scores = np.einsum("bp,bkp->bk", queries, documents)
    want = scipy.special.log_softmax(np.where(valid, scores, -np.inf), axis=1)
    np.testing.assert_allclose(got, want, atol=1e-4)


def likelihood_gradient(scores, log_likelihood, marginalization):
    """What training gives f(x, z) when it ascends log p(y|x)."""

    def log_marginal(scores):
        # Embeddings of one dimension, whose inner products are the scores.
        log_retrieval = retrieval.retrieval_log_probs(
            jnp.ones((len(scores), 1)), scores[..., None], jnp.ones(scores.shape, bool)
        )
        return -marginal_likelihood(
            log_retrieval,
            log_likelihood[..., None],
            jnp.ones((len(scores), 1)),
            marginalization,
        ).loss_total

    return jax.grad(log_marginal)(scores)


# One mask alone is a span.
@pytest.mark.parametrize("marginalization", Marginalization)
def test_the_gradient_is_that_of_the_paper(marginalization):
    """r(z) = [p(y|z,x) / p(y|x) - 1] p(z|x) (REALM, section 3.3), in float64."""
    rng = np.random.default_rng(1)
    scores, likelihood = rng.normal(size=(4, 6)), rng.uniform(0.01, 1, (4, 6))
    p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    marginal = (p * likelihood).sum(axis=-1, keepdims=True)
    want = (likelihood / marginal - 1) * p
    got = likelihood_gradient(jnp.asarray(scores), jnp.log(likelihood), marginalization)
    np.testing.assert_allclose(got, want, atol=1e-6)
    # A softmax's gradient moves mass, it makes none.
    np.testing.assert_allclose(got.sum(axis=-1), np.zeros(4), atol=1e-6)


def share_twin(queries, documents, block_ids, source_block, valid):
    """One query at a time, over every document of the batch that counts for it."""
    shares = []
    for row, query in enumerate(queries):
        own = [
            math.exp(query @ z)
            for z, v in zip(documents[row], valid[row], strict=True)
            if v
        ]
        not_others = {-1, int(source_block[row]), *block_ids[row].tolist()}
        others = [
            math.exp(query @ documents[other, k])
            for other in range(len(queries))
            for k in range(documents.shape[1])
            if valid[other, k] and int(block_ids[other, k]) not in not_others
        ]
        shares.append(sum(own) / (sum(own) + sum(others)))
    return shares


def batch_of_candidates():
    """Rows share blocks, one holds another's source, one has an empty slot."""
    rng = np.random.default_rng(2)
    block_ids = np.array([[-1, 4, 7], [-1, 7, 2], [-1, 9, -1], [-1, 5, 6]], np.int32)
    valid = np.ones(block_ids.shape, bool)
    valid[2, 2] = False
    return {
        "query_embeddings": rng.normal(size=(4, 8)),
        "document_embeddings": rng.normal(size=(4, 3, 8)),
        "block_ids": block_ids,
        "source_block": np.array([9, 3, -1, 4], np.int32),
        "valid": valid,
    }


def share_of_batch(arrays):
    return retrieval.log_share_of_batch(**jax.tree.map(jnp.asarray, arrays))


def test_the_share_of_the_batch_equals_a_loop():
    arrays = batch_of_candidates()
    got = np.exp(share_of_batch(arrays))
    np.testing.assert_allclose(got, share_twin(*arrays.values()), rtol=1e-5)
    assert (got < 0.95).all()


def test_alone_in_a_batch_the_candidates_are_all_there_is():
    """And the gradient is zero, not the NaN of a sum over nothing."""
    arrays = {name: array[:1] for name, array in batch_of_candidates().items()}
    value, gradient = jax.value_and_grad(
        lambda q: share_of_batch({**arrays, "query_embeddings": q}).sum()
    )(jnp.asarray(arrays["query_embeddings"]))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((1, 8)))


def slow_inverse_cloze(queries, documents, blocks):
    total, correct = 0.0, 0
    for i in range(len(queries)):
        scores = {
            j: float(np.dot(queries[i], documents[j]))
            for j in range(len(documents))
            if j == i or blocks[j] != blocks[i]
        }
        total -= scores[i] - math.log(sum(math.exp(s) for s in scores.values()))
        correct += scores[i] >= max(scores.values())
    return total, correct


def test_inverse_cloze_equals_a_loop_in_float64():
    queries, documents = np.random.default_rng(3).normal(size=(2, 5, 6))
    for blocks in ([0, 1, 2, 3, 4], [7, 7, 2, 7, 2], [1, 1, 1, 1, 1]):
        arrays = map(jnp.asarray, (queries, documents, blocks))
        got = retrieval.inverse_cloze(*arrays)
        total, correct = slow_inverse_cloze(queries, documents, blocks)
        assert float(got.loss_total) == pytest.approx(total, abs=1e-4)
        assert float(got.correct) == correct
        assert float(got.count) == 5


def test_distillation_is_the_divergence_of_scipy():
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(3, 8)), rng.normal(size=(3, 5, 8))
    teacher = rng.dirichlet(np.ones(5), size=3)
    teacher[1] = [0.75, 0.0, 0.25, 0.0, 0.0]
    got = retrieval.distillation(*map(jnp.asarray, (queries, documents, teacher)))
    scores = np.einsum("bp,bkp->bk", queries, documents)
    student = scipy.special.softmax(scores, axis=1)
    expected = scipy.stats.entropy(teacher, student, axis=1).sum()
    assert float(got.loss_total) == pytest.approx(expected, rel=1e-5)
    assert float(got.agreed) == (student.argmax(1) == teacher.argmax(1)).sum()
    assert float(got.count) == 3
