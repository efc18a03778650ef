"""What layers round, and the refusals of axes; test_bert.py has what they compute."""

import jax
import jax.numpy as jnp
import numpy as np

from realm_jax.models import layers
from tests.models.conftest import apply
from tests.refused import refused


def test_parameter_is_float32_and_records_its_axes():
    x = jnp.ones((2, 3))
    variables = layers.Dense((2,), ("embed", None)).init(jax.random.key(0), x)
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert variables["params_axes"]["kernel_axes"].names == ("embed", None)
    with refused("unknown logical axis 'embedding'"):
        layers.Dense((2,), ("embedding", None)).init(jax.random.key(0), x)
    # Without a mesh, too.
    with refused("unknown logical axis 'rows'"):
        layers.constrain(x, "rows", None)
    with refused(r"each of the 2 dimensions of shape"):
        layers.constrain(x, "batch")


def test_layer_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)) + 8, jnp.bfloat16)
    params = {"scale": jnp.ones(64), "bias": jnp.zeros(64)}
    result = apply(layers.LayerNorm(dtype=jnp.dtype("bfloat16")), params, x)
    exact = apply(layers.LayerNorm(), params, x.astype(jnp.float32))
    assert result.dtype == jnp.bfloat16
    # Only the result is rounded. A mean in bfloat16 would be off by 2^-5.
    np.testing.assert_array_equal(result, exact.astype(jnp.bfloat16))


def test_attention_by_cudnn_takes_lengths_for_padding():
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 4, 6, 2, 8)).astype(np.float32)
    lengths = np.array([6, 3, 1, 0])
    attends = np.arange(6) < lengths[:, None]
    found = layers.attend_by_cudnn(query, key, value, attends, implementation="xla")
    by_head = (array.swapaxes(1, 2) for array in (query, key, value))
    expected = layers.attend(*by_head, attends[:, None], None, 1.0).swapaxes(1, 2)
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-5, atol=1e-6)
    # Padding alone: arbitrary, but no NaN.
    assert np.isfinite(found).all()


def test_attend_of_bfloat16_sums_in_float32():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 64)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16)
    embedding = layers.Embedding(6, 64, "vocab", dtype=jnp.dtype("bfloat16"))
    result = apply(embedding, {"embedding": table}, x, method="attend")
    rounded = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float64)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, np.asarray(x, np.float64) @ rounded.T, atol=1e-4)


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
