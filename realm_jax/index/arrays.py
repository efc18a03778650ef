"""Reads and writes arrays in a store, as TensorStore zarr3 with crc32c chunks.

Each host writes its own rows and reads any slice; a flipped bit or a lost chunk raises
an error in every reader, and never reads as zeros.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from realm_jax.errors import BadInputError, is_out_of_space, out_of_space_error
from realm_jax.index.manifest import ArrayRecord
from realm_jax.storage import MissingObjectError, Store, UnavailableStoreError

_METADATA_FILE = "zarr.json"
_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED")


class ArrayLayout(NamedTuple):
    """An array as it is to be written: rows first, `chunk_rows` of them in a file.

    The dtype is a NumPy name, or `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int


def create_array(
    store: Store, folder: str, record: ArrayRecord, chunk_rows: int
) -> tensorstore.TensorStore:
    """Creates an array, or opens the one created by another host or before a crash.

    Rows are the first axis, and `chunk_rows` of them are a chunk, which is a file.
    """
    row_bytes = math.prod(record.shape[1:]) * np.dtype(record.dtype).itemsize
    chunk_shape = [max(1, min(chunk_rows, record.shape[0])), *record.shape[1:]]
    spec = _spec(store, folder) | {
        "metadata": {
            "shape": list(record.shape),
            "data_type": record.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk_shape},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
    }
    with _clear_errors(store.url(folder), chunk_shape[0] * row_bytes):
        return tensorstore.open(spec, open=True, create=True).result()


def rows_per_chunk(array: tensorstore.TensorStore) -> int:
    """Returns the number of rows in a file of the array."""
    # Typed as Any: parts of a layout can be unknown in general, not in an open array.
    layout: Any = array.chunk_layout
    return layout.write_chunk.shape[0]


def write_rows(
    store: Store,
    folder: str,
    array: tensorstore.TensorStore,
    start: int,
    rows: np.ndarray,
) -> None:
    """Writes rows beginning at `start`; they are durable when it returns."""
    with _clear_errors(store.url(folder), rows.nbytes):
        array[start : start + len(rows)].write(rows).result()


def read_rows(
    store: Store, folder: str, record: ArrayRecord, start: int, stop: int
) -> np.ndarray:
    """Returns rows [start, stop); ValueError if a chunk or the array is another."""
    try:
        array = tensorstore.open(_spec(store, folder), open=True).result()
        found = ArrayRecord(tuple(array.shape), array.dtype.name)
        if found != record:
            raise ValueError(f"{found} instead of {record}")
        return array[start:stop].read().result()
    except ValueError as error:
        reason = _reason(error)
        # An unavailable store is not damage.
        if reason.startswith(_TRANSIENT):
            raise UnavailableStoreError(reason) from error
        raise ValueError(reason) from error


def same_metadata(store: Store, folder: str, other: str) -> bool:
    """Returns whether two arrays are stored alike: shape, dtype, chunks and codecs.

    An array whose metadata is missing is like no other.
    """
    try:
        one, two = (store.read(f"{name}/{_METADATA_FILE}") for name in (folder, other))
    except MissingObjectError:
        return False
    return one == two


def _spec(store: Store, folder: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": store.kvstore_spec(folder),
        # By default a chunk of zeros is not stored, and a missing chunk reads as zeros.
        # A lost file must be an error.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


@contextlib.contextmanager
def _clear_errors(url: str, needed: int) -> Iterator[None]:
    # TensorStore raises ValueError for all errors; the text begins with the status.
    try:
        yield
    except ValueError as error:
        reason = _reason(error)
        if is_out_of_space(error):
            raise out_of_space_error(f"{needed:,} bytes at {url}") from error
        if reason.startswith(_TRANSIENT):
            raise UnavailableStoreError(reason) from error
        if reason.startswith("NOT_FOUND"):
            raise MissingObjectError(
                f"expected {url} to stay while it is written, but its folder was "
                "deleted; another writer has taken its place."
            ) from error
        raise BadInputError(
            f"expected to write an array to {url}, got {reason!r}; check the path and "
            "its permissions."
        ) from error


def _reason(error: Exception) -> str:
    return str(error).partition(" [tensorstore_spec=")[0].splitlines()[0]
