import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.training.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=2, total_steps=10)


def make_params():
    return {
        "retriever": {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
        "reader": {"norm": {"scale": jnp.ones(2)}},
    }


def test_schedule_rises_and_falls_linearly():
    schedule = learning_rate_schedule(CONFIG)
    got = [float(schedule(step)) for step in (0, 1, 2, 6, 10)]
    np.testing.assert_allclose(got, [0, 0.05, 0.1, 0.05, 0.0], atol=1e-7)


def test_update_equals_adam_written_out():
    """Two steps of Adam with decay on kernels only, from its paper's formulas."""
    optimizer, params = make_optimizer(CONFIG), make_params()
    state = optimizer.init(params)
    gradient = jax.tree.map(lambda p: 0.01 * jnp.ones_like(p), params)
    m = v = 0.0
    want = {"kernel": 1.0, "bias": 1.0, "scale": 1.0}
    for step in range(3):
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * 0.01, 0.999 * v + 0.001 * 0.01**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        rate = float(learning_rate_schedule(CONFIG)(step))
        for name in want:
            decay = 0.01 * want[name] if name == "kernel" else 0.0
            want[name] -= rate * (m_hat / (math.sqrt(v_hat) + 1e-6) + decay)
    dense = params["retriever"]["dense"]
    assert float(dense["kernel"][0, 0]) == pytest.approx(want["kernel"], abs=1e-5)
    assert float(dense["bias"][0]) == pytest.approx(want["bias"], abs=1e-5)
    scale = params["reader"]["norm"]["scale"]
    assert float(scale[0]) == pytest.approx(want["scale"], abs=1e-5)


def test_frozen_parameters_do_not_move_and_have_no_moments():
    optimizer, params = make_optimizer(CONFIG, frozen=("retriever",)), make_params()
    state = optimizer.init(params)
    gradient = jax.tree.map(jnp.ones_like, params)
    for _ in range(3):
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    np.testing.assert_array_equal(params["retriever"]["dense"]["kernel"], 1.0)
    assert float(params["reader"]["norm"]["scale"][0]) < 1.0
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert shapes == {(), (2,)}


def test_freezing_nothing_is_an_error():
    with pytest.raises(BadInputError, match="towers"):
        make_optimizer(CONFIG, frozen=("towers",)).init(make_params())


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(BadInputError, match="warmup_steps"):
        OptimizerConfig(warmup_steps=11, total_steps=10)
