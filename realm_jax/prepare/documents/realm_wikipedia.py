"""Reads the annotated Wikipedia published with REALM, with sentences and spans.

The files are `wikipedia_annotated_with_dates_public*.tfrecord.gz`. Their records are
`tf.train.Example`s with these features (the authors' reader is
`text_features_to_query` in `realm/example_generator.py`):

    title, text                               bytes, UTF-8, one each
    sentence_byte_start, sentence_byte_limit  int64, offsets into `text`, end exclusive
    span_byte_start, span_byte_limit          int64, the salient spans
    span_type                                 bytes, label of each span; may be absent

The knowledge corpus published with it (`docs*.tfr.gz-*-of-*`) has a `body` in place of
the text and no offsets; it is read too, and its spans are tagged.
"""

import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from realm_jax.data.documents import ByteRanges, Document, Record, document_from_bytes
from realm_jax.data.records import RecordError
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents import files
from realm_jax.prepare.documents.source import (
    SHARD_BYTES,
    DocumentSource,
    Shard,
    pack,
    parsed,
)

# The knowledge corpus has shard numbers after its suffix.
_GZIP = re.compile(r"\.gz(-\d+-of-\d+)?$")


class RealmWikipedia(DocumentSource):
    """Annotated documents of TFRecord files, gzipped (`.gz`) or plain.

    Files are not split: the published corpus consists of 5,000 small ones. Documents
    are passages; those of one article share its title, which is their source id.
    """

    def __init__(self, pattern: str, *, shard_bytes: int = SHARD_BYTES):
        """Lists files."""
        self._paths: Sequence[epath.Path] = files.find_files(
            pattern, "TFRecords of annotated Wikipedia"
        )
        self._shard_bytes = shard_bytes

    def fingerprint(self) -> str:
        """Returns a SHA-256 of the contents of the files, in order."""
        return files.combined_sha256("realm_wikipedia", map(files.sha256, self._paths))

    def shards(self) -> list[Shard]:
        """Returns shards of whole files."""
        return pack(map(files.whole_file, self._paths), self._shard_bytes)

    def read(self, shard: Shard) -> Iterator[Record]:
        """Yields the records of a shard, in order."""
        for piece in shard.pieces:
            for number, record in _read_records(piece.path):
                where = f"{piece.name}, record {number}"
                yield parsed(document_from_example, record, where)


def document_from_example(record: bytes, where: str) -> Document:
    """Reads a serialised `tf.train.Example` with the features above."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise RecordError(
            where, f"expected a tf.train.Example, got something else ({error})."
        ) from error
    # Indexing a proto's map with an absent key would add it.
    texts = {name: list(f.bytes_list.value) for name, f in features.items()}
    offsets = {name: list(f.int64_list.value) for name, f in features.items()}
    text = texts.get("text") or texts.get("body")
    if not texts.get("title") or not text:
        raise RecordError(
            where,
            "expected the features title and text (or body), got "
            f"{', '.join(sorted(features)) or 'none'}; is this annotated Wikipedia?",
        )

    def ranges(what: str) -> ByteRanges | None:
        starts, limits = f"{what}_byte_start", f"{what}_byte_limit"
        if starts not in offsets and limits not in offsets:
            return None
        return ByteRanges(
            offsets.get(starts, []),
            offsets.get(limits, []),
            texts.get(f"{what}_type"),
        )

    spans, sentences = ranges("span"), ranges("sentence")
    if spans is None and sentences is not None:
        # Annotated without any span: a proto may omit an empty list.
        spans = ByteRanges([], [])
    return document_from_bytes(
        texts["title"][0], text[0], where, spans=spans, sentences=sentences
    )


def _read_records(path: str) -> Iterator[tuple[int, bytes]]:
    import tensorflow as tf

    compression = "GZIP" if _GZIP.search(os.path.basename(path)) else ""
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    number = 0
    try:
        for number, record in enumerate(records.as_numpy_iterator(), start=1):
            yield number, bytes(record)
    except tf.errors.OpError as error:
        raise BadInputError(
            f"expected whole TFRecords in {path}, but it is damaged after record "
            f"{number} ({files.first_line(error)}); fetch it again."
        ) from error
