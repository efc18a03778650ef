"""Stores materialised examples, which training jobs read without TensorFlow.

A set of examples is a directory:

    examples.json        count, features (type, shape, size, checksum), metadata
    <feature>.npy        one array per feature, examples along the first axis
    sentence_starts.npy  the row at which each sentence begins, then the number of rows;
                         only where several examples can be of one sentence

Arrays are memory-mapped. `batch_order.py` chooses the rows of each update.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Int, Int64

from realm_jax.data.batch_order import Spans, batch_rows, sentence_rows
from realm_jax.data.blocks import BlockStore
from realm_jax.data.example_files import SENTENCE_STARTS, ExampleFiles
from realm_jax.data.features import Example, FeatureSpecs
from realm_jax.data.inverse_cloze import PairRows
from realm_jax.data.masking import SpanRows, mask_together
from realm_jax.data.random_masking import PieceRows
from realm_jax.data.references import References, SentenceRows
from realm_jax.data.store_files import (
    map_array,
    new_folder,
    read_manifest,
    require_consecutive,
    require_free,
    require_sound,
)
from realm_jax.errors import BadInputError
from realm_jax.manifests import require_fields, seal

FORMAT_VERSION = 2
INFO_FILE = "examples.json"
CORPUS_FINGERPRINT = "corpus_fingerprint"
_WHOLE_ROWS_ONLY = 1
_INFO_FIELDS = {"count": int, "features": dict, "metadata": dict}
_ARRAYS = "arrays"
_LAYOUT, _ROWS, _KIND = "layout", "rows", "kind"
_WHOLE, _SENTENCES = "whole", "sentences"
_KINDS = {kind.kind: kind for kind in (PairRows, PieceRows, SpanRows)}
_AT_ONCE = 4096


def write_examples(
    directory: str | os.PathLike[str],
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
    *,
    references: References | None = None,
    dtypes: Mapping[str, np.dtype] | None = None,
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
      references: what the batches refer to, whose arrays are then columns of
        `references.layout`; None if they hold the features themselves.
      dtypes: narrower integers in which features are stored, by name.
    """
    directory = Path(directory)
    require_free(directory)
    with new_folder(directory, "the examples") as partial:
        _write_partial(partial, batches, metadata, references, dtypes or {})
    return Examples.open(directory, corpus=references and references.corpus)


