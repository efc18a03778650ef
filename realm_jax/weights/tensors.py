"""Reads the tensors of a `transformers` checkpoint, saved from PyTorch or Flax.

    model.safetensors     PyTorch's names and shapes
    flax_model.msgpack    Flax's: `kernel` [input, output], `scale`, `embedding`

Both are returned under PyTorch's names, which all tables in this package use. A
LayerNorm's `gamma` and `beta`, the names in weights converted from TensorFlow
(bert-base-uncased's, for one), are returned as `weight` and `bias`.
"""

import pathlib
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import safetensors.numpy

from realm_jax.errors import BadInputError

SAFETENSORS_FILE = "model.safetensors"
FLAX_FILE = "flax_model.msgpack"

_OLD_SPELLINGS = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
}
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def weights_file(folder: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the path of the weights in a folder, None if there are none."""
    paths = (pathlib.Path(folder) / name for name in (SAFETENSORS_FILE, FLAX_FILE))
    return next((path for path in paths if path.exists()), None)


def read_tensors(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the weights in a folder.

    Raises:
      BadInputError: there are none, or the file is damaged.
    """
    path = weights_file(folder)
    if path is None:
        raise BadInputError(
            f"expected {SAFETENSORS_FILE} or {FLAX_FILE} in {folder}, found neither; "
            "give the folder of a checkpoint"
        )
    try:
        if path.name == SAFETENSORS_FILE:
            return _respelled(safetensors.numpy.load_file(path))
        return _from_flax(flax.serialization.msgpack_restore(path.read_bytes()))
    # Neither library says what it raises for bytes that are no weights.
    except Exception as error:
        raise BadInputError(
            f"expected weights in {path}, but they cannot be read ({error}); fetch "
            "them again"
        ) from error


def _respelled(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames tensors with an old spelling, unless the new name exists too."""
    renamed = {}
    for name, tensor in tensors.items():
        new = name
        for old_end, new_end in _OLD_SPELLINGS.items():
            if name.endswith(old_end):
                new = name.removesuffix(old_end) + new_end
        renamed[name if new in tensors else new] = tensor
    return renamed


def _from_flax(tree: Any) -> dict[str, np.ndarray]:
    tensors = {}
    for path, value in flax.traverse_util.flatten_dict(tree).items():
        *module, leaf = map(str, path)
        # Damage can leave a text or nothing in the place of an array.
        array = np.asarray(value, getattr(value, "dtype", np.float32))
        if leaf == "kernel":
            array = array.T
        tensors[".".join([*module, _LEAVES.get(leaf, leaf)])] = array
    return tensors
