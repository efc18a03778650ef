"""Materialised examples: what a training job reads, without TensorFlow in its process.

A set of examples is a directory:

    examples.json     count, features (type, shape, size, checksum), metadata
    <feature>.npy     one array a feature, examples along the first axis

Arrays are memory-mapped. The batch of a step is a function of the seed and the step
alone, so that a resumed run sees exactly what an uninterrupted one would have seen.
"""

import errno
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int, Int64

from realm_jax.data.blocks import file_checksum
from realm_jax.data.features import Example
from realm_jax.errors import BadInputError

FORMAT_VERSION = 1
INFO_FILE = "examples.json"


def write_examples(
    directory: str | os.PathLike[str],
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
) -> "Examples":
    """Writes examples as they come, in bounded memory, and opens the result.

    The directory appears when all is written; otherwise nothing is left.

    Args:
      directory: must not exist, or be empty.
      batches: arrays with examples along the first axis; every batch has the same
        features, types and shapes but for the number of examples, which may be 0.
      metadata: JSON values to keep with the examples: what they are, and the
        fingerprints of the corpus and the vocabulary they were made from.

    Raises:
      BadInputError: `directory` is taken, there is no example, the batches do not fit
        together, or the disk is full.
    """
    directory = Path(directory)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise BadInputError(
            f"expected {directory} to be absent or empty, but it holds something; "
            "remove it or choose another directory."
        )
    partial = directory.with_name(f"{directory.name}.partial")
    # What a killed run left; two writers of one directory are not supported.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_partial(partial, batches, metadata)
        if directory.exists():
            directory.rmdir()
        os.rename(partial, directory)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise BadInputError(
            f"expected room for the examples {directory}, but the disk is full; free "
            "some space and run again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Examples.open(directory)


class Examples:
    """A set of examples, opened for reading.

    Attributes:
      directory: where it lies.
      metadata: what was kept with the examples.
      features: the memory-mapped array of each feature.
    """

    def __init__(
        self,
        directory: Path,
        metadata: Mapping[str, Any],
        features: Mapping[str, np.ndarray],
    ):
        """Use `Examples.open`."""
        self.directory = directory
        self.metadata = metadata
        self.features = features
        self._count = len(next(iter(features.values())))

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        expect: Mapping[str, Any] | None = None,
    ) -> "Examples":
        """Opens examples after checking sizes, types and shapes of their files.

        Args:
          directory: where they lie.
          expect: metadata they must have, such as the fingerprint of the corpus.

        Raises:
          BadInputError: no examples are there, a file is missing or truncated, or the
            metadata are others.
        """
        directory = Path(directory)
        info = _read_info(directory)
        for name, value in (expect or {}).items():
            found = info["metadata"].get(name)
            if found != value:
                raise BadInputError(
                    f"expected examples with {name} {value!r} in {directory}, got "
                    f"{found!r}; prepare them again or correct the path."
                )
        features = {
            name: _map_feature(directory / f"{name}.npy", feature, info["count"])
            for name, feature in info["features"].items()
        }
        return cls(directory, info["metadata"], features)

    def __len__(self) -> int:
        """Returns how many examples there are."""
        return self._count

    def verify(self) -> None:
        """Reads every byte and compares checksums.

        Raises:
          BadInputError: a file is damaged; it is named.
        """
        for name, feature in _read_info(self.directory)["features"].items():
            path = self.directory / f"{name}.npy"
            found = file_checksum(path)
            if found != feature["crc32c"]:
                raise BadInputError(
                    f"expected crc32c {feature['crc32c']} of {path}, got {found}: the "
                    "file is damaged; prepare the examples again."
                )

    def batch(self, indices: Int[np.ndarray, " batch"]) -> Example:
        """Returns the examples of these rows, in the order given."""
        return {name: array[indices] for name, array in self.features.items()}

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        num_hosts: int = 1,
        host: int = 0,
    ) -> Iterator[Example]:
        """Yields the batches of step `start_step`, of the next one, and so for ever.

        Args:
          batch_size: examples of all hosts together.
          seed: the order of the examples, not negative.
          start_step: where to begin; earlier steps are not replayed.
          num_hosts: into how many equal parts a batch is cut.
          host: the part to yield.

        Raises:
          BadInputError: the batch cannot be cut into `num_hosts` equal parts, there is
            no part `host`, or the seed is negative.
        """
        if batch_size < 1 or batch_size % num_hosts or not 0 <= host < num_hosts:
            raise BadInputError(
                f"expected a batch size that {num_hosts} hosts share equally and a "
                f"host below {num_hosts}, got {batch_size} and host {host}; choose a "
                "multiple of the number of hosts."
            )
        if seed < 0:
            raise BadInputError(f"expected a seed of 0 or more, got {seed}; change it.")
        share = slice(
            host * batch_size // num_hosts, (host + 1) * batch_size // num_hosts
        )
        rows_by_step = (
            batch_rows(len(self), step, batch_size=batch_size, seed=seed)
            for step in itertools.count(start_step)
        )
        return (self.batch(rows[share]) for rows in rows_by_step)