class Batched(Protocol):
    """Examples that are laid out when they are read."""

    @property
    def specs(self) -> FeatureSpecs:
        """Shape and type of each feature of an example."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Any) -> Example:
        """Returns the examples at `indices`, in the given order."""
        ...


class Feature:
    """A feature of all examples, computed where it is indexed, like a mapped array."""

    def __init__(self, examples: "Batched", name: str):
        """Use `Examples.features`."""
        self._examples = examples
        self._name = name
        spec = examples.specs[name]
        self.shape: tuple[int, ...] = (len(examples), *spec.shape)
        self.dtype = np.dtype(spec.dtype)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._examples)

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns the feature of the examples at `rows`, an integer, slice or array."""
        if isinstance(rows, int | np.integer):
            return self[np.array([rows])][0]
        return self._examples.batch(rows)[self._name]

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Returns the feature of all examples."""
        starts = range(0, len(self), _AT_ONCE)
        values = np.concatenate([self[start : start + _AT_ONCE] for start in starts])
        return values.astype(dtype or self.dtype, copy=False)


AnyFeature: TypeAlias = np.ndarray | Feature
"""A feature that is on disk as it is in a batch, or one that is computed."""


class Examples:
    """A set of examples, opened for reading.

    Attributes:
      specs: shape and type of each feature of an example in a batch.
      features: each feature of all examples: its memory-mapped array, or, if it is not
        stored as it is in a batch, a `Feature`.
      sentence_starts: the row at which each sentence begins, then the number of rows,
        memory-mapped; None if it is not known which rows share a sentence.
    """

    def __init__(
        self,
        directory: Path,
        metadata: Mapping[str, Any],
        specs: FeatureSpecs,
        arrays: Mapping[str, np.ndarray],
        sentence_starts: np.ndarray | None,
        references: References | None,
    ):
        """Use `Examples.open`."""
        self.directory = directory
        self.metadata = metadata
        self.specs = specs
        self.sentence_starts = sentence_starts
        self._arrays = arrays
        self._references = references
        self._count = len(next(iter(arrays.values())))
        self.features: Mapping[str, AnyFeature] = {
            name: arrays[name]
            if name in arrays and arrays[name].dtype == spec.dtype
            else Feature(self, name)
            for name, spec in specs.items()
        }

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        expect: Mapping[str, Any] | None = None,
        *,
        verify: bool = False,
        corpus: BlockStore | None = None,
    ) -> "Examples":
        """Opens examples after checking sizes, types and shapes of their files.

        Args:
          expect: metadata they must have, such as the fingerprint of the corpus.
          verify: whether every byte is read and checksums are compared, too.
          corpus: the blocks that the rows refer to, if they do; None opens CORPUS where
            the directory is CORPUS/examples/TASK/SPLIT.
        """
        directory = Path(directory)
        info = _read_info(directory)
        layout = info[_LAYOUT]
        _require_metadata(directory, info, expect or {})
        references = None
        if layout is not None:
            corpus = corpus or _corpus_of(directory)
            _require_metadata(directory, info, {CORPUS_FINGERPRINT: corpus.fingerprint})
            references = References(layout, corpus)
        described = _described_arrays(info)
        _require_sound(directory, described, contents=verify)
        arrays = {
            name: map_array(
                directory / f"{name}.npy",
                entry["dtype"],
                (entry.get("count", info["count"]), *entry["shape"]),
            )
            for name, entry in described.items()
        }
        starts = arrays.pop(SENTENCE_STARTS, None)
        if starts is not None:
            require_consecutive(
                directory / f"{SENTENCE_STARTS}.npy",
                starts,
                info["count"],
                "rows of sentences",
                shortest=1,
            )
        return cls(
            directory, info["metadata"], _specs(info), arrays, starts, references
        )

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._count

    def verify(self) -> None:
        """Reads every byte and compares checksums."""
        arrays = _described_arrays(_read_info(self.directory))
        _require_sound(self.directory, arrays, contents=True)

    def batch(self, indices: Int[np.ndarray, " batch"]) -> Example:
        """Returns the examples at `indices`, in the given order."""
        rows = {name: array[indices] for name, array in self._arrays.items()}
        if self._references is None:
            return {
                name: rows[name].astype(spec.dtype, copy=False)
                for name, spec in self.specs.items()
            }
        try:
            return self._references.layout.lay_out(self._references.corpus, rows)
        except BadInputError as error:
            raise BadInputError(f"{self.directory}: {error}") from error

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
        of_sentences = [
            np.roll(np.arange(first, end), first - row)
            for row, first, end in zip(
                indices, starts[sentences], starts[sentences + 1], strict=True
            )
        ]
        every = self.batch(np.concatenate(of_sentences))
        ends = np.cumsum([len(rows) for rows in of_sentences])
        made = [
            mask_together(
                {name: array[end - len(rows) : end] for name, array in every.items()}
            )
            for rows, end in zip(of_sentences, ends, strict=True)
        ]
        return {name: np.stack([one[name] for one in made]) for name in self.specs}

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
          spans: whether an epoch visits one row of each sentence or every row. Every
            row is visited where it is not known which rows share a sentence.
            `TOGETHER` visits the same rows as `ONE_PER_SENTENCE`.
        """
        if self.sentence_starts is None or spans is Spans.ALL:
            return batch_rows(len(self), step, batch_size=batch_size, seed=seed)
        return sentence_rows(
            self.sentence_starts, step, batch_size=batch_size, seed=seed
        )


def read_specs(directory: str | os.PathLike[str]) -> FeatureSpecs:
    """Returns shape and type of each feature of an example, without opening arrays."""
    return _specs(_read_info(Path(directory)))


def _specs(info: Mapping[str, Any]) -> FeatureSpecs:
    layout = info[_LAYOUT]
    return _parse_specs(info["features"]) if layout is None else layout.specs


def _write_partial(
    partial: Path,
    batches: Iterable[Mapping[str, np.ndarray]],
    metadata: Mapping[str, Any],
    references: References | None,
    dtypes: Mapping[str, np.dtype],
) -> None:
    layout = None
    if references is not None:
        layout, corpus = references
        bodies = corpus.body_lengths(np.arange(corpus.num_blocks))
        dtypes = layout.dtypes(corpus.num_blocks, int(bodies.max()))
    files = ExampleFiles(partial, dtypes)
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
        _LAYOUT: _describe_layout(layout),
        "features": _describe_specs(files.specs if layout is None else layout.specs),
        **contents,
        "metadata": dict(metadata),
    }
    (partial / INFO_FILE).write_bytes(seal(info))


def _corpus_of(directory: Path) -> BlockStore:
    """Opens CORPUS of CORPUS/examples/TASK/SPLIT."""
    try:
        return BlockStore.open(os.path.abspath(directory / "../../.."))
    except BadInputError as error:
        raise BadInputError(
            f"expected the corpus whose sentences {directory} refers to, three folders "
            f"above it or given as `corpus`: {error}"
        ) from error


