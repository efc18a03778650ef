import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.state import create_state, place_state


def make_params():
    return {
        "retriever": {"dense": {"kernel": jnp.ones((2, 4)), "bias": jnp.ones(4)}},
        "reader": {"norm": {"scale": jnp.ones(3)}},
    }


def test_a_state_starts_at_nothing_done_and_with_a_key_of_its_seed():
    optimizer = make_optimizer(OptimizerConfig())
    states = [create_state(make_params(), optimizer, seed) for seed in (0, 0, 1)]
    assert [int(state.step) for state in states] == [0, 0, 0]
    same, again, other = (np.asarray(state.key) for state in states)
    np.testing.assert_array_equal(same, again)
    assert (same != other).any()


@pytest.mark.parametrize(
    "config", [OptimizerConfig(), OptimizerConfig(clip="per_model", retriever_rate=0.1)]
)
def test_moments_lie_where_their_parameters_lie(config):
    params = make_params()
    optimizer = make_optimizer(config, frozen=("reader",))
    mesh = make_mesh(MeshConfig())
    # One device holds everything; the shardings differ nevertheless.
    spec = {
        "retriever": {
            "dense": {"kernel": PartitionSpec("fsdp", "model"), "bias": PartitionSpec()}
        },
        "reader": {"norm": {"scale": PartitionSpec("model")}},
    }
    shardings = jax.tree.map(
        lambda part: NamedSharding(mesh, part),
        spec,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
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
