"""Reads the tensors of a `transformers` checkpoint, saved from PyTorch or Flax.

    model.safetensors     PyTorch's names and shapes
    pytorch_model.bin     the same, as a pickle that is not run
    *.index.json          of either: the files that it is divided into
    flax_model.msgpack    Flax's: `kernel` [input, output], `scale`, `embedding`

All are returned under PyTorch's names, which all tables in this package use. A
LayerNorm's `gamma` and `beta`, the names in weights converted from TensorFlow
(bert-base-uncased's, for one), are returned as `weight` and `bias`.

PyTorch writes a zip archive with a pickle of the dictionary and a file for each
storage, or, before version 1.6, pickles with the storages behind them. A pickle is a
program that can call anything. Here it may consist of the operations of a dictionary of
tensors alone, and name what is in `_KNOWN` alone: stand-ins, which compute nothing but
places in the file. The unpickler is the one in Python, because the one in C allocates
as much as a pickle says.
"""

import collections
import dataclasses
import io
import math
import os
import pathlib
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import ml_dtypes
import numpy as np

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from realm_jax.weights.stored import DamagedWeightsError, StoredTensor, safetensors

SAFETENSORS_FILE = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"
FLAX_FILE = "flax_model.msgpack"
_INDEX = ".index.json"

# The first that exists is read.
_FILES = (
    SAFETENSORS_FILE,
    SAFETENSORS_FILE + _INDEX,
    TORCH_FILE,
    TORCH_FILE + _INDEX,
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
# Of the format before version 1.6: the first pickles of the file.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = 30

# The pickle of a model lists names and shapes; that of BERT has 50 KB.
_LARGEST_PICKLE = 1 << 26

# What `torch.save` writes.
_OPERATIONS = frozenset(
    (
        *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE"),
        *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    )
)

_DTYPES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}


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
    found = {}
    for part in weights_parts(path):
        found |= read(part)
    return found


def weights_parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that an index names, each in its own folder; or the file."""
    if not path.name.endswith(_INDEX):
        return [path]
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


@dataclasses.dataclass(frozen=True)
class _PickledStorage:
    """A storage that the pickle names."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class _PickledTensor:
    """A tensor as a part of a storage; counts are of elements."""

    storage: _PickledStorage
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildTensor:
    """Stands for `torch._utils._rebuild_tensor_v2`; a pickle cannot change it."""

    __slots__ = ()

    def __call__(
        self, storage: Any, begin: Any, shape: Any, strides: Any, *rest: Any
    ) -> _PickledTensor:
        numbers = (begin, *shape, *strides)
        if not isinstance(storage, _PickledStorage) or any(
            type(number) is not int for number in numbers
        ):
            raise pickle.UnpicklingError("a tensor has no storage, or no sizes")
        return _PickledTensor(storage, begin, tuple(shape), tuple(strides))


class _RebuildParameter:
    """Stands for `torch._utils._rebuild_parameter`."""

    __slots__ = ()

    def __call__(self, data: Any, *rest: Any) -> Any:
        return data


