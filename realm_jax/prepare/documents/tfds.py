"""Reads datasets of TensorFlow Datasets that are prepared on disk or on gs://.

They are read from their files alone, so any prepared version works, whether or not the
installed TFDS still builds it. The features of a dataset determine how it is read:

    title, text                `wikipedia/*`; disambiguation pages, lists, indexes and
                               outlines are left out, as in the authors' code
    title, text, spans         `salient_span_wikipedia/*`: `start`, `limit` (in bytes of
                               the text as UTF-8) and `type`; used as they are
    ... and sentences          `salient_span_wikipedia/documents`: `start`, `limit`
    title, text, url, ...      news articles, `cc_news`
"""

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from realm_jax.data.documents import (
    NO_ARTICLE,
    TRAIN,
    ByteRanges,
    Document,
    LeftOut,
    Record,
    document_from_bytes,
    is_article,
)
from realm_jax.data.records import decode
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.lines import TEXT_FIELDS, article_from_fields
from realm_jax.prepare.documents.source import (
    SHARD_BYTES,
    DocumentSource,
    Piece,
    Shard,
    parsed,
)

_DEFAULT_DATA_DIR = "~/tensorflow_datasets"


class TfdsSource(DocumentSource):
    """The examples of the split train, in the order of their files.

    In `salient_span_wikipedia/sentences` each sentence is a separate document; those of
    one article share its title, which is their source id.
    """

    def __init__(
        self,
        name: str,
        data_dir: str | None = None,
        *,
        shard_bytes: int = SHARD_BYTES,
    ):
        """Finds a dataset.

        Args:
          name: as in `tfds.load`: dataset, optionally with /config and :version.
          data_dir: folder of prepared datasets; see `data_folder`.
        """
        self._name = name
        self._data_dir = data_folder(data_dir)
        self._shard_bytes = shard_bytes
        _require_text(name, prepared_dataset(name, self._data_dir))

    def fingerprint(self) -> str:
        """Returns a SHA-256 of the dataset's name and the contents of its files."""
        builder = prepared_dataset(self._name, self._data_dir)
        paths = sorted(map(os.fspath, builder.info.splits[TRAIN].filepaths))
        return files.combined_sha256(
            "tfds", [builder.info.full_name, TRAIN, *map(files.sha256, paths)]
        )

    def shards(self) -> list[Shard]:
        """Returns shards of examples, sized by the mean size of an example."""
        info = prepared_dataset(self._name, self._data_dir).info.splits[TRAIN]
        mean_bytes = max(1, info.num_bytes // info.num_examples)
        size = max(1, self._shard_bytes // mean_bytes)
        name = f"{self._name} {TRAIN}"
        return [
            Shard((Piece(name, name, at, min(at + size, info.num_examples), at + 1),))
            for at in range(0, info.num_examples, size)
        ]

    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order."""
        builder = prepared_dataset(self._name, self._data_dir)
        for piece in shard.pieces:
            examples = _read_examples(builder, piece)
            for number, example in enumerate(examples, start=piece.first_number):
                where = f"{piece.name}, example {number}"
                yield parsed(_record, builder.name, example, where)


def data_folder(folder: str | None) -> str:
    """Returns a folder, or that of TFDS_DATA_DIR, or else ~/tensorflow_datasets."""
    return os.path.expanduser(
        folder or os.environ.get("TFDS_DATA_DIR") or _DEFAULT_DATA_DIR
    )


# Pickled sources contain no builder: every process opens its own, once.
@functools.lru_cache
def prepared_dataset(name: str, folder: str) -> Any:
    """Returns a builder of TFDS that reads what has been prepared in a folder."""
    import tensorflow_datasets as tfds

    try:
        # Not tfds.builder, which queries the network for datasets it does not find.
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=folder)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise BadInputError(
            f"expected the TFDS dataset {name!r} prepared in {folder}, found none; run "
            "`tfds build`, name it as dataset/config:version, or its folder by "
            "TFDS_DATA_DIR or behind an @."
        ) from error


def read_split(builder: Any, split: Any, what: str, **config: Any) -> Iterator[Any]:
    """Yields the examples of a split, or of a part of it, in the order of the files."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    # Read files sequentially; by default 16 are interleaved, and the order would depend
    # on where shards begin.
    order = tfds.ReadConfig(interleave_cycle_length=1, **config)
    dataset = builder.as_dataset(split=split, shuffle_files=False, read_config=order)
    try:
        yield from tfds.as_numpy(dataset)
    except tf.errors.OpError as error:
        raise BadInputError(
            f"expected whole files of {what} in {builder.data_dir}, but they cannot be "
            f"read ({files.first_line(error)}); prepare it again."
        ) from error


def _require_text(name: str, builder: Any) -> None:
    features, splits = builder.info.features, builder.info.splits
    if TRAIN not in splits or not splits[TRAIN].num_examples:
        raise BadInputError(
            f"expected examples in the split {TRAIN!r} of {name}, got the splits "
            f"{', '.join(splits) or 'none'}; name another dataset."
        )
    if "title" not in features or not any(field in features for field in TEXT_FIELDS):
        raise BadInputError(
            f"expected a dataset with the features title and text, got {name} with "
            f"{', '.join(features)}; name another dataset."
        )


def _read_examples(builder: Any, piece: Piece) -> Iterator[Mapping]:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    options = tf.data.Options()
    # Many shards are read at once, each in a separate process.
    options.threading.private_threadpool_size = 1
    part = tfds.core.ReadInstruction(
        TRAIN, from_=piece.start, to=piece.stop, unit="abs"
    )
    return read_split(
        builder,
        part,
        piece.name,
        options=options,
        try_autocache=False,
        num_parallel_calls_for_decode=1,
        num_parallel_calls_for_interleave_files=1,
    )


def _record(dataset: str, example: Mapping, where: str) -> Document | LeftOut:
    if "spans" in example:
        return _annotated(example, where)
    fields = {
        name: decode(value, name, where)
        for name, value in example.items()
        if isinstance(value, bytes)
    }
    if dataset == "wikipedia" and not is_article(fields["title"]):
        return LeftOut(where, NO_ARTICLE)
    return article_from_fields(fields, where)


def _annotated(example: Mapping, where: str) -> Document:
    spans, sentences = example["spans"], example.get("sentences")
    return document_from_bytes(
        example["title"],
        example["text"],
        where,
        spans=ByteRanges(spans["start"], spans["limit"], spans.get("type")),
        sentences=sentences and ByteRanges(sentences["start"], sentences["limit"]),
    )
