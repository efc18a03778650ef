"""Span selection against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.objectives.span_selection import span_selection

LOGITS = np.array([[2.0, 1.0, 0.5, 3.0], [0.0, 4.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
VALID = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
# Two answers; one outside the body beside one that is not the best; none that exists.
ANSWER = np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0]], bool)


def test_it_is_the_mass_of_the_answers_among_the_valid_spans():
    found = jax.jit(span_selection)(jnp.asarray(LOGITS), VALID, ANSWER)
    expected = 0.0
    for logits, valid, answer in zip(LOGITS[:2], VALID, ANSWER, strict=False):
        weights = np.exp(logits) * valid
        expected -= np.log((weights * answer).sum() / weights.sum())
    assert float(found.loss_total) == pytest.approx(expected, rel=1e-5)
    assert (float(found.correct), float(found.count)) == (1.0, 2.0)


def test_documents_without_an_answer_teach_nothing():
    def loss(logits):
        return span_selection(logits, VALID, ANSWER & ~VALID).loss_total

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(LOGITS))
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def test_its_gradient_is_finite_where_no_span_is_valid():
    def loss(logits):
        return span_selection(logits, VALID, ANSWER).loss_total

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(LOGITS)))
    assert np.isfinite(gradient).all()
    assert gradient[:2].any(axis=1).all()
