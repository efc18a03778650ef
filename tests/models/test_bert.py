"""The encoder against a plain numpy BERT in float64, and what must not change it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models import layers
from realm_jax.models.bert import PAD_ID, Bert, BertConfig
from tests.models.conftest import assert_close
from tests.refused import refused


@functools.cache
def compiled_apply(config):
    return jax.jit(Bert(config).apply)


def encode(config, params, ids, segment_ids):
    return compiled_apply(config)({"params": params}, ids, segment_ids)


def compiled_gradient(config, params, ids, segment_ids):
    def loss(params):
        encoded = Bert(config).apply({"params": params}, ids, segment_ids)
        return jnp.sum(jnp.sin(encoded.sequence.astype(jnp.float32)[ids != 0]))

    return jax.jit(jax.grad(loss)).lower(params).compile()


@pytest.fixture(scope="module")
def exact_gradient(config, params, joined):
    config = dataclasses.replace(config, remat="none")
    compiled = compiled_gradient(config, params, *joined)
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes


def plain_bert(config, params, ids, segment_ids):
    """BERT of one unpadded sequence, layer by layer and head by head."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
        return x * p["scale"] + p["bias"]

    def activation(x):
        if config.activation == "gelu":
            return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    x = params["token_embedding"]["embedding"][ids]
    x = x + params["position_embedding"]["embedding"][: len(ids)]
    x = x + params["segment_embedding"]["embedding"][segment_ids]
    x = norm(x, params["embedding_norm"])
    for layer in range(config.num_layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        attended = np.tile(p["attention"]["output"]["bias"], (len(ids), 1))
        for head in range(config.num_heads):
            query, key, value = (
                x @ p["attention"][name]["kernel"][:, head]
                + p["attention"][name]["bias"][head]
                for name in ("query", "key", "value")
            )
            weights = np.exp(query @ key.T / math.sqrt(query.shape[-1]))
            weights /= weights.sum(-1, keepdims=True)
            attended += weights @ value @ p["attention"]["output"]["kernel"][head]
        x = norm(x + attended, p["attention_norm"])
        hidden = activation(dense(x, p["mlp_input"]))
        x = norm(x + dense(hidden, p["mlp_output"]), p["mlp_norm"])
    return x, np.tanh(dense(x[0], params["pooler"]))


def test_encoder_is_plain_bert_whatever_the_padding(config, params, joined):
    ids, segment_ids = (np.pad(x, ((0, 1), (0, 3))) for x in joined)
    is_token = ids != 0
    for activation in ("gelu", "gelu_tanh"):
        config = dataclasses.replace(config, activation=activation)
        encoded = encode(config, params, ids, np.where(is_token, segment_ids, 1))
        for row, tokens in enumerate(is_token[:-1]):
            found = encoded.sequence[row, tokens], encoded.pooled[row]
            inputs = ids[row, tokens], segment_ids[row, tokens]
            assert_close(found, plain_bert(config, params, *inputs), rtol=0, atol=2e-5)
        # The last row is padding alone.
        assert np.isfinite(encoded.sequence).all()


def test_bfloat16_activations_stay_near_float32(config, params, joined, exact_gradient):
    exact = encode(config, params, *joined)
    half_config = dataclasses.replace(config, dtype="bfloat16")
    half = encode(half_config, params, *joined)
    assert half.sequence.dtype == jnp.bfloat16
    error = np.abs(np.float32(half.sequence) - exact.sequence)[joined[0] != 0]
    assert error.mean() < 0.02
    assert error.max() < 0.2
    gradients = compiled_gradient(half_config, params, *joined)(params)
    for found, wanted in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(exact_gradient[0]), strict=True
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, atol=0.1 * np.abs(wanted).max() + 0.1)


def test_remat_and_unrolling_change_no_gradient(config, params, joined, exact_gradient):
    expected, reference_bytes = exact_gradient
    for change in (
        {"remat": "attention"},
        {"remat": "dots"},
        {"remat": "full"},
        {"remat": "none", "scan_unroll": 2},
    ):
        changed = dataclasses.replace(config, **change)
        compiled = compiled_gradient(changed, params, *joined)
        assert_close(compiled(params), expected, rtol=1e-3, atol=1e-4)
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < reference_bytes or change["remat"] == "none", change


@pytest.fixture
def half(config):
    """Of sizes and of a type that cuDNN takes."""
    return dataclasses.replace(config, hidden_size=16, num_heads=2, dtype="bfloat16")


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """Attends as on a GPU, but by JAX's XLA twin of the kernel; returns the calls."""
    calls, kernel = [], layers.attend_by_cudnn

    def attend(query, key, *arguments):
        calls.append((query.shape[1], key.shape[1]))
        return kernel(query, key, *arguments, implementation="xla")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(layers, "attend_by_cudnn", attend)
    return calls


