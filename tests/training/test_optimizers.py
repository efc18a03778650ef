import dataclasses
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from realm_jax.errors import BadInputError
from realm_jax.training.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
    stop_gradient,
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


@pytest.mark.parametrize(
    ("path", "closest"),
    [
        ("retriever/dens", "closest are retriever/dense, retriever/dense/"),
        ("retriever/", "closest are retriever, "),
        ("reader/norm/sc", "closest are reader/norm/scale, "),
        ("towers", "closest are reader, retriever: "),
    ],
)
def test_each_frozen_path_is_that_of_parameters(path, closest):
    # Beside one that is: else a typo among several would train unnoticed.
    with pytest.raises(BadInputError) as raised:
        make_optimizer(CONFIG, frozen=("reader/norm", path)).init(make_params())
    assert f"at or below {path!r}" in str(raised.value)
    assert closest in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(BadInputError):
        stop_gradient(make_params(), ("reader/norm", path))


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(BadInputError, match="warmup_steps"):
        OptimizerConfig(warmup_steps=11, total_steps=10)


RNG = np.random.default_rng(0)
START = {
    "retriever/query_tower/kernel": RNG.normal(size=(2, 3)),
    "retriever/document_tower/bias": RNG.normal(size=3),
    "reader/bert/embedding": RNG.normal(size=(4, 2)),
    "reader/head_bias": RNG.normal(size=4),
}
# The retriever's gradient is ten times the reader's, and both are above the bound.
GRADIENTS = [
    {
        name: (10.0 if name.startswith("retriever") else 1.0)
        * RNG.normal(size=value.shape)
        for name, value in START.items()
    }
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


@pytest.mark.parametrize("frozen", [(), ("retriever/document_tower",), ("retriever",)])
@pytest.mark.parametrize("retriever_rate", [1.0, 0.25])
@pytest.mark.parametrize(
    ("clip", "groups"), [("joint", ("re",)), ("per_model", ("retriever", "reader"))]
)
def test_clip_and_rate_of_each_model_equal_a_slow_adam(
    clip, groups, retriever_rate, frozen
):
    # A large epsilon: else Adam would make much the same of any clip.
    config = OptimizerConfig(
        learning_rate=0.1,
        warmup_steps=1,
        total_steps=10,
        epsilon=0.1,
        clip=clip,
        retriever_rate=retriever_rate,
    )
    if frozen == ("retriever",):
        groups = ("reader",)
    found, _ = run_optimizer(make_optimizer(config, frozen))
    want = slow_adam(config, groups, frozen)
    for name, value in flax.traverse_util.flatten_dict(found, sep="/").items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-5)


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
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.parametrize("frozen", [(), ("retriever/document_tower",)])
def test_a_state_fits_whatever_clip_and_rate_are(frozen):
    changed = dataclasses.replace(CONFIG, clip="per_model", retriever_rate=0.5)
    one, other = (
        make_optimizer(config, frozen).init(tree(START)) for config in (CONFIG, changed)
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_an_unknown_clip_is_an_error():
    with pytest.raises(BadInputError, match=r"clip .*joint, per_model, got 'reader'"):
        OptimizerConfig(clip="reader")


@pytest.mark.parametrize("rate", [0.0, -0.5, math.inf, math.nan])
def test_a_rate_that_is_no_share_is_an_error_and_freezing_is_named(rate):
    with pytest.raises(BadInputError, match=rf"above 0, got {rate}; .*frozen"):
        OptimizerConfig(retriever_rate=rate)


def test_the_warmup_is_a_share_of_the_updates_unless_it_is_given():
    assert OptimizerConfig(total_steps=200_000, warmup_fraction=0.05).warmup == 10_000
    assert OptimizerConfig(0.1, 3, 10, warmup_fraction=0.5).warmup == 3
    assert OptimizerConfig(total_steps=7).warmup == 0
    schedule = learning_rate_schedule(
        OptimizerConfig(0.1, total_steps=10, warmup_fraction=0.2)
    )
    assert schedule(1) == pytest.approx(0.05)
    assert schedule(2) == pytest.approx(0.1)
