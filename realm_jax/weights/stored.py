"""Tensors that lie in a file, read when they are wanted, and in parts where wanted.

Every format that this package reads keeps a tensor as consecutive bytes: safetensors,
PyTorch's and TensorFlow's. What differs is where it is written down. Nothing is
allocated before a tensor's bytes are known to be in its file.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

from realm_jax.manifests import parse_json

_LARGEST_HEADER = 100_000_000
_HEADER_LENGTH = 8
_METADATA = "__metadata__"
_CHUNK_BYTES = 1 << 24
_SAFETENSORS_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class DamagedWeightsError(ValueError):
    """Raised for a file that is not of the format that it claims to be of."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      offset: its first byte.
      strides: steps between elements along each axis, in elements; None for row-major
        order.
      crc32c: checksum of its bytes, of formats that have one; compared by `verify`.
    """

    path: pathlib.Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    crc32c: int | None = None

    def __post_init__(self):
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise DamagedWeightsError(f"a tensor has the shape {self.shape}")
        size = os.path.getsize(self.path)
        if self.offset < 0 or self.end > size:
            raise DamagedWeightsError(
                f"a tensor of shape {self.shape} ends with byte {self.end}, and the "
                f"file with {size}"
            )

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self._num_elements() * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads all of it."""
        if copy is False:
            raise ValueError("a tensor in a file cannot be read without a copy")
        found = self._read(self.offset, self._num_elements())
        if self.strides is None:
            found = found.reshape(self.shape)
        else:
            steps = tuple(step * self.dtype.itemsize for step in self.strides)
            found = np.lib.stride_tricks.as_strided(found, self.shape, steps)
            found = np.ascontiguousarray(found)
        return found if dtype is None else found.astype(dtype)

    def verify(self) -> None:
        """Reads all of it, a part at a time, and compares its checksum.

        Raises:
          DamagedWeightsError: it differs.
        """
        checksum = google_crc32c.Checksum()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(self.offset, self.end, _CHUNK_BYTES):
                checksum.update(file.read(min(_CHUNK_BYTES, self.end - start)))
        if self.crc32c not in (None, int.from_bytes(checksum.digest(), "big")):
            raise DamagedWeightsError(f"a tensor in {self.path.name} is damaged")

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Reads the rows [start, stop) alone."""
        if self.strides is not None:
            return np.asarray(self)[start:stop]
        width = math.prod(self.shape[1:])
        place = self.offset + start * width * self.dtype.itemsize
        found = self._read(place, (stop - start) * width)
        return found.reshape(stop - start, *self.shape[1:])

    def _num_elements(self) -> int:
        """Returns the number of elements from the first to the last in the file."""
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape)
        if len(self.strides) != len(self.shape) or min(self.strides, default=0) < 0:
            raise DamagedWeightsError(f"a tensor has the strides {self.strides}")
        pairs = zip(self.shape, self.strides, strict=True)
        spread = 1 + sum((size - 1) * step for size, step in pairs)
        if math.prod(self.shape) > spread:
            raise DamagedWeightsError(f"a tensor of {self.shape} repeats its elements")
        return spread

    def _read(self, offset: int, count: int) -> np.ndarray:
        with self.path.open("rb") as file:
            file.seek(offset)
            return np.fromfile(file, self.dtype, count)


def safetensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name.

    Raises:
      DamagedWeightsError: it is not one, or is truncated.
    """
    size = os.path.getsize(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        if size < _HEADER_LENGTH or length > min(
            size - _HEADER_LENGTH, _LARGEST_HEADER
        ):
            raise DamagedWeightsError("its header does not end within the file")
        try:
            header = parse_json(file.read(length))
        except ValueError as error:
            raise DamagedWeightsError(f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise DamagedWeightsError("its header lists no tensors")
    begin = _HEADER_LENGTH + length
    return {
        name: _listed(path, begin, name, record)
        for name, record in header.items()
        if name != _METADATA
    }


def _listed(
    path: pathlib.Path, begin: int, name: str, record: Mapping[str, Any]
) -> StoredTensor:
    try:
        start, stop = map(int, record["data_offsets"])
        shape = tuple(record["shape"])
        dtype = _SAFETENSORS_DTYPES[record["dtype"]]
        tensor = StoredTensor(path, begin + start, dtype, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedWeightsError(
            f"its record of {name!r:.80} is wrong ({error})"
        ) from (error)
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise DamagedWeightsError(f"its record of {name!r:.80} has another size")
    return tensor
