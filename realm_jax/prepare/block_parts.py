"""Serialises parts of a corpus: blocks with counts of source records, or examples."""

import dataclasses
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from realm_jax.data.block_writer import Block
from realm_jax.data.blocks import decode_text, encode_text
from realm_jax.data.documents import Document, LeftOut, Record
from realm_jax.data.records import BadRecord
from realm_jax.errors import BadInputError
from realm_jax.storage import MissingObjectError, Store

_SHOWN = 20
_CHECKSUM_BYTES = 4

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Summary:
    """Counts of the records of a source by outcome; no record is dropped silently.

    Attributes:
      documents: records that are documents.
      without_text: documents without any block.
      without_title: documents with an empty title; they are kept.
      shortened_titles: documents whose title was longer than half a block.
      divisions: cuts in sentences that were longer than a block.
      unread_pieces: wordpieces that no model sees, of words longer than a block.
      bad_records: damaged records.
      first_bad: place and reason of the first of them.
      left_out: records that a rule excludes, by rule.
    """

    documents: int = 0
    without_text: int = 0
    without_title: int = 0
    shortened_titles: int = 0
    divisions: int = 0
    unread_pieces: int = 0
    bad_records: int = 0
    first_bad: list[BadRecord] = dataclasses.field(default_factory=list)
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)

    def add_bad(self, record: BadRecord) -> None:
        """Counts a damaged record."""
        self.bad_records += 1
        self.first_bad = [*self.first_bad, record][:_SHOWN]

    def add(self, later: "Summary") -> None:
        """Adds the counts of records that came later."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(later, field.name)
            setattr(self, field.name, total)
        self.first_bad = self.first_bad[:_SHOWN]

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as plain JSON values."""
        return {
            **dataclasses.asdict(self),
            "first_bad": [list(record) for record in self.first_bad],
            "left_out": dict(sorted(self.left_out.items())),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Summary":
        """Inverts `to_json`."""
        fields = dict(values)
        fields["first_bad"] = [BadRecord(*record) for record in values["first_bad"]]
        fields["left_out"] = Counter(values["left_out"])
        return cls(**fields)


def require_few_bad(summary: Summary, max_bad_lines: int) -> None:
    """Checks that there are no more damaged records than tolerated."""
    if summary.bad_records > max_bad_lines:
        where, reason = summary.first_bad[0]
        raise BadInputError(
            f"{where}: {reason} ({summary.bad_records} damaged so far, "
            f"--max_bad_lines={max_bad_lines})"
        )


def documents_of(
    records: Iterable[Record], summary: Summary, max_bad_lines: int
) -> Iterator[Document]:
    """Yields the documents among records, and counts all of these in `summary`.

    More damage than is tolerated is refused as soon as it is read.
    """
    for record in records:
        match record:
            case Document():
                summary.documents += 1
                summary.without_title += not record.title.strip()
                yield record
            case LeftOut():
                summary.left_out[record.reason] += 1
            case BadRecord():
                summary.add_bad(record)
                require_few_bad(summary, max_bad_lines)


class Part(NamedTuple):
    """Output from a part of a source.

    Attributes:
      blocks: its blocks in order; can be iterated once.
    """

    blocks: Iterator[Block]
    documents: np.ndarray
    summary: Summary


def pack_blocks(
    blocks: Sequence[Block], documents: np.ndarray, summary: Summary
) -> bytes:
    """Serialises a part deterministically."""
    texts = [encode_text(block.text) for block in blocks]
    arrays = {
        "title_lengths": np.array([len(b.title_ids) for b in blocks], np.int32),
        "body_lengths": np.array([len(b.body_ids) for b in blocks], np.int32),
        "text_lengths": np.array([len(text) for text in texts], np.int32),
        "ids": _joined(ids for b in blocks for ids in (b.title_ids, b.body_ids)),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
        "documents": documents,
        "summary": np.frombuffer(json.dumps(summary.to_json()).encode(), np.uint8),
    }
    return pack_arrays(arrays)


def unpack_blocks(part: bytes) -> Part:
    """Inverts `pack_blocks`."""
    arrays = unpack_arrays(part)
    summary = Summary.from_json(json.loads(arrays["summary"].tobytes()))
    return Part(_blocks(arrays), arrays["documents"], summary)


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialises named arrays as NumPy's .npz, whose timestamps are constant."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpack_arrays(part: bytes) -> dict[str, np.ndarray]:
    """Inverts `pack_arrays`."""
    with np.load(io.BytesIO(part), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    return ids.astype(np.min_scalar_type(ids.max(initial=0)))


def _blocks(arrays: Mapping[str, np.ndarray]) -> Iterator[Block]:
    ids, texts = arrays["ids"], arrays["texts"].tobytes()
    lengths = np.stack([arrays["title_lengths"], arrays["body_lengths"]], axis=1)
    id_ends = lengths.ravel().cumsum().reshape(-1, 2).tolist()
    text_ends = arrays["text_lengths"].cumsum(dtype=np.int64).tolist()
    id_start = text_start = 0
    for (title_end, body_end), text_end in zip(id_ends, text_ends, strict=True):
        yield Block(
            title_ids=ids[id_start:title_end],
            body_ids=ids[title_end:body_end],
            text=decode_text(texts[text_start:text_end]),
        )
        id_start, text_start = body_end, text_end


def write_part(store: Store, name: str, part: bytes) -> None:
    """Writes a part, followed by its crc32c.

    Parts of unfinished work lie there until the last one is made, which may be days and
    several runs later.
    """
    store.write(name, part + _checksum(part))


def read_part(store: Store, name: str) -> bytes | None:
    """Returns a part; None if there is none, or a damaged one, which is logged."""
    try:
        data = store.read(name)
    except MissingObjectError:
        return None
    part, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum == _checksum(part):
        return part
    _log.warning("%s is damaged and is made anew", store.url(name))
    return None


def _checksum(part: bytes) -> bytes:
    return google_crc32c.value(part).to_bytes(_CHECKSUM_BYTES, "big")
