"""Finds the device memory of a program, by compiling it or by counting from shapes.

The compiler for TPUs needs no TPU (`make tpu-compiler`). Without it, the values kept
for the backward pass are counted: they are most of the memory, and all of it that
settings change.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
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
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.hardware import LIBTPU_FLAGS
from realm_jax.models.bert import BertConfig
from realm_jax.training.partitioning import AXIS_TYPES, MeshConfig, make_mesh
from realm_jax.training.stage_config import StageConfig
from tpu_launch.planner.programs import training
from tpu_launch.slices import Slice

_LIBRARY_PATH = "TPU_LIBRARY_PATH"
# Destination of `make tpu-compiler`.
_FETCHED = pathlib.Path(__file__).parents[2] / ".cache/tpu_compiler/libtpu/libtpu.so"
_CACHES = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
_KEPT = pathlib.Path(_CACHES, "realm_jax", "planner")
# With these the compiler does not look for a TPU or report that there is none, and
# another process may compile too. The type is arbitrary: it is not the target.
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


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Memory that a program needs beside its inputs and outputs.

    Attributes:
      num_bytes: bytes of a device.
      is_compiled: whether the compiler said so; else they are counted.
      fits: False if the compiler refused; the bytes are then those it requested, the
        inputs included.
    """

    num_bytes: int
    is_compiled: bool
    fits: bool = True


def has_compiler(machines: Slice) -> bool:
    """Returns whether programs for these machines can be compiled here."""
    if machines.chip is None:
        return True
    installed = importlib.util.find_spec("libtpu") is not None
    return bool(machines.topology) and (installed or _library().exists())


def _library() -> pathlib.Path:
    """Returns the place of a compiler for TPUs that is not installed as a package."""
    return pathlib.Path(os.environ.get(_LIBRARY_PATH, _FETCHED))


def compiler_mesh(machines: Slice, config: MeshConfig, num_slices: int = 1) -> Mesh:
    """Returns a mesh for which programs can be compiled."""
    if machines.compiler_topology is None:
        return make_mesh(config, jax.devices("cpu")[: machines.num_devices])
    name, options = machines.compiler_topology
    for variable, value in _WITHOUT_A_TPU.items():
        os.environ.setdefault(variable, value)
    if _library().exists():
        os.environ[_LIBRARY_PATH] = str(_library())
    # One slice is the default; if it were given, the compiler would name slices.
    several = {"num_slices": num_slices} if num_slices > 1 else {}
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=name, **options, **several
    )
    return make_mesh(config, description.devices)


def shape_mesh(shape: tuple[int, int, int]) -> Mesh:
    """Returns a mesh over which shapes can be counted, without any device."""
    mesh = AbstractMesh(shape, axes.MESH_AXES, axis_types=AXIS_TYPES)
    # It has everything that is used of a mesh before arrays are placed.
    return cast(Mesh, mesh)


def one_device() -> Mesh:
    """Returns the mesh of a process that only searches and reads, of shapes only."""
    return shape_mesh((1, 1, 1))


def over(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for tracing over a mesh, of devices or of shapes only."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def bytes_per_device(tree: PyTree) -> int:
    """Returns the bytes of sharded shapes on the device that has most of them."""
    return sum(
        _bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    )


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of shapes, over all devices."""
    return sum(_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh
) -> Temporaries:
    """Returns a program's temporaries by compiling it, which may take minutes.

    They are kept below ~/.cache, so that a compiler compiles a program once for its
    devices. JAX's own cache holds executables, which need those devices.
    """
    platform = mesh.devices.flat[0].platform
    with jax.set_mesh(mesh):
        traced = cast(Any, function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        file = _kept_in(lowered.as_text(), mesh)
        try:
            num_bytes, fits = json.loads(file.read_text())
        except (OSError, ValueError):
            num_bytes, fits = _measured(lowered)
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps([num_bytes, fits]))
    return Temporaries(num_bytes, True, fits)


def _measured(lowered: Any) -> tuple[int, bool]:
    """Compiles a program; returns bytes and whether it fits, as in `Temporaries`."""
    try:
        return lowered.compile().memory_analysis().temp_size_in_bytes, True
    except jax.errors.JaxRuntimeError as error:
        used = _USED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
            raise
        return int(float(used[1]) * _UNITS[used[2]]), False


def _kept_in(program: str, mesh: Mesh) -> pathlib.Path:
    """Returns the file of a program's figures, named by all that they depend on."""
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    compiler = (mesh.devices.flat[0].client.platform_version, jax.__version__, *flags)
    content = repr((program, mesh.devices.tolist(), compiler))
    return _KEPT / f"{hashlib.sha256(content.encode()).hexdigest()}.json"


def counted(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> Temporaries:
    """Counts the memory that an update of a stage keeps on a device.

    That is: the values that the forward pass saves for the backward pass, the gradient,
    and if layers are recomputed, the values of one layer that are. For BERT-base's
    update on a pod this is within a tenth of what the compiler finds, but for "full"
    (docs/pods.md).
    """
    # Only the inputs of microbatches are kept; one microbatch is computed at a time.
    config = config.one_microbatch()
    saved, gradient = _saved(config, corpus, mesh)
    remat = encoder_of(config).remat
    if remat != "none":
        # Of two layers, for of the last one only what is read is computed.
        kept, needed = (
            _saved(with_encoder(config, num_layers=2, remat=each), corpus, mesh)[0]
            for each in (remat, "none")
        )
        saved += needed - kept
    return Temporaries(saved + gradient, False)


def with_encoder(config: StageConfig, **changes: Any) -> StageConfig:
    """Returns a stage with another encoder, such as one of a single layer."""
    bert = functools.partial(config.models.bert, **changes)
    models = dataclasses.replace(config.models, bert=bert)
    return dataclasses.replace(config, models=models)


def encoder_of(config: StageConfig) -> BertConfig:
    """Returns the encoder of a stage, with a vocabulary of size 1."""
    return config.models.bert(vocab_size=1)


def _saved(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> tuple[int, int]:
    """Returns the bytes saved for the backward pass, and those of the gradient."""
    stage = training(config, corpus, mesh)

    def backward(params: PyTree, inputs: Any, key: jax.Array) -> Any:
        _, backward, _ = jax.vjp(
            lambda params: stage.loss(params, inputs, key), params, has_aux=True
        )
        return backward

    arguments = stage.loss.arguments(stage.state, stage.inputs)
    with over(mesh):
        saved = jax.tree.leaves(jax.eval_shape(backward, *arguments))
    # Parameters and inputs are kept in any case, and are not counted again.
    owned = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
    new = Counter((leaf.shape, leaf.dtype) for leaf in saved) - owned
    total = sum(_bytes(*leaf) * count for leaf, count in new.items())
    split = mesh.shape["data"] * mesh.shape["fsdp"]
    return total // split, bytes_per_device(stage.state.params)
