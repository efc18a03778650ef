"""Distillation against a loop in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from realm_jax.objectives.retrieval import distillation

RNG = np.random.default_rng(0)
QUERIES, DOCUMENTS = RNG.normal(size=(3, 8)), RNG.normal(size=(3, 5, 8))
TEACHER = RNG.dirichlet(np.ones(5), size=3)
TEACHER[1] = [0.75, 0.0, 0.25, 0.0, 0.0]


def in_float32(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def test_it_is_the_divergence_of_scipy():
    got = distillation(*in_float32(QUERIES, DOCUMENTS, TEACHER))
    scores = np.einsum("bp,bkp->bk", QUERIES, DOCUMENTS)
    student = scipy.special.softmax(scores, axis=1)
    expected = scipy.stats.entropy(TEACHER, student, axis=1).sum()
    assert float(got.loss_total) == pytest.approx(expected, rel=1e-5)
    assert float(got.agreed) == (student.argmax(1) == TEACHER.argmax(1)).sum()
    assert float(got.count) == 3
