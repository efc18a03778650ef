"""Folders of arrays with a manifest: what corpora and sets of examples have in common.

A folder appears when all of it is written. Its manifest vouches for every file.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from jaxtyping import Int

from realm_jax.errors import BadInputError, full_disk_is_bad_input
from realm_jax.manifests import (
    FileRecord,
    find_damage,
    parse_files,
    parse_json,
    require_fields,
    unseal,
)
from realm_jax.storage import ObjectStat, file_stat, sync_entry, sync_tree

PARTIAL = ".partial"
"""Ends the name of a folder that is being written, or was when a run was killed."""

_READERS = 4
_WORTH_A_LINE = 1 << 30
_LINE_SECONDS = 10.0
# Compared at a time, so that they stay in the processor's cache.
_PARTS_AT_ONCE = 1 << 16

LOG = logging.getLogger(__name__)
"""Says how far the reading of large files is; the command line shows it."""


def require_free(directory: Path) -> None:
    """Checks that a folder may be written."""
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise BadInputError(
            f"expected {directory} to be absent or empty, but it holds something; "
            "remove it or choose another directory."
        )


@contextlib.contextmanager
def new_folder(directory: Path, what: str) -> Iterator[Path]:
    """Yields a folder that becomes `directory`, or vanishes if there is an error."""
    partial = directory.with_name(directory.name + PARTIAL)
    # What a killed run left; two writers of one folder are not supported.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with full_disk_is_bad_input(f"{what} {directory}"):
            yield partial
            sync_tree(partial)
            if directory.exists():
                directory.rmdir()
            os.rename(partial, directory)
            sync_entry(directory.parent)
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


def read_manifest(
    path: Path,
    version: int,
    what: str,
    fields: Mapping[str, type | UnionType],
    *,
    older: Collection[int] = (),
) -> dict[str, Any]:
    """Returns a manifest without its checksum.

    Args:
      fields: that it must have, by type; see `manifests.require_fields`.
      older: versions that are read, too.
    """
    try:
        data = path.read_bytes()
        body = parse_json(data)
        require_fields(body, {"format_version": int})
        found = body["format_version"]
        if found == version or found in older:
            # Those of earlier releases carry no checksum.
            body = unseal(data, required=False)
            require_fields(body, fields)
            return body
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected {what} at {path.parent}, but {path} cannot be read ({error}); "
            "run `realm prepare` or correct the path."
        ) from error
    raise BadInputError(
        f"expected {what} of format version {version} at {path.parent}, got version "
        f"{found}; run `realm prepare` again."
    )


def require_sound(directory: Path, table: Mapping[str, Any], *, contents: bool) -> None:
    """Checks that the files of a manifest are there and as large as it says.

    Args:
      contents: whether every byte is read and checksums are compared, too.
    """

    def look_up(name: str) -> FileRecord | None:
        path = directory / name
        if not path.exists():
            return None
        return dataclasses.replace(files[name], size=path.stat().st_size)

    try:
        files = parse_files(table)
        found = _read_all(directory, files).get if contents else look_up
        damage = find_damage(files, found)
    except BadInputError:
        raise
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected a list of the files that were prepared in the manifest of "
            f"{directory}, but it cannot be used ({error}); prepare them again."
        ) from error
    if damage is not None:
        raise BadInputError(
            f"expected the files that were prepared, but {directory}/{damage}; prepare "
            "them again."
        )


def _read_all(
    directory: Path, files: Mapping[str, FileRecord]
) -> dict[str, ObjectStat | None]:
    """Reads every byte of the files, several at a time; None stands for a missing one.

    Large files take minutes, of which it says how far they are.
    """
    num_bytes = sum(file.size for file in files.values())
    size = f"{num_bytes / 2**30:.1f} GiB of {directory}"
    level = logging.INFO if num_bytes >= _WORTH_A_LINE else logging.DEBUG
    began = said = time.monotonic()
    lock, done = threading.Lock(), 0

    def read(name: str) -> ObjectStat | None:
        nonlocal done, said
        path = directory / name
        if not path.exists():
            return None
        stat = file_stat(path)
        with lock:
            done += stat.size
            if time.monotonic() - said >= _LINE_SECONDS:
                said = time.monotonic()
                LOG.log(level, "verified %.1f of %s", done / 2**30, size)
        return stat

    LOG.log(level, "verifying %s", size)
    with ThreadPoolExecutor(_READERS) as pool:
        found = dict(zip(files, pool.map(read, files), strict=True))
    LOG.log(level, "verified %s in %.0f s", size, time.monotonic() - began)
    return found


def map_array(path: Path, dtype: npt.DTypeLike, shape: tuple[Any, ...]) -> np.ndarray:
    """Returns the array of a file, mapped into memory.

    Args:
      dtype: it must have; a string stands for the name of one.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    # A header is tokenized and evaluated as Python is, and fails in as many ways.
    except Exception as error:
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


def require_consecutive(
    path: Path,
    starts: Int[np.ndarray, " end"],
    total: int,
    what: str,
    *,
    shortest: Int[np.ndarray, " part"] | int,
    of_shortest: str = "",
) -> None:
    """Checks that parts lie one after the other and make up the whole.

    13 million parts take 0.05 seconds where they are in memory.

    Args:
      shortest: length that each part has at least; not negative.
      of_shortest: in the error, what else may be damaged.
    """
    ends = int(starts[0]), int(starts[-1])
    if ends != (0, total):
        raise BadInputError(
            f"expected {what} from 0 to {total} in {path}, got {ends[0]} to {ends[1]}; "
            "prepare it again."
        )
    for first in range(0, len(starts) - 1, _PARTS_AT_ONCE):
        some = starts[first : first + _PARTS_AT_ONCE + 1]
        least = shortest
        if isinstance(shortest, np.ndarray):
            least = shortest[first : first + _PARTS_AT_ONCE]
        # The first comparison keeps an overflow of the difference from hiding.
        wrong = (some[1:] < some[:-1]) | (some[1:] - some[:-1] < least)
        if wrong.any():
            part = int(wrong.argmax())
            least = np.broadcast_to(least, wrong.shape)[part]
            raise BadInputError(
                f"expected {what} one after the other in {path}{of_shortest}, got "
                f"{some[part]} to {some[part + 1]} for number {first + part}, which "
                f"needs {least} or more; prepare it again."
            )
