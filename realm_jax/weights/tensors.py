"""Reads the tensors of a `transformers` checkpoint, saved from PyTorch or Flax.

    model.safetensors     PyTorch's names and shapes
    pytorch_model.bin     the same, as a pickle that is not run (`torch_files.py`)
    *.index.json          of either: the files that it is divided into
    flax_model.msgpack    Flax's: `kernel` [input, output], `scale`, `embedding`

All are returned under PyTorch's names, which all tables in this package use. A
LayerNorm's `gamma` and `beta`, the names in weights converted from TensorFlow
(bert-base-uncased's, for one), are returned as `weight` and `bias`.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from realm_jax.weights.stored import DamagedWeightsError, StoredTensor, safetensors
from realm_jax.weights.torch_files import torch_tensors

SAFETENSORS_FILE = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"
FLAX_FILE = "flax_model.msgpack"
_INDEX = ".index.json"

# The first that exists is read.
_FILES = (
    *(SAFETENSORS_FILE, SAFETENSORS_FILE + _INDEX),
    *(TORCH_FILE, TORCH_FILE + _INDEX),
    FLAX_FILE,
)
_LARGEST_INDEX = 1 << 26

Tensor = StoredTensor | np.ndarray
"""A tensor in a file, or one that had to be read."""

_OLD_SPELLINGS = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
}
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def weights_file(folder: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the path of the weights in a folder, None if there are none."""
    paths = (pathlib.Path(folder) / name for name in _FILES)
    return next((path for path in paths if path.exists()), None)


def stored_tensors(folder: str | pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors in a folder by name; most formats are not read for it."""
    path = weights_file(folder)
    if path is None:
        raise BadInputError(
            f"expected {', '.join((SAFETENSORS_FILE, TORCH_FILE))} or {FLAX_FILE} in "
            f"{folder}, found none of them; give the folder of a checkpoint"
        )
    try:
        return _respelled(_tensors(path))
    # Flax does not say what it raises for bytes that are no weights.
    except Exception as error:
        raise BadInputError(
            f"expected weights in {path}, but they cannot be read ({error}); fetch "
            "them again"
        ) from error


def read_tensors(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the weights in a folder."""
    found = stored_tensors(folder)
    return {name: np.asarray(tensor) for name, tensor in found.items()}


def _tensors(path: pathlib.Path) -> dict[str, Tensor]:
    read: Callable[[pathlib.Path], Mapping[str, Tensor]]
    if path.name == FLAX_FILE:
        return _from_flax(flax.serialization.msgpack_restore(path.read_bytes()))
    read = safetensors if path.name.startswith(SAFETENSORS_FILE) else torch_tensors
    if not path.name.endswith(_INDEX):
        return dict(read(path))
    found = {}
    for part in _parts(path):
        found |= read(part)
    return found


def _parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that an index names, each in its own folder."""
    if os.path.getsize(path) > _LARGEST_INDEX:
        raise DamagedWeightsError("it is too long for a list of files")
    names = set(parse_json(path.read_bytes())["weight_map"].values())
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise DamagedWeightsError(
                f"it names {name!r:.80}, which is in no folder here"
            )
    return [path.parent / name for name in sorted(names)]


def _respelled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors with an old spelling, unless the new name exists too."""
    renamed = {}
    for name, tensor in tensors.items():
        new = name
        for old_end, new_end in _OLD_SPELLINGS.items():
            if name.endswith(old_end):
                new = name.removesuffix(old_end) + new_end
        renamed[name if new in tensors else new] = tensor
    return renamed


def _from_flax(tree: Any) -> dict[str, Tensor]:
    tensors = {}
    for path, value in flax.traverse_util.flatten_dict(tree).items():
        *module, leaf = map(str, path)
        # Damage can leave a text or nothing in the place of an array.
        array = np.asarray(value, getattr(value, "dtype", np.float32))
        if leaf == "kernel":
            array = array.T
        tensors[".".join([*module, _LEAVES.get(leaf, leaf)])] = array
    return tensors
