"""Stores materialised examples, which training jobs read without TensorFlow.

A set of examples is a directory:

    examples.json        count, features (type, shape, size, checksum), metadata
    <feature>.npy        one array per feature, examples along the first axis
    sentence_starts.npy  the row at which each sentence begins, then the number of rows;
                         only where several examples can be of one sentence

Arrays are memory-mapped. `batch_order.py` chooses the rows of each update.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int64

from realm_jax.data.batch_order import Spans, batch_rows, sentence_rows
from realm_jax.data.example_files import SENTENCE_STARTS, ExampleFiles
from realm_jax.data.features import Example
from realm_jax.data.masking import mask_together
from realm_jax.data.store_files import (
    map_array,
    new_folder,
    read_manifest,
    require_free,
    require_sound,
)
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_files, seal

FORMAT_VERSION = 1
INFO_FILE = "examples.json"


def write_examples(
    directory: str | os.PathLike[str],
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
) -> "Examples":
    """Writes a stream of examples in bounded memory, and opens the result.

    The directory appears when everything is written; otherwise nothing is left behind.

    Args:
      directory: must be absent or empty.
      batches: arrays with examples along the first axis; every batch has the same
        features, types and shapes except for the number of examples, which may be 0.
        `features.SENTENCE_ID` is not written as a feature: it marks where sentences
        begin.
      metadata: JSON values to store with the examples: a description, and the
        fingerprints of the corpus and the vocabulary they were made from.

    Raises:
      BadInputError: `directory` is not empty, there is no example, the batches differ
        in features, types or shapes, or the disk is full.
    """
    directory = Path(directory)
    require_free(directory)
    with new_folder(directory, "the examples") as partial:
        _write_partial(partial, batches, metadata)
    return Examples.open(directory)


class Examples:
    """A set of examples, opened for reading.

    Attributes:
      directory: directory of the files.
      metadata: the values stored with the examples.
      features: the memory-mapped array of each feature.
      sentence_starts: the row at which each sentence begins, then the number of rows,
        memory-mapped; None if it is not known which rows share a sentence.
    """

    def __init__(
        self,
        directory: Path,
        metadata: Mapping[str, Any],
        features: Mapping[str, np.ndarray],
        sentence_starts: np.ndarray | None,
    ):
        """Use `Examples.open`."""
        self.directory = directory
        self.metadata = metadata
        self.features = features
        self.sentence_starts = sentence_starts
        self._count = len(next(iter(features.values())))

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        expect: Mapping[str, Any] | None = None,
    ) -> "Examples":
        """Opens examples after checking sizes, types and shapes of their files.

        Args:
          directory: directory of the examples.
          expect: metadata they must have, such as the fingerprint of the corpus.

        Raises:
          BadInputError: there are no examples, a file is missing or truncated, or the
            metadata differ from `expect`.
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
        arrays = _described_arrays(info)
        _require_sound(directory, arrays, contents=False)
        features = {
            name: map_array(
                directory / f"{name}.npy",
                entry["dtype"],
                (entry.get("count", info["count"]), *entry["shape"]),
            )
            for name, entry in arrays.items()
        }
        starts = features.pop(SENTENCE_STARTS, None)
        return cls(directory, info["metadata"], features, starts)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._count

    def verify(self) -> None:
        """Reads every byte and compares checksums.

        Raises:
          BadInputError: a file is damaged; the message names it.
        """
        arrays = _described_arrays(_read_info(self.directory))
        _require_sound(self.directory, arrays, contents=True)

    def batch(self, indices: Int[np.ndarray, " batch"]) -> Example:
        """Returns the examples at `indices`, in the given order."""
        return {name: array[indices] for name, array in self.features.items()}

    def together(self, indices: Int[np.ndarray, " batch"]) -> Example:
        """Returns examples that mask further spans of each row's sentence.

        See `masking.mask_together`; the row's own span comes first, then the others in
        text order, cyclically from the row. Equals `batch` where it is not known which
        rows share a sentence.
        """
        starts = self.sentence_starts
        if starts is None:
            return self.batch(indices)
        sentences = np.searchsorted(starts, indices, side="right") - 1
        made = []
        for row, sentence in zip(indices, sentences, strict=True):
            first, end = int(starts[sentence]), int(starts[sentence + 1])
            rows = np.roll(np.arange(first, end), first - int(row))
            made.append(mask_together(self.batch(rows)))
        return {name: np.stack([one[name] for one in made]) for name in self.features}

    def step_rows(
        self,
        step: int,
        *,
        batch_size: int,
        seed: int,
        spans: Spans = Spans.ONE_PER_SENTENCE,
    ) -> Int64[np.ndarray, " batch"]:
        """Returns the rows of a step's batch.

        Args:
          step: updates done.
          batch_size: rows of the whole batch.
          seed: seeds the order, not negative.
          spans: whether an epoch visits one row of each sentence or every row. Every
            row is visited where it is not known which rows share a sentence.
            `TOGETHER` visits the same rows as `ONE_PER_SENTENCE`.
        """
        if self.sentence_starts is None or spans is Spans.ALL:
            return batch_rows(len(self), step, batch_size=batch_size, seed=seed)
        return sentence_rows(
            self.sentence_starts, step, batch_size=batch_size, seed=seed
        )

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        num_hosts: int = 1,
        host: int = 0,
        spans: Spans = Spans.ONE_PER_SENTENCE,
    ) -> Iterator[Example]:
        """Yields batches without end, beginning with that of step `start_step`.

        Args:
          batch_size: examples of all hosts together.
          seed: seeds the order of the examples, not negative.
          start_step: the first step; earlier steps are not replayed.
          num_hosts: number of equal parts of a batch.
          host: the part to yield.
          spans: the rows that an epoch visits; see `step_rows`.

        Raises:
          BadInputError: the batch cannot be split into `num_hosts` equal parts, there
            is no part `host`, or the seed is negative.
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
            self.step_rows(step, batch_size=batch_size, seed=seed, spans=spans)
            for step in itertools.count(start_step)
        )
        return (self.batch(rows[share]) for rows in rows_by_step)


def _write_partial(
    partial: Path,
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
) -> None:
    files = ExampleFiles(partial)
    try:
        for batch in batches:
            files.append(batch)
        if not files.count:
            raise BadInputError(
                f"expected examples for {partial.with_suffix('')}, got none; check "
                "that the source has what they are made from."
            )
        contents = files.finish()
    finally:
        files.close()
    info = {
        "format_version": FORMAT_VERSION,
        **contents,
        "metadata": dict(metadata),
    }
    (partial / INFO_FILE).write_bytes(seal(info))


def _read_info(directory: Path) -> dict[str, Any]:
    return read_manifest(directory / INFO_FILE, FORMAT_VERSION, "prepared examples")


def _described_arrays(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns each array's entry in examples.json: dtype, row shape, size, checksum."""
    starts = {SENTENCE_STARTS: info[SENTENCE_STARTS]} if SENTENCE_STARTS in info else {}
    return {**info["features"], **starts}


def _require_sound(
    directory: Path, arrays: Mapping[str, Mapping[str, Any]], *, contents: bool
) -> None:
    files = parse_files({f"{name}.npy": entry for name, entry in arrays.items()})
    require_sound(directory, files, contents=contents)