def _require_metadata(
    directory: Path, info: Mapping[str, Any], expect: Mapping[str, Any]
) -> None:
    for name, value in expect.items():
        found = info["metadata"].get(name)
        if found != value:
            raise BadInputError(
                f"expected examples with {name} {value!r} in {directory}, got "
                f"{found!r}; prepare them again or correct the path."
            )


def _read_info(directory: Path) -> dict[str, Any]:
    """Returns the content of examples.json, with the layout in place of its entry."""
    path = directory / INFO_FILE
    info = read_manifest(
        path,
        FORMAT_VERSION,
        "prepared examples",
        _INFO_FIELDS,
        older=(_WHOLE_ROWS_ONLY,),
    )
    try:
        if info["format_version"] == _WHOLE_ROWS_ONLY:
            info |= {_LAYOUT: _describe_layout(None), _ARRAYS: info["features"]}
        require_fields(info, {_LAYOUT: dict, _ARRAYS: dict})
        info[_LAYOUT] = _parse_layout(info[_LAYOUT])
        layout, arrays = info[_LAYOUT], info[_ARRAYS]
        wanted = _parse_specs(info["features"]) if layout is None else layout.columns
        if not wanted or arrays.keys() != wanted.keys():
            raise ValueError(f"{', '.join(wanted) or 'one'} expected")
        for name, entry in _described_arrays(info).items():
            require_fields(entry, {"dtype": str, "shape": list})
            if name in wanted and tuple(entry["shape"]) != wanted[name].shape:
                raise ValueError(f"{name} of shape {list(wanted[name].shape)} expected")
    except (ValueError, BadInputError) as error:
        raise BadInputError(
            f"expected arrays in {path}, each with its dtype and shape, but one cannot "
            f"be read ({error}); run `realm prepare` again."
        ) from error
    return info


def _described_arrays(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns each array's entry in examples.json: dtype, row shape, size, checksum."""
    starts = {SENTENCE_STARTS: info[SENTENCE_STARTS]} if SENTENCE_STARTS in info else {}
    return {**info[_ARRAYS], **starts}


def _require_sound(
    directory: Path, arrays: Mapping[str, Mapping[str, Any]], *, contents: bool
) -> None:
    table = {f"{name}.npy": entry for name, entry in arrays.items()}
    require_sound(directory, table, contents=contents)


def _describe_layout(layout: SentenceRows | None) -> dict[str, Any]:
    """Returns the entry of a layout in examples.json; None is that of whole rows."""
    if layout is None:
        return {_ROWS: _WHOLE, "about": "A row has an array of each feature."}
    kind = {_ROWS: _SENTENCES, "about": f"{layout.about}.", _KIND: layout.kind}
    return {**kind, **dataclasses.asdict(layout)}


def _parse_layout(entry: Any) -> SentenceRows | None:
    """Inverts `_describe_layout`.

    Raises:
      ValueError: it is no such entry, or of a later release.
      BadInputError: its lengths leave no room for an example.
    """
    require_fields(entry, {_ROWS: str})
    if entry[_ROWS] == _WHOLE:
        return None
    require_fields(entry, {_KIND: str})
    if entry[_ROWS] != _SENTENCES or entry[_KIND] not in _KINDS:
        raise ValueError(f"rows of {entry[_ROWS]!r}, {entry[_KIND]!r}, are not known")
    kind = _KINDS[entry[_KIND]]
    names = [field.name for field in dataclasses.fields(kind)]
    require_fields(entry, dict.fromkeys(names, int))
    return kind(**{name: entry[name] for name in names})


def _describe_specs(specs: FeatureSpecs) -> dict[str, Any]:
    """Returns the features of a batch as JSON values: dtype and shape of an example."""
    return {
        name: {"dtype": np.dtype(spec.dtype).name, "shape": list(spec.shape)}
        for name, spec in specs.items()
    }


def _parse_specs(entries: Mapping[str, Any]) -> FeatureSpecs:
    """Inverts `_describe_specs`; further entries are ignored.

    Raises:
      ValueError: an entry is none of a feature.
    """
    specs = {}
    for name, entry in entries.items():
        require_fields(entry, {"dtype": str, "shape": list})
        try:
            dtype, shape = np.dtype(entry["dtype"]), tuple(map(int, entry["shape"]))
            specs[name] = jax.ShapeDtypeStruct(shape, dtype)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: {error}") from error
    return specs