def test_without_a_gpu_attention_by_cudnn_changes_nothing(half, random_params, joined):
    params = random_params(Bert(half), *joined)
    chosen = dataclasses.replace(half, attention_implementation="cudnn")
    found, expected = (encode(each, params, *joined) for each in (chosen, half))
    np.testing.assert_array_equal(found.sequence, expected.sequence)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_cudnn_is_that_by_xla(half, random_params, cudnn_by_xla, packed):
    random = np.random.default_rng(0)
    ids = random.integers(1, half.vocab_size, (4, 12)).astype(np.int32)
    ids[0, 7:], ids[1, 2:], ids[2, 4:] = PAD_ID, PAD_ID, PAD_ID
    positions = np.array([[0, 3], [0, 1], [2, 1], [0, 11]], np.int32)
    params = random_params(Bert(half), ids, ids)

    def gradient(implementation):
        changed = dataclasses.replace(half, attention_implementation=implementation)

        def loss(params):
            inputs = (ids, np.zeros_like(ids), positions, True, 16 if packed else None)
            read = Bert(changed).apply(
                {"params": params}, *inputs, method="encode_positions"
            )
            return jnp.sum(jnp.sin(read.astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradient("xla")
    assert not cudnn_by_xla
    found = gradient("cudnn")
    # Of the last layer two positions alone are computed. Rows that sequences share
    # are left to XLA.
    assert set(cudnn_by_xla) == (set() if packed else {(12, 12), (2, 12)})
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert_close(found, expected, rtol=0, atol=0.02 * largest)


def test_odd_lengths_are_left_to_xla(half, random_params, joined, cudnn_by_xla):
    config = dataclasses.replace(half, attention_implementation="cudnn")
    params = random_params(Bert(config), *joined)
    cudnn_by_xla.clear()
    ids, segment_ids = (array[:, :11] for array in joined)
    Bert(config).apply({"params": params}, ids, segment_ids)
    Bert(config).apply({"params": params}, *joined, method="first")  # Reads [CLS].
    assert set(cudnn_by_xla) == {(12, 12)}


def dropped_features(broadcast):
    """[batch, length, features]"""
    dropout, rngs = layers.Dropout(0.25, broadcast), {"dropout": jax.random.key(0)}
    return dropout.apply({}, np.ones((3, 5, 256)), deterministic=False, rngs=rngs)


def dropped_weights(broadcast):
    """[batch, head, query, key]: with as many values as keys, outputs are weights."""
    length = 128
    values = jnp.broadcast_to(jnp.eye(length), (3, 4, length, length))
    attention = layers.SelfAttention(4, 0.25, broadcast)
    rngs = {"dropout": jax.random.key(0)}
    # Equal scores: without dropout each weight is 1 / length.
    attended = layers.attend(
        jnp.zeros_like(values),
        values,
        values,
        jnp.ones((3, 1, length), bool),
        attention.apply({}, values, values, method="kept_weights", rngs=rngs),
        1 / 0.75,
    )
    return attended * length


def test_a_broadcast_mask_is_the_same_at_every_position():
    for dropped_by in (dropped_features, dropped_weights):
        each, shared = (np.asarray(dropped_by(b)) for b in (False, True))
        for values in (each, shared):
            np.testing.assert_allclose(np.unique(values), [0, 1 / 0.75], rtol=1e-6)
            assert (values == 0).mean() == pytest.approx(0.25, abs=0.05)
            # Examples, and heads, are dropped differently in any case.
            assert (values[0] != values[1]).any()
        assert (shared == shared[..., :1, :]).all()
        assert (each != each[..., :1, :]).any()


def test_dropout_follows_its_key_and_only_in_training(config, params, joined):
    config = dataclasses.replace(config, dropout_rate=0.5)
    module = Bert(config)

    @jax.jit
    def train(key):
        return module.apply({"params": params}, *joined, False, rngs={"dropout": key})

    first = train(jax.random.key(0)).sequence
    np.testing.assert_array_equal(first, train(jax.random.key(0)).sequence)
    assert np.abs(first - train(jax.random.key(1)).sequence).max() > 0.1
    evaluated = encode(config, params, *joined).sequence
    plain = encode(dataclasses.replace(config, dropout_rate=0.0), params, *joined)
    np.testing.assert_array_equal(evaluated, plain.sequence)


def test_attention_weights_may_have_their_own_dropout(config, params, joined):
    @functools.partial(jax.jit, static_argnums=0)
    def encode_in_training(config):
        # In layers that are scanned, and in the last one, of which the first is read.
        return Bert(config).apply(
            {"params": params},
            *joined,
            False,
            method=Bert.pooled,
            rngs={"dropout": jax.random.key(0)},
        )

    def trained(rate, attention_rate):
        rates = {"dropout_rate": rate, "attention_dropout_rate": attention_rate}
        return encode_in_training(dataclasses.replace(config, **rates))

    np.testing.assert_array_equal(trained(0.5, None), trained(0.5, 0.5))
    plain = trained(0.0, None)
    for rates in ((0.5, 0.0), (0.0, 0.5)):
        assert np.abs(trained(*rates) - plain).max() > 0.1, rates


def test_attention_without_dropout_draws_nothing(config, params, joined, monkeypatch):
    monkeypatch.delattr(layers.SelfAttention, "kept_weights")
    config = dataclasses.replace(config, dropout_rate=0.25, attention_dropout_rate=0.0)
    dropped = Bert(config).apply(
        {"params": params}, *joined, False, rngs={"dropout": jax.random.key(0)}
    )
    assert np.isfinite(dropped.sequence).all()


def test_initial_kernels_differ_by_layer_and_have_the_range_asked_for():
    config = BertConfig(8, hidden_size=64, num_layers=3, num_heads=2, mlp_size=128)
    ids = np.ones((1, 2), np.int32)
    tree = jax.jit(Bert(config).init)(jax.random.key(0), ids, ids)["params"]
    kernel = np.asarray(tree["layers"]["mlp_input"]["kernel"])
    assert kernel.shape == (3, 64, 128)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.02
    # A normal of 0.02 cut at two standard deviations keeps 0.88 of its deviation.
    assert kernel.std() == pytest.approx(0.0176, rel=0.03)
    assert np.abs(kernel).max() <= 0.04


def test_impossible_configurations_and_sequences_are_refused(config, params):
    for name, value, message in (
        ("num_heads", 5, "to divide hidden_size 12, got 5"),
        ("activation", "relu", "to be one of gelu_tanh, gelu, got 'relu'"),
        ("dtype", "float16", "to be one of float32, bfloat16, got 'float16'"),
        ("remat", "auto", "to be one of none, attention, dots, full, got 'auto'"),
        ("attention_implementation", "flash", "to be one of xla, cudnn, got 'flash'"),
        ("attention_implementation", "cudnn", "got 'float32' and 0.0"),
    ):
        with refused(f"{name}.*{message}"):
            dataclasses.replace(config, **{name: value})
    with refused("a multiple of 8 features.*got 12 features in 3 heads"):
        dataclasses.replace(config, dtype="bfloat16", attention_implementation="cudnn")
    ids = np.ones((1, 17), np.int32)
    with refused(r"at most 16 wordpieces.*got 17"):
        Bert(config).apply({"params": params}, ids, ids)


@pytest.mark.parametrize(("rate", "rows"), [(0.0, 7), (0.1, 64), (0.25, 1), (0.5, 7)])
def test_dropout_keeps_each_element_by_itself(rate, rows):
    shape = (40, rows, 200)
    kept = np.asarray(layers.draw_kept(jax.random.key(3), rate, shape))
    assert kept.shape == shape
    keep = layers.keep_probability(rate)
    assert keep == pytest.approx(1 - rate, abs=1 / 512)
    assert kept.mean() == pytest.approx(keep, abs=5 * (keep / kept.size) ** 0.5)
    # Four rows share their random words; what one loses says nothing of another.
    centred = kept.mean(axis=(0, 2)) - keep
    assert np.abs(centred).max() <= 5 * (keep * (1 - keep) / (40 * 200)) ** 0.5
    rows_first = np.moveaxis(kept, 1, 0).reshape(rows, -1) - keep
    covariance = rows_first @ rows_first.T / rows_first.shape[1]
    others = covariance[~np.eye(rows, dtype=bool)]
    bound = 5 * keep * (1 - keep) / rows_first.shape[1] ** 0.5
    assert np.abs(others).max(initial=0.0) <= bound


@pytest.mark.parametrize(("num_layers", "remat"), [(1, "dots"), (3, "attention")])
def test_positions_alone_are_as_in_the_whole(config, random_params, num_layers, remat):
    config = dataclasses.replace(
        config, num_layers=num_layers, remat=remat, scan_unroll=2
    )
    module, random = Bert(config), np.random.default_rng(0)
    ids = random.integers(1, config.vocab_size, (3, 10))
    ids[0, 7:] = PAD_ID
    segments = random.integers(0, 2, ids.shape)
    positions = random.integers(0, 7, (3, 4))
    weights = random.normal(size=(3, 4, config.hidden_size))
    params = random_params(module, ids, segments)

    def of_all(params):
        sequence = module.apply({"params": params}, ids, segments).sequence
        read = jnp.take_along_axis(sequence, positions[..., None], axis=1)
        return (read * weights).sum(), read

    def of_positions(params):
        inputs = (ids, segments, positions)
        read = module.apply({"params": params}, *inputs, method="encode_positions")
        return (read * weights).sum(), read

    expected, alone = (
        jax.jit(jax.grad(of, has_aux=True))(params) for of in (of_all, of_positions)
    )
    assert_close(alone, expected, rtol=1e-3, atol=1e-5)
