"""Encoders small enough to compile in a second, and inputs for them."""

import functools

import jax
import numpy as np
import pytest

from realm_jax.models.bert import Bert, BertConfig


def apply(module, params, *inputs, **options):
    """Applies a module, compiled; options, such as `method`, are not traced."""
    return jax.jit(functools.partial(module.apply, **options))(
        {"params": params}, *inputs
    )


def assert_close(found, expected, rtol, atol):
    """Two trees hold the same numbers, but for rounding."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


@pytest.fixture(scope="session")
def config():
    return BertConfig(
        vocab_size=40,
        hidden_size=12,
        num_layers=2,
        num_heads=3,
        mlp_size=20,
        max_positions=16,
    )


@pytest.fixture(scope="session")
def joined():
    """Ids and segments of four joined sequences, the third a null document."""
    lengths = [(4, 9), (5, 12), (3, 4), (6, 8)]  # End of the query, end of the body.
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 40, (4, 12)).astype(np.int32)
    segment_ids = np.zeros_like(ids)
    for row, (query, end) in enumerate(lengths):
        segment_ids[row, query:end] = 1
        ids[row, end:] = 0
    return ids, segment_ids


@pytest.fixture(scope="session")
def random_params():
    """Makes parameters of a module from shapes alone: compiling `init` takes seconds.

    No two are equal, biases and scales included, so that none can be mistaken.
    """

    def make(module, *inputs):
        shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
        rng = np.random.default_rng(1)

        def draw(path, shape):
            mean = 1.0 if path[-1].key == "scale" else 0.0
            return rng.normal(mean, 0.4, shape.shape).astype(np.float32)

        return jax.tree_util.tree_map_with_path(draw, shapes)

    return make


@pytest.fixture(scope="session")
def params(config, joined, random_params):
    """Of the encoder alone."""
    return random_params(Bert(config), *joined)
