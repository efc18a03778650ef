"""Where the questions of a set are: files of known names, or a dataset of TFDS."""

import fnmatch
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_datasets as tfds

from realm_jax.errors import BadInputError
from realm_jax.storage import open_store

TRAIN, DEV, TEST = SPLITS = ("train", "dev", "test")

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A folder or a file, local or gs://; `tfds:NAME`; or the file of each split.

NAME is `dataset/config:version`, the latter two if need be, perhaps with `@FOLDER`
behind it, where TFDS has prepared it.
"""

Layout: TypeAlias = Mapping[str, str]
"""The file of each split, by the name under which it is published.

`*` stands for any number of files of one folder.
"""

_TFDS = "tfds:"
_DEFAULT_DATA_DIR = "~/tensorflow_datasets"


def tfds_name(source: Source) -> str | None:
    """Returns NAME of `tfds:NAME`; None of any other source."""
    if isinstance(source, Mapping):
        return None
    location = os.fspath(source)
    return location.removeprefix(_TFDS) if location.startswith(_TFDS) else None


def files_by_split(source: Source, layouts: Sequence[Layout]) -> dict[str, list[str]]:
    """Returns the files of each split there is, in the order of `SPLITS`.

    Args:
      source: a file under a published name, plain or with `.gz`; a folder with such
        files in it or below; or the file of each split, whatever their names.
      layouts: how the set is published; the first that is there is taken.

    Raises:
      BadInputError: nothing is there, a file is there twice, or a split has another
        name than those of `SPLITS`.
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
      name: of the dataset, perhaps with `@FOLDER`; without, it lies where the
        environment variable TFDS_DATA_DIR says, or in ~/tensorflow_datasets.
      splits: those to read, as TFDS calls them.

    Raises:
      BadInputError: there is no such dataset, it is not prepared, or a file is damaged.
    """
    dataset, _, folder = name.partition("@")
    folder = folder or os.environ.get("TFDS_DATA_DIR") or _DEFAULT_DATA_DIR
    try:
        # Not tfds.builder: that asks the network for what it does not find.
        builder = tfds.core.read_only_builder.builder_from_files(
            dataset, data_dir=os.path.expanduser(folder)
        )
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise BadInputError(
            f"expected the TFDS dataset {dataset!r} prepared in {folder}, found none; "
            "run `tfds build`, or name it as dataset/config:version@folder."
        ) from error
    found = builder.info.splits
    # One file after the other: the same order each time.
    order = tfds.ReadConfig(interleave_cycle_length=1, add_tfds_id=True)
    for split in splits:
        if split not in found:
            raise BadInputError(
                f"expected the split {split!r} of {dataset} in {folder}, found "
                f"{', '.join(found) or 'none'}; name another dataset."
            )
        # Its decorator hides the parameters from the type checker.
        examples = builder.as_dataset(split=split, read_config=order)  # pyright: ignore[reportCallIssue]
        try:
            yield from ((split, example) for example in tfds.as_numpy(examples))
        except tf.errors.OpError as error:
            raise BadInputError(
                f"expected whole files of {dataset} in {folder}, but they cannot be "
                f"read ({str(error).splitlines()[0]}); prepare it again."
            ) from error


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
