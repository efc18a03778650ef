"""Checks, checksums and maps the files of a block store."""

from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from realm_jax.errors import BadInputError

_READ_BYTES = 1 << 22


def file_checksum(path: Path) -> str:
    """Returns the crc32c of a file as 8 hexadecimal digits."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest().decode()


def check_size(path: Path, size: int) -> None:
    """Checks that a file exists and has `size` bytes.

    Raises:
      BadInputError: it is missing or has another size.
    """
    found = path.stat().st_size if path.exists() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes"
        raise BadInputError(
            f"expected {path} with {size} bytes, but it {state}; prepare the corpus "
            "again."
        )


def map_array(path: Path, dtype: npt.DTypeLike, size: int) -> np.ndarray:
    """Returns the array in a .npy file, memory-mapped.

    Raises:
      BadInputError: it cannot be read, or has another type or shape.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected a NumPy array in {path}, but it cannot be read ({error}); "
            "prepare the corpus again."
        ) from error
    if array.dtype != dtype or array.shape != (size,):
        raise BadInputError(
            f"expected {size} values of {np.dtype(dtype).name} in {path}, got shape "
            f"{array.shape} of {array.dtype.name}; prepare the corpus again."
        )
    return np.asarray(array)
