"""Writes the files of a set of examples; see `examples.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import numpy as np

from realm_jax.data.features import SENTENCE_ID, FeatureSpecs
from realm_jax.data.store_files import write_header
from realm_jax.errors import BadInputError
from realm_jax.storage import file_stat

SENTENCE_STARTS = "sentence_starts"
"""Name of the array of rows at which sentences begin, then the number of rows."""

SENTENCE_START = np.dtype(np.int64)
"""Its type."""

_Spec: TypeAlias = tuple[np.dtype, tuple[int, ...]]
_ROW: _Spec = (SENTENCE_START, ())


class ExampleFiles:
    """The .npy files of a set of examples."""

    def __init__(self, directory: Path, dtypes: Mapping[str, np.dtype]):
        """Prepares a writer; the first batch determines which files are created.

        Args:
          dtypes: narrower integers in which an array is stored, by its name; all others
            are stored as they are.
        """
        self._directory = directory
        self._dtypes = dtypes
        self._files: dict[str, BinaryIO] = {}
        self._specs: dict[str, _Spec] = {}
        self._sentences: _SentenceStarts | None = None
        self.count = 0

    def append(self, batch: Mapping[str, np.ndarray]) -> None:
        """Appends the examples of a batch; the first batch determines the features."""
        arrays = {name: np.ascontiguousarray(value) for name, value in batch.items()}
        specs = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        if not self._files:
            self._begin(specs)
        counts = {len(array) for array in arrays.values()}
        if specs != self._specs or len(counts) != 1:
            raise BadInputError(
                f"expected batches of the features {_in_words(self._specs)}, as many "
                f"examples of each, got {_in_words(specs)} with {sorted(counts)} "
                "examples; pad every example to the same lengths."
            )
        if self._sentences is not None:
            self._sentences.append(arrays.pop(SENTENCE_ID))
        for name, array in arrays.items():
            self._files[name].write(self._narrowed(name, array).data)
        self.count += counts.pop()

    @property
    def specs(self) -> FeatureSpecs:
        """Shape and type of each array of an example, as appended."""
        return {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (dtype, shape) in self._specs.items()
            if name in self._files
        }

    def _stored(self, name: str) -> _Spec:
        dtype, shape = self._specs[name]
        return self._dtypes.get(name, dtype), shape

    def _narrowed(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns the values of an array in the dtype in which they are stored."""
        dtype, _ = self._stored(name)
        if dtype == array.dtype:
            return array
        narrow = array.astype(dtype)
        if not np.array_equal(narrow, array):
            wrong = array[narrow != array][0]
            raise BadInputError(
                f"expected {name} to be {dtype.name}, which all values of the corpus "
                f"and its vocabulary fit, got {wrong}; does it belong to another?"
            )
        return narrow

    def _begin(self, specs: dict[str, _Spec]) -> None:
        self._specs = specs
        for name, spec in specs.items():
            if name == SENTENCE_ID:
                self._sentences = _SentenceStarts(self._directory, *spec)
                continue
            self._files[name] = (self._directory / f"{name}.npy").open("wb")
            write_header(self._files[name], *self._stored(name), count=0)

    def finish(self) -> dict[str, Any]:
        """Completes the files and returns their description for examples.json."""
        for name, file in self._files.items():
            file.seek(0)
            write_header(file, *self._stored(name), count=self.count)
        starts = self._sentences.finish() if self._sentences is not None else None
        self.close()
        arrays = {
            name: _describe(self._directory / f"{name}.npy", *self._stored(name))
            for name in self._files
        }
        return {"count": self.count, "arrays": arrays} | (
            {SENTENCE_STARTS: starts} if starts is not None else {}
        )

    def close(self) -> None:
        """Closes the files, complete or not."""
        for file in self._files.values():
            file.close()
        if self._sentences is not None:
            self._sentences.close()


class _SentenceStarts:
    """Writes the rows at which sentences begin, from the sentence id of each row.

    Rows of a sentence must be consecutive. Ids that never decrease prove it; where a
    mixture or a cache has reordered the rows, ids do decrease and no file is kept.
    """

    def __init__(self, directory: Path, dtype: np.dtype, shape: tuple[int, ...]):
        if shape or not np.issubdtype(dtype, np.integer):
            raise BadInputError(
                f"expected one integer as the feature {SENTENCE_ID} of an example, got "
                f"{dtype.name}{list(shape)}; rename the feature if it means another "
                "thing."
            )
        self._path = directory / f"{SENTENCE_STARTS}.npy"
        self._file = self._path.open("wb")
        self._count = self._rows = 0
        self._last: np.ndarray | None = None
        self._is_ascending = True
        write_header(self._file, *_ROW, count=0)

    def append(self, ids: np.ndarray) -> None:
        if not len(ids):
            return
        if self._last is None:
            self._last = ids[:1]
            self._write(np.zeros(1))
        before = np.concatenate([self._last, ids[:-1]])
        self._is_ascending &= bool((before <= ids).all())
        self._write(self._rows + np.flatnonzero(before != ids))
        self._rows += len(ids)
        self._last = ids[-1:]

    def finish(self) -> dict[str, Any] | None:
        """Completes the file and returns its description, None if it is discarded."""
        self._write(np.array([self._rows]))
        self._file.seek(0)
        write_header(self._file, *_ROW, count=self._count)
        self.close()
        if not self._is_ascending:
            self._path.unlink()
            return None
        return {**_describe(self._path, *_ROW), "count": self._count}

    def close(self) -> None:
        self._file.close()

    def _write(self, starts: np.ndarray) -> None:
        self._file.write(starts.astype(_ROW[0]).data)
        self._count += len(starts)


def _describe(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    stat = file_stat(path)
    found = {"size": stat.size, "crc32c": stat.crc32c}
    return {"dtype": dtype.name, "shape": list(shape), **found}


def _in_words(specs: Mapping[str, _Spec]) -> str:
    return ", ".join(
        f"{name} {dtype.name}{list(shape)}" for name, (dtype, shape) in specs.items()
    )
