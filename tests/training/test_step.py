import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from realm_jax.metrics import means as means_lib
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.state import create_state, place_state
from realm_jax.training.step import FunctionLoss, make_step


@FunctionLoss
def noisy_quadratic(params, inputs, key):
    """0.5 |w - x|^2, with a draw of the key among the metrics."""
    loss = 0.5 * jnp.sum((params["w"] - inputs) ** 2)
    draw = jax.random.uniform(key)
    return loss, {
        "loss": means_lib.mean_of(loss, 1.0),
        "draw": means_lib.mean_of(draw, 1),
    }


SGD = optax.sgd(0.1)


def start(optimizer=SGD, seed=7):
    return create_state({"w": jnp.asarray([3.0, -1.0])}, optimizer, seed)


@pytest.mark.parametrize("separate", [False, True])
def test_steps_equal_gradient_descent_written_out(separate):
    step = make_step(noisy_quadratic, SGD, separate_gradient_and_update=separate)
    state = first = start()
    w, x = np.array([3.0, -1.0]), np.array([1.0, 1.0])
    for done in range(3):
        gradient = w - x
        state, found = step(state, jnp.asarray(x, jnp.float32))
        values = means_lib.compute(found)
        assert values["loss"] == pytest.approx(0.5 * (gradient**2).sum(), rel=1e-5)
        norm = np.sqrt((gradient**2).sum())
        assert values["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        w = w - 0.1 * gradient
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
        assert int(state.step) == done + 1
    assert first.params["w"].is_deleted()


def test_the_norms_of_each_model_are_its_own():
    params = {"retriever": {"w": jnp.asarray([3.0, 4.0])}, "reader": jnp.asarray(12.0)}

    @FunctionLoss
    def half_square(params, inputs, key):
        squares = jnp.sum(params["retriever"]["w"] ** 2) + params["reader"] ** 2
        return 0.5 * squares, {}

    # The gradient is the parameters: norms 5 and 12, and 13 of both.
    _, found = make_step(half_square, SGD)(create_state(params, SGD, 0), jnp.zeros(()))
    norms = {"": 13.0, "_retriever": 5.0, "_reader": 12.0}
    expected = {f"gradient_norm{model}": norm for model, norm in norms.items()}
    expected |= {f"update_norm{model}": 0.1 * norm for model, norm in norms.items()}
    assert means_lib.compute(found) == pytest.approx(expected)


def test_what_is_frozen_costs_no_gradient():
    size = 64
    params = {
        "retriever": {"tower": {"kernel": jnp.ones((size, size))}},
        "reader": jnp.ones((size, size)),
    }
    frozen = ("retriever/tower",)

    @FunctionLoss
    def of_products(params, inputs, key):
        hidden = inputs @ params["retriever"]["tower"]["kernel"]
        return jnp.sum((hidden @ params["reader"]) ** 2), {}

    config = OptimizerConfig(0.1, warmup_steps=0, total_steps=4)
    optimizer = make_optimizer(config, frozen)
    state, inputs = create_state(params, optimizer, seed=0), jnp.ones((size, size))
    # Forward two products; backward one for the reader, and two for the tower.
    product, flops = 2 * size**3, []
    for paths in ((), frozen):
        compiled = make_step(of_products, optimizer, paths).lower(state, inputs)
        flops.append(compiled.compile().cost_analysis()["flops"])
    assert flops[0] - flops[1] == pytest.approx(2 * product, rel=0.1)
    state, found = make_step(of_products, optimizer, frozen)(state, inputs)
    np.testing.assert_array_equal(state.params["retriever"]["tower"]["kernel"], 1.0)
    assert np.all(np.asarray(state.params["reader"]) != 1.0)
    norms = means_lib.compute(found)
    assert norms["gradient_norm_retriever"] == 0
    assert norms["gradient_norm"] == norms["gradient_norm_reader"] > 0


def test_each_step_draws_its_own_numbers_and_a_resumed_one_the_same():
    step = make_step(noisy_quadratic, SGD)
    state, draws, saved = start(), [], None
    for done in range(3):
        if done == 1:
            saved = jax.tree.map(np.array, state)
        state, found = step(state, jnp.zeros(2))
        draws.append(means_lib.compute(found)["draw"])
    _, of_other_seed = step(start(seed=8), jnp.zeros(2))
    assert len({*draws, means_lib.compute(of_other_seed)["draw"]}) == 4
    resumed, found = step(jax.tree.map(jnp.asarray, saved), jnp.zeros(2))
    assert means_lib.compute(found)["draw"] == draws[1]
    np.testing.assert_array_equal(resumed.key, state.key)


def test_a_step_that_is_skipped_changes_the_step_alone():
    optimizer = optax.adam(0.1)
    options = {"separate_gradient_and_update": True, "skip_nonfinite": True}
    step = make_step(noisy_quadratic, optimizer, (), **options)
    state, found = step(start(optimizer), jnp.ones(2))
    found = means_lib.compute(found)
    assert found["skipped_updates"] == 0.0
    assert found["loss"] == pytest.approx(0.5 * (2.0**2 + 2.0**2))
    before = jax.tree.map(np.array, (state.params, state.optimizer_state))
    for done, bad in ((2, np.nan), (3, np.inf)):
        state, found = step(state, jnp.asarray([bad, 1.0]))
        after = (state.params, state.optimizer_state)
        jax.tree.map(np.testing.assert_array_equal, before, after)
        assert int(state.step) == done
        assert means_lib.compute(found) == {"skipped_updates": 1.0}


def test_moments_lie_where_their_parameters_lie():
    params = {
        "retriever": {"dense": {"kernel": jnp.ones((2, 4)), "bias": jnp.ones(4)}},
        "reader": {"norm": {"scale": jnp.ones(3)}},
    }
    config = OptimizerConfig(clip="per_model", retriever_rate=0.1)
    optimizer = make_optimizer(config, frozen=("reader",))
    mesh = make_mesh(MeshConfig())

    # One device holds everything; the shardings differ nevertheless.
    def sharding(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    dense = {"kernel": sharding("fsdp", "model"), "bias": sharding()}
    shardings = {
        "retriever": {"dense": dense},
        "reader": {"norm": {"scale": sharding("model")}},
    }
    state = create_state(params, optimizer, 0)
    placed = place_state(state, shardings, mesh)
    jax.tree.map(np.testing.assert_array_equal, placed, state)
    kernels = {
        leaf.sharding.spec
        for leaf in jax.tree.leaves((placed.params, placed.optimizer_state))
        if leaf.shape == (2, 4)
    }
    moments = [leaf for leaf in jax.tree.leaves(placed.optimizer_state) if leaf.ndim]
    assert kernels == {PartitionSpec("fsdp", "model")}
    # Two moments of kernel and bias each, none of what is frozen.
    assert sorted(leaf.shape for leaf in moments) == [(2, 4), (2, 4), (4,), (4,)]
    assert placed.step.sharding.spec == placed.key.sharding.spec == PartitionSpec()
