"""Defines logical axis names, and the table that maps them to mesh axes.

Every parameter and every constrained activation names its axes with the keys of
`AXIS_RULES`. An unknown name is an error: Flax would replicate the axis silently, which
is costly on a pod.
"""

import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from realm_jax.errors import BadInputError

MESH_AXES = ("data", "fsdp", "model")

# Logical axis -> mesh axes that split it (None: replicated).
AXIS_RULES: dict[str, tuple[str, ...] | str | None] = {
    # Activations and batches.
    "batch": ("data", "fsdp"),
    "candidate": None,
    "length": None,
    "mask": None,
    "span": None,
    "activation_embed": None,
    "activation_heads": "model",
    "activation_mlp": "model",
    "activation_vocab": "model",
    # Parameters.
    "layer": None,
    "embed": "fsdp",
    "heads": "model",
    "head_dim": None,
    "mlp": "model",
    "vocab": "model",
    "position": None,
    "segment": None,
    "projection": None,
    "norm": None,
    # The index: one row per block.
    "block": ("data", "fsdp", "model"),
}


def partition_spec(*names: str | None) -> PartitionSpec:
    """Returns the partition spec of these logical axes; None is replicated."""
    return PartitionSpec(*(_mesh_axes(name) for name in names))


def num_batch_shards(mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of parts of a batch; an absent mesh axis splits nothing."""
    return math.prod(mesh_shape.get(axis, 1) for axis in AXIS_RULES["batch"] or ())


def _mesh_axes(name: str | None) -> tuple[str, ...] | str | None:
    if name is None:
        return None
    if name not in AXIS_RULES:
        raise BadInputError(
            f"unknown logical axis {name!r}; known axes: {', '.join(AXIS_RULES)}. "
            "Add it to AXIS_RULES in realm_jax/axes.py."
        )
    return AXIS_RULES[name]
