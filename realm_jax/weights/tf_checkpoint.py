"""Reads TensorFlow checkpoints, TF1's and TF2's, without TensorFlow.

    NAME.index                  a sorted table: a record for each variable
    NAME.data-00000-of-00001    their bytes, one after the other

The table is LevelDB's: a footer names the block of an index, which names blocks of
entries; a block ends with its type and checksum. Records are protocol buffers. All of
this is as `tensorflow/core/util/tensor_bundle` and `core/lib/io/table` have it.
Checkpoints are read without TensorFlow because not every installation has it, and
because its reader holds a whole variable in memory, which `encoded.ckpt` of the
published REALM models, 6.8 GB, does not allow.

Tables map names of variables to those of `transformers`, for three layouts: BERT as
published in 2018 (TF1), the published REALM and ORQA modules, which have that BERT in
TF-Hub modules within modules, and BERT of TensorFlow's model garden (TF2), whose names
are paths of Python objects.
"""

import dataclasses
import math
import os
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping

import google_crc32c
import ml_dtypes
import numpy as np

from realm_jax.weights.stored import DamagedWeightsError, StoredTensor

_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5
_LARGEST_TABLE = 1 << 28
_CRC_MASK = 0xA282EAD8

# By the numbers of `tensorflow.DataType`.
_DTYPES = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype("<f2"),
}

_OPTIMIZER = re.compile(
    r"(^|/)(adam_[mv]|AdamWeightDecayOptimizer\w*|global_step|save_counter|optimizer)(/|$)"
)

_MODULES = re.compile(r"^(?:module(?:_\d+)?/)+")
_LAYER = re.compile(r"/layer_(\d+)/")

_LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "output_bias": "bias",
    "word_embeddings": "word_embeddings.weight",
    "position_embeddings": "position_embeddings.weight",
    "token_type_embeddings": "token_type_embeddings.weight",
}

# What follows the modules: TF's name -> that of `transformers`. The first part decides.
_EMBEDDER = {
    "bert": "embedder.realm",
    "cls": "embedder.cls",
    "dense": "embedder.cls.dense",
    "LayerNorm": "embedder.cls.LayerNorm",
}

_ENCODER = {"bert": "encoder.realm", "cls": "encoder.cls"}

_READER = {
    "bert": "reader.realm",
    "cls": "reader.cls",
    "dense": "reader.qa_outputs.dense_intermediate",
    "dense_1": "reader.qa_outputs.dense_output",
    "layer_normalization": "reader.qa_outputs.layer_normalization",
}

_OF_READERS = "reader"
_PROJECTION = ("dense/", "LayerNorm/")

# Of the model garden: numbers of `layer_with_weights` before the encoder's layers.
_TF2_LAYER = re.compile(r"^(?:model/)?layer_with_weights-(\d+)/(.+)/\.ATTRIBUTES/")

_TF2_EMBEDDINGS = {
    0: "embeddings.word_embeddings",
    1: "embeddings.position_embeddings",
    2: "embeddings.token_type_embeddings",
    3: "embeddings.LayerNorm",
}

_TF2_MODULES = {
    "_attention_layer/_query_dense": "attention.self.query",
    "_attention_layer/_key_dense": "attention.self.key",
    "_attention_layer/_value_dense": "attention.self.value",
    "_attention_layer/_output_dense": "attention.output.dense",
    "_attention_output_dense": "attention.output.dense",
    "_attention_layer_norm": "attention.output.LayerNorm",
    "_intermediate_dense": "intermediate.dense",
    "_output_dense": "output.dense",
    "_output_layer_norm": "output.LayerNorm",
}


