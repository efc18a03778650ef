"""How `bench.operations` tells what an update spends its time on."""

import os

import jax
import jax.numpy as jnp
import pytest

from bench import operations, train_step
from realm_jax.models.bert import BertConfig, EncoderLayer


def test_operations_are_told_apart_by_what_the_model_calls_them():
    layer = EncoderLayer(BertConfig(9, 16, 1, 2, 32, dropout_rate=0.5))
    x, is_token = jnp.ones((2, 8, 16)), jnp.ones((2, 8), bool)
    params = layer.init(jax.random.key(0), x, is_token, True)["params"]

    @jax.jit
    def step(params):
        rngs = {"dropout": jax.random.key(1)}
        y, _ = layer.apply({"params": params}, x, is_token, False, rngs=rngs)
        return (y**3).sum()

    compiled = jax.jit(jax.grad(step)).lower(params).compile()
    names = operations.names_of(compiled.as_text())
    kinds = {operations.kind_of(name) for name in names.values()}
    assert {
        "products of attention",
        "products of dense layers",
        "gradients of biases",
        "dropout",
        "softmax",
        "norms",
    } <= kinds
    assert operations.kind_of("jit(step)/something/else") == "all else"


def test_the_products_own_time_stands_beside_the_limit():
    measured = {
        "seconds": 4.0,
        "kinds": {"softmax": 3.0, "dropout": 1.0},
        "teraflop": 0.2,
        "rate": 0.1,
    }
    text = operations.markdown(measured, "python -m bench.operations CORPUS")
    assert "would take 2.00 s (50%)" in text
    assert "| softmax | 3.00 | 75% |" in text
    assert operations.matrix_rate() > 0


@pytest.mark.full
def test_a_profile_of_an_update_holds_its_operations(monkeypatch):
    size = train_step.Size(1, 16, 2, document=12, batch=2)
    given = train_step.random_inputs(size)
    monkeypatch.setattr(train_step, "real_inputs", lambda *arguments: given)
    measured = operations.measure(size, "-", "-", packs=False)
    assert "products with the vocabulary" in measured["kinds"]
    # All threads together, in less than they could have worked.
    threads = os.cpu_count() or 1
    assert 0 < sum(measured["kinds"].values()) <= 2 * threads * measured["seconds"]
    # 30,522 wordpieces, 10 masks, 2 sentences, 8 candidates, 16 features, and thrice.
    assert measured["teraflop"] * 1e12 > 6 * 30_522 * 10 * 2 * 8 * 16
