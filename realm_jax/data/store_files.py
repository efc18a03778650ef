"""Folders of arrays with a manifest: what corpora and sets of examples have in common.

A folder appears when all of it is written. Its manifest vouches for every file.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from realm_jax.errors import BadInputError, full_disk_is_bad_input
from realm_jax.manifests import FileRecord, find_damage, unseal
from realm_jax.storage import ObjectStat, file_stat


def require_free(directory: Path) -> None:
    """Checks that a folder may be written.

    Raises:
      BadInputError: something is there.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise BadInputError(
            f"expected {directory} to be absent or empty, but it holds something; "
            "remove it or choose another directory."
        )


@contextlib.contextmanager
def new_folder(directory: Path, what: str) -> Iterator[Path]:
    """Yields a folder that becomes `directory` in the end, or vanishes with an error.

    Args:
      directory: must not exist, or be empty.
      what: the folder in words, such as "the corpus".

    Raises:
      BadInputError: the disk is full.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    # What a killed run left; two writers of one folder are not supported.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with full_disk_is_bad_input(f"{what} {directory}"):
            yield partial
            if directory.exists():
                directory.rmdir()
            os.rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_header(
    file: BinaryIO, dtype: npt.DTypeLike, row_shape: tuple[int, ...], count: int
) -> None:
    """Writes a .npy header; NumPy pads it so that a larger count fits in place."""
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (count, *row_shape),
    }
    np.lib.format.write_array_header_1_0(file, header)


def read_manifest(path: Path, version: int, what: str) -> dict[str, Any]:
    """Returns a manifest without its checksum.

    Args:
      path: of the manifest.
      version: which `format_version` it must have.
      what: it belongs to, in words, such as "a prepared corpus".

    Raises:
      BadInputError: there is none, it is damaged, or of another version.
    """
    try:
        data = path.read_bytes()
        found = json.loads(data)["format_version"]
        if found == version:
            # Those of earlier releases carry no checksum.
            return unseal(data, required=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"expected {what} at {path.parent}, but {path} cannot be read ({error}); "
            "run `realm prepare` or correct the path."
        ) from error
    raise BadInputError(
        f"expected {what} of format version {version} at {path.parent}, got version "
        f"{found}; run `realm prepare` again."
    )


def require_sound(
    directory: Path, files: Mapping[str, FileRecord], *, contents: bool
) -> None:
    """Checks that the files of a manifest are there and as large as it says.

    Args:
      directory: where they lie.
      files: of the manifest, by name.
      contents: whether every byte is read and checksums are compared, too.

    Raises:
      BadInputError: a file is missing or damaged; it is named.
    """

    def look_up(name: str) -> FileRecord | ObjectStat | None:
        path = directory / name
        if not path.exists():
            return None
        if contents:
            return file_stat(path)
        return dataclasses.replace(files[name], size=path.stat().st_size)

    damage = find_damage(files, look_up)
    if damage is not None:
        raise BadInputError(
            f"expected the files that were prepared, but {directory}/{damage}; prepare "
            "them again."
        )


def map_array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array of a file, mapped into memory.

    Args:
      path: of the file.
      dtype: it must have; a string stands for the name of one.
      shape: it must have.

    Raises:
      BadInputError: it cannot be read, or has another type or shape.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected a NumPy array in {path}, but it cannot be read ({error}); "
            "prepare it again."
        ) from error
    wanted = dtype if isinstance(dtype, str) else np.dtype(dtype)
    found = array.dtype.name if isinstance(dtype, str) else array.dtype
    if found != wanted or array.shape != shape:
        raise BadInputError(
            f"expected {wanted} of shape {shape} in {path}, got {found} of shape "
            f"{array.shape}; prepare it again."
        )
    return np.asarray(array)