def checkpoint_prefix(place: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the checkpoint that a path means, without the ends of its files.

    It may be that name itself, as `bert_model.ckpt`, one of the files, or a folder with
    one checkpoint in it or, as in a TF-Hub module, in `variables/`. None if there is no
    checkpoint, or more than one.
    """
    path = pathlib.Path(place)
    if pathlib.Path(f"{path}.index").is_file():
        return path
    if path.is_file() and path.suffix == ".index":
        return path.with_suffix("")
    for folder in (path, path / "variables"):
        found = sorted(folder.glob("*.index")) if folder.is_dir() else []
        if len(found) == 1:
            return found[0].with_suffix("")
    return None


def tf_tensors(prefix: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the variables of a checkpoint by name; those that are no numbers are not.

    Raises:
      DamagedWeightsError: it is no checkpoint, or is truncated or damaged.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    if os.path.getsize(path) > _LARGEST_TABLE:
        raise DamagedWeightsError(f"{path.name} is too long for a list of variables")
    try:
        entries = dict(_entries(path.read_bytes()))
        header = _message(entries.pop(b""))
        shards = _number(header, 1)
        if _number(header, 2) != 0:
            raise DamagedWeightsError("its numbers are big-endian")
        found = {
            name.decode(): _variable(prefix, record, shards)
            for name, record in entries.items()
        }
    except (KeyError, IndexError, UnicodeDecodeError, struct.error) as error:
        raise DamagedWeightsError(f"{path.name} is damaged ({error!r})") from error
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _variable(prefix: pathlib.Path, record: bytes, shards: int) -> StoredTensor | None:
    fields = _message(record)
    dtype = _DTYPES.get(_number(fields, 1))
    if dtype is None:
        return None
    if 7 in fields:
        raise DamagedWeightsError("a variable is partitioned; save it as one")
    shape = tuple(
        _number(_message(size), 1)
        for size in _message(fields[2][0] if 2 in fields else b"").get(2, [])
    )
    shard = _number(fields, 3)
    path = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
    if not path.is_file():
        raise DamagedWeightsError(f"{path.name} is missing")
    crc32c = _unmasked(fields[6][0])
    tensor = StoredTensor(path, _number(fields, 4), dtype, shape, crc32c=crc32c)
    if tensor.end - tensor.offset != _number(fields, 5):
        raise DamagedWeightsError(f"a variable of shape {shape} has another size")
    return tensor


def _entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table."""
    footer = table[-_FOOTER_BYTES:]
    if len(footer) != _FOOTER_BYTES or footer[40:] != struct.pack("<Q", _MAGIC):
        raise DamagedWeightsError("it has no table of variables")
    place = _handle(footer, 0)[1]
    begin, size = _handle(footer, place)[0]
    for _, value in _block(table, begin, size):
        yield from _block(table, *_handle(value, 0)[0])


def _handle(data: bytes, place: int) -> tuple[tuple[int, int], int]:
    begin, place = _varint(data, place)
    size, place = _varint(data, place)
    return (begin, size), place


def _block(table: bytes, begin: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    end = begin + size
    block, kind = table[begin:end], table[end : end + 1]
    checksum = table[end + 1 : end + _TRAILER_BYTES]
    if len(block) != size or len(checksum) != 4:
        raise DamagedWeightsError("its table of variables is truncated")
    if google_crc32c.value(block + kind) != _unmasked(checksum):
        raise DamagedWeightsError("its table of variables is damaged")
    if kind != b"\0":
        raise DamagedWeightsError("its table of variables is compressed")
    # Restarts, which allow a search, and their number.
    last = size - 4 * (1 + _unsigned(block[-4:]))
    place, key = 0, b""
    while place < last:
        shared, place = _varint(block, place)
        length, place = _varint(block, place)
        value_length, place = _varint(block, place)
        key = key[:shared] + block[place : place + length]
        place += length
        yield key, block[place : place + value_length]
        place += value_length


def _message(data: bytes) -> dict[int, list]:
    """Returns the values of each field of a protocol buffer."""
    fields: dict[int, list] = {}
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        match tag & 7:
            case 0:
                value, place = _varint(data, place)
            case 1:
                value, place = data[place : place + 8], place + 8
            case 2:
                length, place = _varint(data, place)
                value, place = data[place : place + length], place + length
            case 5:
                value, place = data[place : place + 4], place + 4
            case kind:
                raise DamagedWeightsError(f"a record has a field of type {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _number(fields: Mapping[int, list], field: int) -> int:
    """Returns the number in a field, 0 where that is left out."""
    value = fields[field][-1] if field in fields else 0
    if not isinstance(value, int):
        raise DamagedWeightsError(f"field {field} of a record is no number")
    return value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place
        if shift > 63:
            raise DamagedWeightsError("a number in a record is too long")


def _unmasked(checksum: bytes) -> int:
    """Returns the crc32c that TensorFlow has rotated and shifted."""
    rotated = (_unsigned(checksum) - _CRC_MASK) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def _unsigned(data: bytes) -> int:
    return struct.unpack("<I", data)[0]


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """The variables of a checkpoint with the names of `transformers`.

    Attributes:
      tensors: those of the model, matrices as [output, input].
      unused: variables of other names, but for the optimizer's.
      num_of_optimizer: number of variables of the optimizer.
    """

    tensors: Mapping[str, StoredTensor]
    unused: list[str]
    num_of_optimizer: int


def as_transformers_names(variables: Mapping[str, StoredTensor]) -> NamedTensors:
    """Renames the variables of a checkpoint.

    The names begin with `embedder.`, `encoder.` or `reader.`, after the part of REALM
    that they are of; BERT is the `encoder.`.
    """
    kept = {n: v for n, v in variables.items() if not _OPTIMIZER.search(n)}
    pairs = dict(_tf2_names(kept)) or dict(_tf1_names(kept))
    tensors = {}
    for name, new in pairs.items():
        tensors[new] = _turned(kept[name]) if "kernel" in name else kept[name]
    return NamedTensors(
        tensors, sorted(set(kept) - set(pairs)), len(variables) - len(kept)
    )


def _tf1_names(variables: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """Yields each name that is known and its new one."""
    bare = {name: _MODULES.sub("", name) for name in variables}
    of_model = {n: b for n, b in bare.items() if not b.startswith(f"{_OF_READERS}/")}
    # A checkpoint of pre-training has the encoder outside of all modules.
    within = {name for name, rest in of_model.items() if name != rest}
    has_own = any(of_model[name].startswith("bert/") for name in within)
    has_projection = any(rest.startswith("dense/") for rest in of_model.values())
    for name, rest in bare.items():
        if name not in of_model:
            table, rest = (
                _READER,
                _MODULES.sub("", rest.removeprefix(f"{_OF_READERS}/")),
            )
        elif rest.startswith(_PROJECTION) or (
            has_projection and (name in within or not has_own)
        ):
            table = _EMBEDDER
        else:
            table = _ENCODER
        first, _, last = rest.partition("/")
        path, _, leaf = _LAYER.sub(r"/layer/\1/", f"/{last}").rpartition("/")
        if first == "cls" and not path.startswith("/predictions"):
            continue  # BERT's head for the next sentence.
        if first in table and leaf in _LEAVES:
            yield name, f"{table[first]}{path.replace('/', '.')}.{_LEAVES[leaf]}"


def _tf2_names(variables: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    found = {name: _TF2_LAYER.match(name) for name in variables}
    matches = {name: match for name, match in found.items() if match}
    last = max((int(match[1]) for match in matches.values()), default=0)
    for name, match in matches.items():
        number, (path, _, leaf) = int(match[1]), match[2].rpartition("/")
        if number in _TF2_EMBEDDINGS:
            module = _TF2_EMBEDDINGS[number]
        elif number == last and not path:
            module = "pooler.dense"
        elif path in _TF2_MODULES:
            module = (
                f"encoder.layer.{number - len(_TF2_EMBEDDINGS)}.{_TF2_MODULES[path]}"
            )
        else:
            continue
        kind = "weight" if leaf == "embeddings" else _LEAVES.get(leaf)
        if kind:
            yield name, f"encoder.realm.{module}.{kind}"


def _turned(matrix: StoredTensor) -> StoredTensor:
    """Returns a matrix as [output, input]; heads of attention are one axis."""
    shape = matrix.shape
    if len(shape) == 3:
        # Of the model garden: [input, head, size], or [head, size, output].
        heads_first = shape[0] * shape[1] <= shape[2]
        shape = (
            (math.prod(shape[:2]), shape[2])
            if heads_first
            else (shape[0], math.prod(shape[1:]))
        )
    if len(shape) != 2:
        return matrix
    return dataclasses.replace(matrix, shape=shape[::-1], strides=(1, shape[1]))
