"""Provides the device mesh, and shardings derived from the axis table."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.core
import jax
import numpy as np
from flax.linen import partitioning as flax_partitioning
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from realm_jax import axes, ranges
from realm_jax.errors import BadInputError
from realm_jax.models.bert import BertConfig

_REPLICAS = ranges.Range(
    "a whole number of at least 1, or -1 for the devices that are left",
    lambda value: value == -1 or ranges.whole(1).contains(value),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis of `axes.MESH_AXES`.

    Attributes:
      data: replicas that split the batch, over all slices; -1 uses the devices that the
        other axes leave.
      fsdp: devices that split the batch, parameters and optimizer state.
      model: devices that split heads, MLPs and the vocabulary.
      slices: number of TPU slices, which only `data` spans, because the network between
        them is slow; 0 takes it from the devices. Devices that do not report a slice
        (CPUs) are grouped by process.
    """

    data: int = -1
    fsdp: int = 1
    model: int = 1
    slices: int = 0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            data=_REPLICAS,
            fsdp=ranges.whole(1),
            model=ranges.whole(1),
            slices=ranges.whole(0),
        )

    def shape(self, num_devices: int, num_slices: int = 1) -> tuple[int, int, int]:
        """Returns the devices along each axis, of which `data` alone spans slices."""
        inner = self.fsdp * self.model
        data = num_devices // inner if self.data == -1 else self.data
        shape = (data, self.fsdp, self.model)
        if math.prod(shape) != num_devices:
            raise BadInputError(
                f"expected mesh axes that multiply to the {num_devices} devices here, "
                f"got {dict(zip(axes.MESH_AXES, shape, strict=True))}; change "
                "MeshConfig"
            )
        if data % num_slices:
            raise BadInputError(
                f"expected data ({data}) to be a multiple of the {num_slices} slices, "
                "for fsdp and model stay within one; change MeshConfig"
            )
        return shape


# Flax Linen's constraints need Auto axes; Explicit is JAX's default.
AXIS_TYPES = (AxisType.Auto,) * len(axes.MESH_AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a mesh: neighbours along `model`, slices along `data`."""
    devices = jax.devices() if devices is None else devices
    said = len({getattr(device, "slice_index", 0) for device in devices})
    num_slices = config.slices or said
    shape = config.shape(len(devices), num_slices)
    # Needed, for example, for eight devices along an axis of a 4 x 4 x 4 torus.
    split = {"devices": devices, "allow_split_physical_axes": True}
    try:
        if num_slices == 1:
            grid = mesh_utils.create_device_mesh(shape, **split)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(
                (shape[0] // num_slices, *shape[1:]),
                (num_slices, 1, 1),
                **split,
                process_is_granule=said == 1,
            )
    except ValueError as error:
        raise BadInputError(
            f"expected {num_slices} slices of as many devices, got others ({error}); "
            "change MeshConfig.slices"
        ) from error
    return Mesh(grid, axes.MESH_AXES, axis_types=AXIS_TYPES)


def require_models_split(mesh: Mesh, bert: BertConfig) -> None:
    """Requires that the mesh splits every axis of an encoder's parameters evenly.

    JAX would refuse to place a parameter, without a word about the configuration.
    """
    sizes = {
        "embed": ("hidden_size", bert.hidden_size),
        "heads": ("num_heads", bert.num_heads),
        "mlp": ("mlp_size", bert.mlp_size),
        "vocab": ("the vocabulary's size", bert.vocab_size),
    }
    for axis, (name, size) in sizes.items():
        [along] = axes.partition_spec(axis)
        if size % mesh.shape[along]:
            raise BadInputError(
                f"expected MeshConfig.{along} to divide {name} ({size}), got "
                f"{mesh.shape[along]}; change MeshConfig.{along}"
            )


def parameter_shardings(mesh: Mesh, params_axes: PyTree) -> PyTree:
    """Returns the sharding of each parameter, from `init`'s `params_axes`."""
    names = flax.core.unfreeze(flax_partitioning.get_axis_names(params_axes))
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, axes.partition_spec(*spec)),
        names,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Places arrays that every process holds in full; each copies its own shards."""

    def place_leaf(leaf: Any, sharding: NamedSharding) -> jax.Array:
        array = np.asarray(leaf)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )

    return jax.tree.map(place_leaf, tree, shardings)
