"""How many bytes of a device a program takes: by the compiler, or counted from shapes.

The compiler for TPUs needs no TPU (`make tpu-compiler`). Where there is none, what the
backward pass keeps is counted; that is most of it, and all of it that settings change.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib.util
import math
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from realm_jax import axes
from realm_jax.chips import LIBTPU_FLAGS
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.models.bert import BertConfig
from realm_jax.training.partitioning import AXIS_TYPES, MeshConfig, make_mesh
from realm_jax.training.stage_config import StageConfig
from tpu_launch.planner.programs import training
from tpu_launch.slices import Slice

_LIBRARY_PATH = "TPU_LIBRARY_PATH"
# Where `make tpu-compiler` puts it.
_FETCHED = pathlib.Path(__file__).parents[2] / ".cache/tpu_compiler/libtpu/libtpu.so"
# The compiler then neither looks for a TPU, nor says that it found none, nor minds that
# another process compiles, too. The type is any: it is not what is compiled for.
_WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-64",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "LIBTPU_INIT_ARGS": LIBTPU_FLAGS,
}
# "Used 48.83G of 15.48G hbm", or "memory required for HLO temporaries (101.47G)".
_USED = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMG])")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Source(enum.Enum):
    """Where a figure comes from."""

    COMPILED = "compiled"
    COUNTED = "counted"


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """What a program needs beside its inputs and outputs.

    Attributes:
      num_bytes: of a device.
      source: who says so.
      fits: False if the compiler refused; the bytes are then those it asked for, and
        the inputs among them.
    """

    num_bytes: int
    source: Source
    fits: bool = True


def has_compiler(machines: Slice) -> bool:
    """Returns whether programs for these machines can be compiled here."""
    if machines.chip is None:
        return True
    installed = importlib.util.find_spec("libtpu") is not None
    return bool(machines.topology) and (installed or _library() is not None)


def _library() -> str | None:
    """Returns the file of a compiler for TPUs that is not installed as a package."""
    path = pathlib.Path(os.environ.get(_LIBRARY_PATH, _FETCHED))
    return str(path) if path.exists() else None


def compiler_mesh(machines: Slice, config: MeshConfig, num_slices: int = 1) -> Mesh:
    """Returns a mesh that programs can be compiled for.

    Raises:
      BadInputError: the axes do not fit the devices.
    """
    if machines.compiler_topology is None:
        return make_mesh(config, jax.devices("cpu")[: machines.num_devices])
    name, options = machines.compiler_topology
    for variable, value in _WITHOUT_A_TPU.items():
        os.environ.setdefault(variable, value)
    if library := _library():
        os.environ[_LIBRARY_PATH] = library
    # The same as none, but for the compiler, which would then name slices.
    several = {"num_slices": num_slices} if num_slices > 1 else {}
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=name, **options, **several
    )
    return make_mesh(config, description.devices)


def shape_mesh(machines: Slice, config: MeshConfig, num_slices: int = 1) -> Mesh:
    """Returns a mesh that shapes can be counted over, without any device.

    Raises:
      BadInputError: the axes do not fit the devices.
    """
    return _of_shape(config.shape(machines.num_devices * num_slices, num_slices))


def one_device() -> Mesh:
    """Returns the mesh of a process that only searches and reads, of shapes alone."""
    return _of_shape((1, 1, 1))


def _of_shape(shape: tuple[int, int, int]) -> Mesh:
    mesh = AbstractMesh(shape, axes.MESH_AXES, axis_types=AXIS_TYPES)
    # It has what is asked of a mesh before anything is placed.
    return cast(Mesh, mesh)


def over(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Traces over a mesh, be it of devices or of shapes alone."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def bytes_per_device(tree: PyTree) -> int:
    """Returns the bytes of shapes with places on the device that has most."""

    def of(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of shapes, over all devices."""
    return sum(map(_size, jax.tree.leaves(tree)))


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh
) -> Temporaries:
    """Asks the compiler; may take minutes."""
    platform = mesh.devices.flat[0].platform
    with jax.set_mesh(mesh):
        lowered = (
            cast(Any, function).trace(*arguments).lower(lowering_platforms=(platform,))
        )
        try:
            memory = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            used = _USED.search(str(error))
            if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
                raise
            asked = int(float(used[1]) * _UNITS[used[2]])
            return Temporaries(asked, Source.COMPILED, fits=False)
    return Temporaries(memory.temp_size_in_bytes, Source.COMPILED)


def counted(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> Temporaries:
    """Counts what an update of a stage keeps on a device.

    That is: what the forward pass saves for the backward pass, the gradient, and where
    layers are computed again, what models of one layer would save. Of BERT-base's
    update on a pod this is within a tenth of what the compiler finds for "none" and
    "dots", and twice as much for "full" (docs/pods.md).
    """
    # Of a microbatch only the inputs are kept; one of them is at work at a time.
    config = config.one_microbatch()
    saved, gradient = _saved(config, corpus, mesh)
    if encoder_of(config).remat != "none":
        one_layer = with_encoder(config, num_layers=1, remat="none")
        saved += _saved(one_layer, corpus, mesh)[0]
    return Temporaries(saved + gradient, Source.COUNTED)


def with_encoder(config: StageConfig, **changes: Any) -> StageConfig:
    """Returns a stage with another encoder, such as one of a single layer."""
    bert = functools.partial(config.models.bert, **changes)
    models = dataclasses.replace(config.models, bert=bert)
    return dataclasses.replace(config, models=models)


def encoder_of(config: StageConfig) -> BertConfig:
    """Returns the encoder of a stage, but for its vocabulary."""
    return config.models.bert(vocab_size=1)


def _saved(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> tuple[int, int]:
    """Returns what is saved for the backward pass, and the bytes of the gradient."""
    of_stage = training(config, corpus, mesh)

    def backward(params: PyTree, inputs: Any, key: jax.Array) -> Any:
        loss = of_stage.loss
        _, backward, _ = jax.vjp(lambda p: loss(p, inputs, key), params, has_aux=True)
        return backward

    arguments = of_stage.loss_arguments()
    with over(mesh):
        saved = jax.tree.leaves(jax.eval_shape(backward, *arguments))
    # Parameters and inputs are kept by those who own them.
    owned = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
    new = Counter((leaf.shape, leaf.dtype) for leaf in saved) - owned
    total = sum(_bytes(*leaf) * count for leaf, count in new.items())
    split = mesh.shape["data"] * mesh.shape["fsdp"]
    return total // split, bytes_per_device(of_stage.state.params)


def _size(leaf: Any) -> int:
    return _bytes(leaf.shape, leaf.dtype)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize
