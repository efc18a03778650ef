import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.objectives import retrieval


def test_log_probs_equal_a_loop_in_float64():
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(3, 8))
    documents = rng.normal(size=(3, 5, 8))
    valid = np.array(
        [[True] * 5, [True, True, False, True, False], [True] + [False] * 4]
    )
    got = retrieval.retrieval_log_probs(
        jnp.asarray(queries, jnp.float32),
        jnp.asarray(documents, jnp.float32),
        jnp.asarray(valid),
    )
    for row in range(3):
        scores = [float(np.dot(queries[row], z)) for z in documents[row]]
        total = sum(np.exp(s) for s, v in zip(scores, valid[row], strict=True) if v)
        for k, score in enumerate(scores):
            want = score - np.log(total) if valid[row, k] else -np.inf
            assert float(got[row, k]) == pytest.approx(want, abs=1e-4)


def test_worked_example_of_the_paper():
    """f = [2, 1, 0], p(y|z1,x) = .6 and p(y|x) = .5 give r(z1) = .133."""
    log_retrieval = jax.nn.log_softmax(jnp.array([[2.0, 1.0, 0.0]]))
    np.testing.assert_allclose(
        np.exp(log_retrieval[0]), [0.665, 0.245, 0.090], atol=5e-4
    )
    # Any two likelihoods that make the marginal one half will do.
    rest = (0.5 - 0.6 * np.exp(log_retrieval[0, 0])) / np.exp(
        log_retrieval[0, 1:]
    ).sum()
    log_likelihood = jnp.log(jnp.array([[0.6, rest, rest]]))
    gradient = retrieval.retrieval_gradient(log_retrieval, log_likelihood)
    assert float(gradient[0, 0]) == pytest.approx(0.133, abs=5e-4)


def test_retrieval_gradient_is_the_derivative_of_the_log_marginal():
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    log_likelihood = jnp.log(jnp.asarray(rng.uniform(0.01, 1, (4, 6)), jnp.float32))

    def log_marginal(scores):
        log_retrieval = jax.nn.log_softmax(scores)
        return jax.nn.logsumexp(log_retrieval + log_likelihood, axis=-1).sum()

    want = jax.grad(log_marginal)(scores)
    got = retrieval.retrieval_gradient(jax.nn.log_softmax(scores), log_likelihood)
    np.testing.assert_allclose(got, want, atol=1e-6)
    # A softmax's gradient moves mass, it makes none.
    np.testing.assert_allclose(got.sum(axis=-1), np.zeros(4), atol=1e-6)
