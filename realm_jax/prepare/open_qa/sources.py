"""Finds the questions of a set, in files with known names or in a dataset of TFDS."""

import fnmatch
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.tfds import (
    data_folder,
    prepared_dataset,
    read_split,
)
from realm_jax.storage import open_store

TRAIN, DEV, TEST = SPLITS = ("train", "dev", "test")

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A folder or a file, local or gs://; `tfds:NAME`; or the file of each split.

NAME is `dataset/config:version`, where config and version are optional, optionally
followed by `@FOLDER`, the folder in which TFDS has prepared it.
"""

Layout: TypeAlias = Mapping[str, str]
"""Published file name of each split.

`*` matches any number of files in one folder.
"""

_TFDS = "tfds:"


def tfds_name(source: Source) -> str | None:
    """Returns NAME for `tfds:NAME`, None for any other source."""
    if isinstance(source, Mapping):
        return None
    location = os.fspath(source)
    return location.removeprefix(_TFDS) if location.startswith(_TFDS) else None


def files_by_split(source: Source, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """Returns the files of each existing split, in the order of `SPLITS`.

    Args:
      source: a file with a published name, plain or with `.gz`; a folder with such
        files at any depth; or the file of each split, with any name.
      layouts: the published forms of the set; the first that is found is used.
    """
    if isinstance(source, Mapping):
        if not source or set(source) - set(SPLITS):
            raise BadInputError(
                f"expected a file for any of {', '.join(SPLITS)}, got "
                f"{sorted(source)}; name the splits so."
            )
        return {s: [os.fspath(source[s])] for s in SPLITS if s in source}
    location = os.fspath(source)
    for layout in layouts:
        for split, pattern in layout.items():
            if _is_named(posixpath.basename(location), posixpath.basename(pattern)):
                return {split: [location]}
    return _files_in_folder(location, layouts)


def read_tfds(name: str, splits: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (split, example) of a prepared dataset, in the order of its files.

    Args:
      name: the dataset, optionally with `@FOLDER`; see `data_folder`.
      splits: the splits to read, by their names in TFDS.
    """
    dataset, _, folder = name.partition("@")
    builder = prepared_dataset(dataset, data_folder(folder))
    found = builder.info.splits
    for split in splits:
        if split not in found:
            raise BadInputError(
                f"expected the split {split!r} of {dataset} in {builder.data_dir}, "
                f"found {', '.join(found) or 'none'}; name another dataset."
            )
        for example in read_split(builder, split, dataset, add_tfds_id=True):
            yield split, example


def _files_in_folder(location: str, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    folder = open_store(location)
    names = folder.list()
    for layout in layouts:
        found = {s: _matching(names, layout[s], location) for s in layout}
        if any(found.values()):
            return {
                split: [f"{location.rstrip('/')}/{name}" for name in found[split]]
                for split in SPLITS
                if found.get(split)
            }
    known = " or ".join(" and ".join(layout.values()) for layout in layouts)
    raise BadInputError(
        f"expected {known} in {folder.url()}, found none of them; correct the path, or "
        "name the file of each split."
    )


def _matching(names: Sequence[str], pattern: str, location: str) -> list[str]:
    found = [
        name
        for name in names
        if _is_named(name, pattern) or _is_named(name, f"*/{pattern}")
    ]
    folders = {posixpath.dirname(name) for name in found}
    if len(folders) > 1 or (len(found) > 1 and "*" not in pattern):
        raise BadInputError(
            f"expected {pattern} once below {location}, found {', '.join(found[:2])}; "
            "name one of their folders, or the file of each split."
        )
    return found


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.removesuffix(".gz"), pattern)
