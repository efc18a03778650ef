import dataclasses
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from realm_jax.training.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
    stop_gradient,
)
from tests.refused import refused
from tests.tiny_world import assert_close, assert_same_bits

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=2, total_steps=10)


def test_schedule_rises_and_falls_linearly():
    # Of the ten updates two are the warmup; it is a share of them unless it is given.
    given = OptimizerConfig(0.1, 2, 10, warmup_fraction=0.5)
    share = OptimizerConfig(0.1, total_steps=10, warmup_fraction=0.2)
    for config in (CONFIG, given, share):
        schedule = learning_rate_schedule(config)
        got = [float(schedule(step)) for step in (0, 1, 2, 6, 10)]
        np.testing.assert_allclose(got, [0, 0.05, 0.1, 0.05, 0.0], atol=1e-7)
    assert OptimizerConfig(total_steps=7).warmup == 0


def test_each_frozen_path_is_that_of_parameters():
    params = {
        "retriever": {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
        "reader": {"norm": {"scale": jnp.ones(2)}},
    }
    for path, closest in {
        "retriever/dens": "retriever/dense, retriever/dense/",
        "retriever/": "retriever, ",
        "reader/norm/sc": "reader/norm/scale, ",
        "towers": "reader, retriever: ",
    }.items():
        # Beside one that is: else a typo among several would train unnoticed.
        frozen = ("reader/norm", path)
        said = f"at or below '{path}'.*closest are {closest}"
        with refused(said):
            make_optimizer(CONFIG, frozen=frozen).init(params)
        with refused(said):
            stop_gradient(params, frozen)


RNG = np.random.default_rng(0)
START = {
    "retriever/query_tower/kernel": RNG.normal(size=(2, 3)),
    "retriever/document_tower/bias": RNG.normal(size=3),
    "reader/bert/embedding": RNG.normal(size=(4, 2)),
    "reader/head_bias": RNG.normal(size=4),
}
# The retriever's gradient is ten times the reader's, and both are above the bound.
GRADIENTS = [
    {n: 10.0 ** ("retriever" in n) * RNG.normal(size=v.shape) for n, v in START.items()}
    for _ in range(4)
]


def tree(flat):
    as_float32 = {name: jnp.asarray(value, "float32") for name, value in flat.items()}
    return flax.traverse_util.unflatten_dict(as_float32, sep="/")


def run_optimizer(optimizer):
    params = tree(START)
    state = optimizer.init(params)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(tree(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def slow_adam(config, groups, frozen=()):
    """Adam in float64, one number at a time; `groups` are clipped each by its norm."""
    params = {name: value.copy() for name, value in START.items()}
    moments = {name: np.zeros((2, *value.shape)) for name, value in START.items()}
    trained = [name for name in START if not name.startswith(tuple(frozen) or "/")]
    for step, gradient in enumerate(GRADIENTS):
        for group in groups:
            names = [name for name in trained if name.startswith(group)]
            squares = [x * x for name in names for x in gradient[name].ravel()]
            shrink = min(1.0, config.clip_norm / math.sqrt(sum(squares)))
            for name in names:
                rate = float(learning_rate_schedule(config)(step))
                if name.startswith("retriever"):
                    rate *= config.retriever_rate
                decay = config.weight_decay * name.endswith(("kernel", "embedding"))
                for place in np.ndindex(START[name].shape):
                    g = shrink * gradient[name][place]
                    m, v = moments[name][:, *place]
                    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                    moments[name][:, *place] = m, v
                    m_hat = m / (1 - 0.9 ** (step + 1))
                    v_hat = v / (1 - 0.999 ** (step + 1))
                    move = m_hat / (math.sqrt(v_hat) + config.epsilon)
                    params[name][place] -= rate * (move + decay * params[name][place])
    return params


@pytest.mark.parametrize(
    ("clip", "groups", "retriever_rate", "frozen"),
    [
        ("joint", ("re",), 1.0, ()),
        ("joint", ("re",), 0.25, ("retriever/document_tower",)),
        ("per_model", ("retriever", "reader"), 0.25, ("retriever/document_tower",)),
        ("per_model", ("reader",), 0.25, ("retriever",)),
    ],
)
def test_clip_and_rate_of_each_model_equal_a_slow_adam(
    clip, groups, retriever_rate, frozen
):
    # A large epsilon: else Adam would make much the same of any clip.
    settings = {"epsilon": 0.1, "clip": clip, "retriever_rate": retriever_rate}
    config = OptimizerConfig(0.1, 1, 10, **settings)
    found, _ = run_optimizer(make_optimizer(config, frozen))
    want = tree(slow_adam(config, groups, frozen))
    assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_by_default_both_models_are_clipped_together_to_the_bit():
    plain = optax.chain(
        optax.clip_by_global_norm(CONFIG.clip_norm),
        optax.adamw(
            learning_rate_schedule(CONFIG),
            eps=CONFIG.epsilon,
            weight_decay=CONFIG.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
    found, want = (run_optimizer(one) for one in (make_optimizer(CONFIG), plain))
    assert_same_bits(found, want)


def test_a_state_fits_whatever_clip_and_rate_are():
    changed = dataclasses.replace(CONFIG, clip="per_model", retriever_rate=0.5)
    for frozen in ((), ("retriever/document_tower",)):
        one, other = (
            make_optimizer(config, frozen).init(tree(START))
            for config in (CONFIG, changed)
        )
        assert jax.tree.structure(one) == jax.tree.structure(other)


def test_impossible_settings_are_refused():
    with refused(r"warmup_steps must lie in 0\.\.10 .* 11;"):
        OptimizerConfig(warmup_steps=11, total_steps=10)
    # Instead of a rate of 0, freezing is named.
    with refused(r"above 0, got 0\.0; .*FROZEN"):
        OptimizerConfig(retriever_rate=0.0)
