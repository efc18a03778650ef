"""Layers against numpy in float64, and the refusals of the parameter helper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from realm_jax.errors import BadInputError
from realm_jax.models import layers


class OneParameter(nn.Module):
    axis_names: tuple[str | None, ...]

    @nn.compact
    def __call__(self):
        return layers.parameter(
            self, "kernel", nn.initializers.ones, (2, 3), self.axis_names
        )


def apply(module, params, *inputs):
    return jax.jit(module.apply)({"params": params}, *inputs)


def test_parameter_is_float32_and_records_its_axes():
    variables = OneParameter(("embed", None)).init(jax.random.key(0))
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert variables["params_axes"]["kernel_axes"].names == ("embed", None)
    with pytest.raises(BadInputError, match="unknown logical axis 'embedding'"):
        OneParameter(("embedding", None)).init(jax.random.key(0))
    # Without a mesh, too.
    with pytest.raises(BadInputError, match="unknown logical axis 'rows'"):
        layers.constrain(jnp.ones((2, 3)), "rows", None)
    with pytest.raises(BadInputError, match=r"each of the 2 dimensions of shape"):
        layers.constrain(jnp.ones((2, 3)), "batch")


def test_dense_contracts_and_makes_several_axes():
    rng = np.random.default_rng(0)
    for into, out, axes in (
        ((3, 5), (6,), ("heads", "head_dim", "embed")),
        ((5,), (3, 2), ("embed", "heads", "head_dim")),
    ):
        x = rng.normal(size=(2, 4, *into))
        params = {"kernel": rng.normal(size=into + out), "bias": rng.normal(size=out)}
        found = apply(layers.Dense(features=out, kernel_axes=axes), params, x)
        expected = np.tensordot(x, params["kernel"], len(into)) + params["bias"]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layer_norm_is_that_of_numpy():
    rng, epsilon = np.random.default_rng(0), 1e-3
    x = 1e-2 * rng.normal(size=(5, 7)) + 1
    params = {"scale": rng.normal(size=7), "bias": rng.normal(size=7)}
    variance = x.var(axis=-1, keepdims=True)
    normal = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + epsilon)
    expected = normal * params["scale"] + params["bias"]
    result = apply(layers.LayerNorm(epsilon), params, x)
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_layer_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)) + 8, jnp.bfloat16)
    params = {"scale": jnp.ones(64), "bias": jnp.zeros(64)}
    result = apply(layers.LayerNorm(dtype=jnp.dtype("bfloat16")), params, x)
    exact = apply(layers.LayerNorm(), params, x.astype(jnp.float32))
    assert result.dtype == jnp.bfloat16
    # Only the result is rounded. A mean in bfloat16 would be off by 2^-5.
    np.testing.assert_array_equal(result, exact.astype(jnp.bfloat16))


def test_attend_of_bfloat16_sums_in_float32():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 64)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16)
    embedding = layers.Embedding(6, 64, "vocab", dtype=jnp.dtype("bfloat16"))
    result = jax.jit(lambda p: embedding.apply(p, x, method="attend"))(
        {"params": {"embedding": table}}
    )
    rounded = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float64)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, np.asarray(x, np.float64) @ rounded.T, atol=1e-4)


def test_attention_is_that_of_a_loop_over_heads_and_positions():
    rng = np.random.default_rng(0)
    x, heads, head_dim = rng.normal(size=(2, 5, 6)), 2, 3
    is_token = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    attention = layers.SelfAttention(num_heads=heads, stddev=1.0)
    attends = is_token[:, None]
    shapes = jax.eval_shape(attention.init, jax.random.key(0), x, attends)["params"]
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)

    def project(name, vector, head):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        return vector @ kernel[:, head] + bias[head]

    expected = np.zeros_like(x)
    for row in range(2):
        tokens = np.flatnonzero(is_token[row])
        for position in range(5):
            result = params["output"]["bias"].copy()
            for head in range(heads):
                query = project("query", x[row, position], head)
                keys = [project("key", x[row, other], head) for other in tokens]
                values = [project("value", x[row, other], head) for other in tokens]
                weights = np.exp([query @ key / np.sqrt(head_dim) for key in keys])
                gathered = (weights / weights.sum()) @ np.array(values)
                result += gathered @ params["output"]["kernel"][head]
            expected[row, position] = result
    np.testing.assert_allclose(apply(attention, params, x, attends), expected, 1e-4)


def test_a_rounded_product_is_that_of_rounded_operands_forward_and_backward():
    generator = np.random.default_rng(0)
    x, kernel, weights = (
        generator.normal(size=shape).astype(np.float32)
        for shape in ((5, 7), (7, 3), (5, 3))
    )

    def rounded(array):
        return np.asarray(array.astype(jnp.bfloat16), np.float64)

    def weighed(x, kernel):
        return (layers.bfloat16_product(x, kernel) * weights).sum()

    product = layers.bfloat16_product(x, kernel)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, rounded(x) @ rounded(kernel), rtol=1e-5)
    to_x, to_kernel = jax.grad(weighed, argnums=(0, 1))(x, kernel)
    np.testing.assert_allclose(to_x, rounded(weights) @ rounded(kernel).T, rtol=1e-5)
    np.testing.assert_allclose(to_kernel, rounded(x).T @ rounded(weights), rtol=1e-5)
    # Operands were rounded at all.
    assert np.abs(product - x @ kernel).max() > 1e-3


def test_dense_rounds_where_it_is_asked_to():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    dense = layers.Dense(features=(5,), kernel_axes=("embed", None))
    variables = dense.init(jax.random.key(0), x)
    rounding = layers.Dense(features=(5,), kernel_axes=("embed", None), rounds=True)
    expected, found = dense.apply(variables, x), rounding.apply(variables, x)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert (np.asarray(found) != np.asarray(expected)).any()