# What a pickle may name -> what stands for it here.
_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class _Unpickler(pickle._Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns what stands for a name; `_load` has refused all others."""
        return _KNOWN[module_name, global_name]

    def persistent_load(self, pid: Any) -> _PickledStorage:
        """Returns the storage that a persistent id names."""
        kind, dtype, key, _, size, *_ = pid
        if (
            kind != "storage"
            or not isinstance(dtype, np.dtype)
            or type(size) is not int
        ):
            raise pickle.UnpicklingError(f"it has a reference {pid!r:.80}")
        return _PickledStorage(str(key), dtype, size)


def torch_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file that `torch.save` has written, by name.

    Raises:
      DamagedWeightsError: it is not one, is truncated, or its pickle asks for anything
        but tensors.
    """
    try:
        if zipfile.is_zipfile(path):
            state, places = _of_archive(path)
        else:
            state, places = _of_pickles(path)
        return _stored_pickled(path, state, places)
    except DamagedWeightsError:
        raise
    # What `pickle` raises for bytes that are no pickle is not documented.
    except Exception as error:
        raise DamagedWeightsError(f"it cannot be read: {error!r:.200}") from error


def _of_archive(path: pathlib.Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Returns the state, and first and last byte of each storage by its key."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        (name,) = (name for name in members if name.endswith("/data.pkl"))
        if members[name].file_size > _LARGEST_PICKLE:
            raise DamagedWeightsError("its list of tensors is too long")
        if members[name].compress_type != zipfile.ZIP_STORED:
            raise DamagedWeightsError("its list of tensors is compressed")
        state = _load(io.BytesIO(archive.read(name)))
    folder = name.removesuffix("data.pkl") + "data/"
    places = {}
    with path.open("rb") as file:
        for member, info in members.items():
            if not member.startswith(folder):
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedWeightsError(f"{member} is compressed")
            # The local header has extra fields of its own, which align the data.
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER)
            skipped = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            begin = info.header_offset + _LOCAL_HEADER + skipped
            places[member.removeprefix(folder)] = (begin, begin + info.file_size)
    return state, places


def _of_pickles(path: pathlib.Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """As `_of_archive`, of the format before PyTorch 1.6."""
    with path.open("rb") as file:
        size = os.path.getsize(path)
        data = io.BytesIO(file.read(min(size, _LARGEST_PICKLE)))
    if (_load(data), _load(data)) != (_MAGIC, _PROTOCOL):
        raise DamagedWeightsError("it is neither an archive nor of PyTorch")
    _load(data)  # Sizes of the writer's numbers.
    state = _load(data)
    tensors = [value for value in state.values() if isinstance(value, _PickledTensor)]
    storages = {tensor.storage.key: tensor.storage for tensor in tensors}
    places, keys = {}, _load(data)
    begin = data.tell()
    with path.open("rb") as file:
        for key in keys:
            # Each is preceded by the number of its elements.
            file.seek(begin)
            size, storage = int.from_bytes(file.read(8), "little"), storages.get(key)
            if storage is None or size != storage.size:
                raise DamagedWeightsError(f"its storage {key!r:.80} has another size")
            begin += 8
            places[key] = (begin, begin + size * storage.dtype.itemsize)
            begin = places[key][1]
    return state, places


def _load(data: io.BytesIO) -> Any:
    """Returns the next of the values in `data`."""
    begin = data.tell()
    for operation, argument, _ in pickletools.genops(data):
        if operation.name not in _OPERATIONS:
            raise DamagedWeightsError(
                f"its pickle has {operation.name}, which no dictionary of tensors has"
            )
        if operation.name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            if (module, attribute) not in _KNOWN:
                raise DamagedWeightsError(f"its pickle asks for {module}.{attribute}")
    data.seek(begin)
    return _Unpickler(data).load()


def _stored_pickled(
    path: pathlib.Path, state: Any, places: Mapping[str, tuple[int, int]]
) -> dict[str, StoredTensor]:
    if not isinstance(state, dict):
        raise DamagedWeightsError("it is no dictionary of tensors")
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, _PickledTensor) or not isinstance(name, str):
            raise DamagedWeightsError(f"its entry {name!r:.80} is no tensor")
        dtype, key = tensor.storage.dtype, tensor.storage.key
        if key not in places:
            raise DamagedWeightsError(f"the storage of {name!r:.80} is missing")
        begin, end = places[key]
        stored = StoredTensor(
            path,
            begin + tensor.begin * dtype.itemsize,
            dtype,
            tensor.shape,
            strides=None if _is_row_major(tensor) else tensor.strides,
        )
        if tensor.begin < 0 or stored.end > end:
            raise DamagedWeightsError(f"{name!r:.80} does not end within its storage")
        found[name] = stored
    return found


def _is_row_major(tensor: _PickledTensor) -> bool:
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    pairs = zip(tensor.shape, tensor.strides, steps, strict=True)
    return all(size == 1 or stride == step for size, stride, step in pairs)
