"""Splits the rows of a batch over the devices of a mesh, and their processes."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from realm_jax import axes
from realm_jax.errors import BadInputError


def replicate(mesh: Mesh, tree: PyTree) -> PyTree:
    """Copies arrays that every process holds to all devices of a mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            everywhere, np.asarray(array)
        ),
        tree,
    )


def local_rows(mesh: Mesh, batch_size: int) -> Int[np.ndarray, " row"]:
    """Returns the rows of a batch, split evenly, that this process's devices hold."""
    parts = num_parts(mesh)
    if batch_size % parts:
        raise BadInputError(
            f"expected a batch size that {parts} (data x fsdp of the mesh) divides,"
            f" got {batch_size}; change BATCH_SIZE or MeshConfig"
        )
    sharding = NamedSharding(mesh, axes.partition_spec("batch"))
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    every = np.arange(batch_size)
    return np.unique(np.concatenate([every[index] for index in indices if index]))


def place_batch(mesh: Mesh, inputs: PyTree) -> PyTree:
    """Splits the leading axis of every host array over the batch's mesh axes.

    They are the `local_rows` of the batch. Arrays on the devices stay where they are.
    """
    sharding = NamedSharding(mesh, axes.partition_spec("batch"))

    def place_rows(array: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(array, jax.Array):
            return array
        return jax.make_array_from_process_local_data(sharding, array)

    return jax.tree.map(place_rows, inputs)


def place_share(mesh: Mesh | None, inputs: PyTree) -> PyTree:
    """Places this process's share of rows that every process holds.

    All arrays have the length of the whole batch; without a mesh they stay on the host.
    """
    if mesh is None:
        return inputs
    (batch_size,) = {len(array) for array in jax.tree.leaves(inputs)}
    rows = local_rows(mesh, batch_size)
    return place_batch(
        mesh, jax.tree.map(lambda array: np.asarray(array)[rows], inputs)
    )


def num_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts into which a mesh splits a batch; 1 without one."""
    return 1 if mesh is None else axes.num_batch_shards(mesh.shape)


def whole_batches(mesh: Mesh | None, batch_size: int) -> int:
    """Returns the least batch size from `batch_size` on that a mesh splits evenly."""
    return -(-batch_size // num_parts(mesh)) * num_parts(mesh)
