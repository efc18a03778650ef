"""Models on a mesh: the same numbers, and placed where the axis table says.

The test runs this file as a program, because the number of CPU devices is fixed once
JAX has started.
"""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from realm_jax.models import layers, packing
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import partitioning
from tests import compiled
from tests.models.conftest import assert_close

BATCH = PartitionSpec(("data", "fsdp"))

CONFIG = BertConfig(16, hidden_size=8, num_layers=2, num_heads=2, mlp_size=16)
# What the placement of each kind of parameter should be on the mesh of `main`.
EXPECTED_SPECS = {
    "bert/token_embedding/embedding": ("model", "fsdp"),
    "bert/position_embedding/embedding": (None, "fsdp"),
    "bert/layers/attention/query/kernel": (None, "fsdp", "model", None),
    "bert/layers/attention/query/bias": (None, "model", None),
    "bert/layers/attention/output/kernel": (None, "model", None, "fsdp"),
    "bert/layers/mlp_input/kernel": (None, "fsdp", "model"),
    "bert/layers/mlp_output/kernel": (None, "model", "fsdp"),
    "bert/layers/mlp_norm/scale": (None, None),
    "bert/pooler/kernel": ("fsdp", None),
    "head_dense/kernel": ("fsdp", None),
    "head_bias": ("model",),
}


@pytest.mark.process("another number of devices")
def test_models_are_sharded_as_the_axis_table_says():
    result = subprocess.run(
        [sys.executable, "-m", "tests.models.test_sharding"],
        cwd=pathlib.Path(__file__).parents[2],
        # The partitioner's warnings are wanted here, and only who compiles has them.
        env={**os.environ, **compiled.NOT_CACHED, "TF_CPP_MIN_LOG_LEVEL": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "sharded as meant\n"
    # The partitioner's word for bringing a split array together on every device.
    assert "full rematerialization" not in result.stderr


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = partitioning.make_mesh(partitioning.MeshConfig(data=2, fsdp=2, model=2))
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 16, (4, 2, 6)).astype(np.int32)
    ids[1, :, 4:] = 0
    segments = (np.arange(6) > 2).astype(np.int32) * np.ones_like(ids)
    positions = rng.integers(0, 4, (4, 1, 3)).astype(np.int32)

    check_reader(mesh, ids, segments, positions)
    check_retriever(mesh, ids, segments)
    check_packing(mesh, ids, segments)
    check_constraint(mesh)
    print("sharded as meant")


def check_reader(mesh, ids, segments, positions):
    module = KnowledgeEncoder(CONFIG)

    def loss(params, *inputs):
        log_probs = module.apply({"params": params}, *inputs, method="token_log_probs")
        return log_probs.sum(), log_probs

    step = jax.jit(jax.grad(loss, has_aux=True))
    inputs = (ids, segments, positions, positions)
    params, shardings = make_parameters(mesh, module, ids, segments, positions)
    gradients, log_probs = step(params, *inputs)

    placed = jax.device_put(params, shardings)
    flat = flatten_dict(placed, sep="/")
    for name, spec in EXPECTED_SPECS.items():
        assert_placed(flat[name], PartitionSpec(*spec), name)
    batch = jax.device_put(inputs, NamedSharding(mesh, BATCH))
    with jax.set_mesh(mesh):
        sharded_gradients, sharded_log_probs = step(placed, *batch)
        logits = jax.jit(module.apply)({"params": placed}, *batch[:3])
    # [batch, candidate, mask, vocab]: nothing else says how the head's result is split.
    assert_placed(logits, PartitionSpec(*BATCH, None, None, "model"), "logits")
    places = flatten_dict(shardings)
    for name, gradient in flatten_dict(sharded_gradients).items():
        if "pooler" not in name:  # Unused: zeros, wherever they lie.
            assert_placed(gradient, places[name].spec, name)
    np.testing.assert_allclose(sharded_log_probs, log_probs, atol=1e-4)
    assert_close(sharded_gradients, gradients, rtol=1e-3, atol=1e-3)


def check_retriever(mesh, ids, segments):
    module = Retriever(RetrieverConfig(CONFIG, projection_size=4, shared=False))
    inputs = (ids[:, 0], ids, segments)
    params, shardings = make_parameters(mesh, module, *inputs)
    apply = jax.jit(module.apply)
    expected = apply({"params": params}, *inputs)
    placed = jax.device_put(params, shardings)
    # Inputs come in whole: the constraints alone must split the work.
    with jax.set_mesh(mesh):
        found = apply({"params": placed}, *inputs)
    for one, other, name in zip(found, expected, ("query", "document"), strict=True):
        assert_placed(one, BATCH, f"{name} embeddings")
        np.testing.assert_allclose(one, other, atol=1e-4)


def check_packing(mesh, ids, segments):
    """Each device packs its own share of the batch, and gives what each row gives."""
    module = Bert(CONFIG)
    ids, segments = (x.reshape(8, 6) for x in (ids, segments))
    params, shardings = make_parameters(mesh, module, ids, segments)
    states = jax.jit(module.apply, static_argnames="packed_length")
    expected = states({"params": params}, ids, segments).sequence
    packed = jax.jit(packing.pack, static_argnums=2)
    batch = jax.device_put((ids, segments), NamedSharding(mesh, BATCH))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings)
        found = states({"params": placed}, *batch, packed_length=12).sequence
        rows = packed(*batch, 12)
        moves = packed.lower(*batch, 12).compile().as_text()
    error = np.where((ids > 0)[..., None], found - expected, 0)
    np.testing.assert_allclose(error, 0, atol=1e-4)
    assert rows.order.shape == (4, 2)
    assert_placed(rows.ids, BATCH, "packed rows")
    for communicates in ("all-gather", "all-to-all", "collective-permute"):
        assert communicates not in moves, communicates


def check_constraint(mesh):
    x = np.ones((4, 6, 8), np.float32)
    constrain = jax.jit(layers.constrain, static_argnums=(1, 2, 3))
    with jax.set_mesh(mesh):
        placed = constrain(x, "batch", "length", "activation_mlp")
    assert_placed(placed, PartitionSpec(*BATCH, None, "model"), "activation")


def make_parameters(mesh, module, *inputs):
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes["params"]
    )
    return params, partitioning.parameter_shardings(mesh, shapes["params_axes"])


def assert_placed(array, spec, name):
    expected = NamedSharding(array.sharding.mesh, spec)
    assert array.sharding.is_equivalent_to(expected, array.ndim), (
        f"{name}: expected {spec}, got {array.sharding.spec}"
    )


if __name__ == "__main__":
    main()