def batch_rows(
    num_examples: int, step: int, *, batch_size: int, seed: int
) -> Int64[np.ndarray, " batch"]:
    """Returns the rows of the batch of a step, counted from 0.

    Epochs follow each other without a gap: each visits every example once, in an order
    of its own, and a batch may hold the end of one and the start of the next.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, offsets = np.divmod(positions, num_examples)
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = shuffled(num_examples, seed, int(epoch))[offsets[inside]]
    return rows


@functools.lru_cache(maxsize=2)  # A batch can reach from one epoch into the next.
def shuffled(num_examples: int, seed: int, epoch: int) -> Int64[np.ndarray, " example"]:
    """Returns all rows in an order that depends on the arguments alone; read-only.

    Sorts a raw bit stream: NumPy promises to keep those from version to version, and
    its permutations it does not.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_examples)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


class _FeatureFiles:
    """The .npy files of a set of examples while it is written."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}
        self._specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self.count = 0

    def append(self, batch: Mapping[str, np.ndarray]) -> None:
        """Appends the examples of a batch; the first one settles the features."""
        arrays = {name: np.ascontiguousarray(value) for name, value in batch.items()}
        specs = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        if not self._files:
            self._specs = specs
            for name in specs:
                self._files[name] = (self._directory / f"{name}.npy").open("wb")
                _write_header(self._files[name], *specs[name], count=0)
        counts = {len(array) for array in arrays.values()}
        if specs != self._specs or len(counts) != 1:
            raise BadInputError(
                f"expected batches of the features {_in_words(self._specs)}, as many "
                f"examples of each, got {_in_words(specs)} with {sorted(counts)} "
                "examples; pad every example to the same lengths."
            )
        for name, array in arrays.items():
            self._files[name].write(array.data)
        self.count += counts.pop()

    def finish(self) -> dict[str, Any]:
        """Completes the files; returns what examples.json says of each feature."""
        for name, file in self._files.items():
            file.seek(0)
            _write_header(file, *self._specs[name], count=self.count)
        self.close()
        return {name: self._describe(name) for name in self._specs}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _describe(self, name: str) -> dict[str, Any]:
        path = self._directory / f"{name}.npy"
        dtype, shape = self._specs[name]
        return {
            "dtype": dtype.name,
            "shape": list(shape),
            "size": path.stat().st_size,
            "crc32c": file_checksum(path),
        }


def _write_partial(
    partial: Path,
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
) -> None:
    files = _FeatureFiles(partial)
    try:
        for batch in batches:
            files.append(batch)
        if not files.count:
            raise BadInputError(
                f"expected examples for {partial.with_suffix('')}, got none; check "
                "that the source has what they are made from."
            )
        features = files.finish()
    finally:
        files.close()
    info = {
        "format_version": FORMAT_VERSION,
        "count": files.count,
        "features": features,
        "metadata": dict(metadata),
    }
    text = json.dumps(info, indent=2, sort_keys=True, ensure_ascii=False)
    (partial / INFO_FILE).write_text(text + "\n", encoding="utf-8")


def _write_header(
    file: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], count: int
) -> None:
    """Writes a .npy header; NumPy pads it so that a larger count fits in place."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (count, *shape),
    }
    np.lib.format.write_array_header_1_0(file, header)


def _in_words(specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{name} {dtype.name}{list(shape)}" for name, (dtype, shape) in specs.items()
    )


def _read_info(directory: Path) -> dict[str, Any]:
    path = directory / INFO_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version = info["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"expected prepared examples at {directory}, but {path} cannot be read "
            f"({error}); run `realm prepare` or correct the path."
        ) from error
    if version != FORMAT_VERSION:
        raise BadInputError(
            f"expected examples of format version {FORMAT_VERSION} at {directory}, got "
            f"version {version}; prepare them again."
        )
    return info


def _map_feature(path: Path, feature: Mapping[str, Any], count: int) -> np.ndarray:
    size = path.stat().st_size if path.exists() else None
    if size != feature["size"]:
        state = "is missing" if size is None else f"has {size} bytes"
        raise BadInputError(
            f"expected {path} with {feature['size']} bytes, but it {state}; prepare "
            "the examples again."
        )
    shape = (count, *feature["shape"])
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected a NumPy array in {path}, but it cannot be read ({error}); "
            "prepare the examples again."
        ) from error
    if array.dtype.name != feature["dtype"] or array.shape != shape:
        raise BadInputError(
            f"expected {feature['dtype']} of shape {shape} in {path}, got "
            f"{array.dtype.name} of shape {array.shape}; prepare the examples again."
        )
    return np.asarray(array)
