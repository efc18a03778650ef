"""Describes the inputs of an update as shapes, before there is a corpus.

Each stage has a function `update_shapes` beside its `run`, made of the parts that `run`
is made of. The planner traces and compiles what it returns.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from realm_jax import axes
from realm_jax.data.features import FeatureSpecs
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.training.initialization import Reader
from realm_jax.training.step import Loss

SOME_PIECES = (101, 102)
"""Ids of [CLS] and [SEP] in place of those of a vocabulary that is not known; no shape
depends on them."""

_DTYPES = ("int32", "float32", "bool")


class UpdateShapes(NamedTuple):
    """What the update of a stage is compiled for, where documents are not packed.

    Inputs, over all processes, and the index in the state, if any, are shapes.
    """

    reader: Reader
    loss: Loss
    frozen: tuple[str, ...]
    inputs: Any
    index: EmbeddingTable | None = None


def batch_of(kind: Any, specs: FeatureSpecs, batch_size: int, mesh: Mesh) -> Any:
    """Returns a batch of a type, of examples over all devices, as shapes."""
    return kind(
        **{
            name: rows_of_batch((batch_size, *spec.shape), spec.dtype, mesh)
            for name, spec in specs.items()
        }
    )


def shapes_of(kind: Any, sizes: Mapping[str, int], mesh: Mesh, **given: Any) -> Any:
    """Returns inputs as shapes, by the annotations and defaults of their dataclass."""
    annotations = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in given or field.default is not dataclasses.MISSING:
            continue
        # Each is the union of an array of JAX and one of NumPy.
        annotation, _ = typing.get_args(annotations[field.name])
        shape = tuple(sizes[name] for name in annotation.dim_str.split())
        dtype = next(dtype for dtype in _DTYPES if dtype in annotation.dtypes)
        given[field.name] = rows_of_batch(shape, dtype, mesh)
    return kind(**given)


def rows_of_batch(
    shape: tuple[int, ...], dtype: Any, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array whose first axis is that of the batch."""
    place = NamedSharding(mesh, axes.partition_spec("batch"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
