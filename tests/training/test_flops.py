import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from bench import gpu_compiler
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.training import flops

BATCH, LENGTH, VOCABULARY = 4, 24, 100


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def encoder(num_layers, hidden=32, **changes):
    config = BertConfig(VOCABULARY, hidden, num_layers, 4, 2 * hidden, **changes)
    model = Bert(config)
    ids = shape(BATCH, LENGTH, dtype=jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), ids, ids)

    def encode(params, ids):
        return model.apply({"params": params}, ids, ids).sequence.sum()

    return encode, variables["params"], ids


def by_hand(num_layers, hidden=32, mlp=64):
    """Kaplan et al. 2020, section 2.1, with segments and without a head."""
    tokens = BATCH * LENGTH
    projections = 2 * tokens * (4 * hidden**2 + 2 * hidden * mlp)
    attention = 2 * 2 * tokens * LENGTH * hidden
    return num_layers * (projections + attention) + 2 * tokens * 2 * hidden


def test_an_encoder_costs_what_the_literature_says():
    encode, params, ids = encoder(3)
    # The pooler is computed too, and nobody asks for it.
    pooler = 2 * BATCH * 32**2
    assert flops.count(encode, params, ids) == by_hand(3) + pooler


def test_the_compiler_counts_as_much_where_layers_are_unrolled():
    encode, params, ids = encoder(3, hidden=512, scan_unroll=3)
    compiled = jax.jit(jax.grad(encode)).lower(params, ids).compile()
    counted = flops.count(jax.grad(encode), params, ids)
    # It adds what is no product of matrices: little, in layers that are this wide.
    assert counted == pytest.approx(compiled.cost_analysis()["flops"], rel=0.05)


def test_a_gradient_costs_three_times_and_four_if_layers_are_computed_again():
    encode, params, ids = encoder(8)
    forward = flops.count(encode, params, ids)
    gradient = flops.count(jax.grad(encode), params, ids)
    # The products of queries with keys are computed again.
    scores = 8 * 2 * BATCH * LENGTH**2 * 32
    assert gradient == pytest.approx(3 * forward + scores, rel=0.002)
    keeps, params, ids = encoder(8, remat="none")
    assert flops.count(jax.grad(keeps), params, ids) == pytest.approx(
        3 * forward, rel=0.002
    )
    again, params, ids = encoder(8, remat="full")
    assert flops.count(again, params, ids) == forward
    assert flops.count(jax.grad(again), params, ids) == pytest.approx(
        4 * forward, rel=0.01
    )


@pytest.mark.parametrize("of", [lambda loss: loss, jax.grad])
def test_attention_by_cudnn_costs_as_much(of):
    plain, cudnn = (
        encoder(8, dtype="bfloat16", attention_implementation=implementation)
        for implementation in ("xla", "cudnn")
    )
    expected = flops.count(of(plain[0]), *plain[1:])
    # Traced as on a GPU. The scores are computed again there, too.
    with gpu_compiler.tracing():
        assert flops.count(of(cudnn[0]), *cudnn[1:]) == expected


def test_loops_count_as_often_as_they_run_and_devices_all():
    def product(a, b):
        return a @ b

    once = flops.count(product, shape(4, 8), shape(8, 8))
    assert once == 2 * 4 * 8 * 8

    def looped(a, b):
        return jax.lax.scan(lambda a, _: (a @ b, None), a, length=5)[0]

    assert flops.count(jax.jit(looped), shape(4, 8), shape(8, 8)) == 5 * once
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(
        product, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows
    )
    assert flops.count(split, shape(4, 8), shape(8, 8)) == once

    def chosen(a, b):
        return jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: a)

    assert flops.count(chosen, shape(4, 8), shape(8, 8)) == once

    def forever(a, b):
        return jax.lax.while_loop(lambda a: a.sum() > 0, lambda a: a @ b, a)

    with pytest.raises(ValueError, match="while loop with matrix products"):
        flops.count(forever, shape(4, 8), shape(8, 8))
