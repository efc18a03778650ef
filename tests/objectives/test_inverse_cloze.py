import math

import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.objectives.inverse_cloze import inverse_cloze


def slow(queries, documents, blocks):
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


def test_equals_a_loop_in_float64():
    queries, documents = np.random.default_rng(3).normal(size=(2, 5, 6))
    for blocks in ([0, 1, 2, 3, 4], [7, 7, 2, 7, 2], [1, 1, 1, 1, 1]):
        got = inverse_cloze(
            jnp.asarray(queries, jnp.float32),
            jnp.asarray(documents, jnp.float32),
            jnp.asarray(blocks),
        )
        total, correct = slow(queries, documents, blocks)
        assert float(got.loss_total) == pytest.approx(total, abs=1e-4)
        assert float(got.correct) == correct
        assert float(got.count) == 5
