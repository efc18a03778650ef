"""Makes a new version of a corpus, with documents added, replaced and deleted.

The old version is not modified, because indexes and checkpoints are bound to it. The
new one is in a folder of its own, and is identical to what `prepare` makes from the
changed source with the old vocabulary: changed documents go through the same code, the
blocks of all others are copied. The versions name each other, see `data/versions.py`.

A change is a line of JSON, a document with its `id` or `{"id": ..., "deleted": true}`.
A document that replaces another takes its position, and new documents are appended in
the order given. An id names an article, which may be several records of a source. They
are replaced and deleted together, and the replacement takes the position of the first.
"""

import dataclasses
import itertools
import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realm_jax import ranges
from realm_jax.data.block_writer import (
    BlockWriter,
    EmptyCorpusError,
    document_rows,
    require_free,
)
from realm_jax.data.blocks import INFO_FILE, BlockStore, read_documents, read_info
from realm_jax.data.corpus import settings_fingerprint
from realm_jax.data.documents import Document, Record, document_from_fields, id_field
from realm_jax.data.records import BadRecord, RecordError, json_object, shorten
from realm_jax.data.versions import link_versions, require_no_other_successor
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.block_parts import Summary
from realm_jax.prepare.blocks import PART_BYTES, BlocksConfig, option_of, prepare_blocks
from realm_jax.prepare.documents.files import combined_sha256, find_files
from realm_jax.prepare.documents.lines import LineSource
from realm_jax.prepare.documents.source import DocumentSource, read_all
from realm_jax.prepare.fingerprints import package_code
from realm_jax.prepare.scratch import (
    ALL_CORES,
    Report,
    Scratch,
    Workers,
    only_writer,
)

_CHANGES_AT_ONCE = 1 << 12
# Work can be stopped between two batches of documents.
_DOCUMENTS_AT_ONCE = 1 << 12

_log = logging.getLogger(__name__)


class Deletion(Document):
    """A document to be deleted, represented without title and text."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes to a corpus, in the order given.

    Attributes:
      rows: table rows of the documents, see `blocks.DOCUMENT`; a deletion has a
        row without blocks. Ids are unique.
      store: the blocks of the rows, or None if there are none.
    """

    rows: np.ndarray
    deleted: np.ndarray
    store: BlockStore | None

    def find(self, documents: np.ndarray) -> "Places":
        """Returns the positions of the changed documents in a corpus's table."""
        order = np.argsort(self.rows["id_hash"], kind="stable")
        wanted, hashes = self.rows["id_hash"][order], documents["id_hash"]
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found = np.flatnonzero(wanted[places] == hashes)
        return Places(found, order[places[found]])


@dataclasses.dataclass(frozen=True)
class Places:
    """Documents of a corpus that are changed.

    Attributes:
      documents: int64 [match], their positions in the corpus's table, ascending.
      changes: int64 [match], the index of the change that applies to each.
    """

    documents: np.ndarray
    changes: np.ndarray


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Configuration of an update.

    Attributes:
      corpus: the old version; it is not modified.
      changes: JSON lines, see above; a file or a pattern of files, plain
        or compressed, local or on gs://.
      output: directory of the new version.
      tagger: tagger of salient spans; "" for the one the corpus was made with. A
        checkpoint must be given, because a corpus does not record its folder.
      part_bytes: approximate size of a part of the changes, in bytes.
      scratch: parent of the folder for parts, "" to place it beside the new version.
    """

    corpus: str
    changes: str
    output: str
    tagger: str = ""
    part_bytes: int = PART_BYTES
    scratch: str = ""

    def __post_init__(self):
        ranges.require_ranges(
            self,
            corpus=ranges.PATH,
            changes=ranges.PATH,
            output=ranges.LOCAL_FOLDER,
            part_bytes=ranges.whole(1),
        )


class Update(NamedTuple):
    """A new version, with the numbers of changes.

    Attributes:
      new_blocks: number of blocks that were made, not copied.
    """

    store: BlockStore
    added: int
    replaced: int
    deleted: int
    new_blocks: int


def run(
    config: UpdateConfig,
    report: Report = lambda *_: None,
    stop: threading.Event | None = None,
    workers: Workers = ALL_CORES,
) -> Update:
    """Makes a new version of a corpus if it is missing."""
    corpus = BlockStore.open(config.corpus)
    there = _Existing(config, corpus, read_documents(corpus), _source(config))
    require_no_other_successor(config.corpus, config.output)
    settings = _settings(corpus, there.source)
    made_before = _is_made(config.output, settings)
    if not made_before:
        require_free(Path(config.output))
    # Cheap checks come before hours of work.
    changes = _read_changes(there.source, config.changes)
    places = changes.find(there.documents)
    _require_known(there, changes, places)
    if not made_before:
        corpus.verify()  # Else damaged blocks would be copied with new checksums.
        with only_writer(config.output):
            scratch = Scratch(config.output)
            made_so = f"{settings['source'][:16]}-{package_code()['source'][:16]}"
            folder = scratch.folder(f"changes-{made_so}")
            changes = _with_blocks(there, changes, folder, report, stop, workers)
            if not _num_blocks(there, changes, places):
                scratch.clear()
                raise BadInputError(
                    f"expected {config.changes} to leave text in {config.corpus}, but "
                    "not one block would be left; delete less."
                )
            _write(there, changes, places, settings, report, stop)
            scratch.clear()
    link_versions(config.corpus, config.output)
    return _summary(BlockStore.open(config.output), changes, places)


class _Existing(NamedTuple):
    """The inputs of an update; see `UpdateConfig`."""

    config: UpdateConfig
    corpus: BlockStore
    documents: np.ndarray
    source: LineSource


def _source(config: UpdateConfig) -> LineSource:
    paths = find_files(config.changes, "JSON lines of changes")
    return LineSource("changes", paths, change_from_json, shard_bytes=config.part_bytes)


def _settings(corpus: BlockStore, source: DocumentSource) -> dict[str, str]:
    """Returns the entries of corpus.json that identify the update."""
    tagger = corpus.info["tagger"]
    before = corpus.info["settings_fingerprint"]
    fingerprint = combined_sha256("changed", [before, source.fingerprint()])
    return {
        "source": fingerprint,
        "settings_fingerprint": settings_fingerprint(
            vocabulary=corpus.vocabulary,
            tagger_name=tagger,
            chunk_length=corpus.chunk_length,
            source=fingerprint,
        ),
    }


def _is_made(output: str, settings: Mapping[str, str]) -> bool:
    """Returns whether an earlier run made this version, linked or not."""
    if not (Path(output) / INFO_FILE).exists():
        return False
    return settings.items() <= read_info(output).items()


def _read_changes(source: DocumentSource, name: str) -> Changes:
    """Reads all changes once, before hours of work, and returns a row for each."""
    rows, deleted = [document_rows([], [])], [np.zeros(0, bool)]
    records = read_all(source)
    while batch := list(itertools.islice(records, _CHANGES_AT_ONCE)):
        documents = list(map(_document, batch))
        rows.append(document_rows(documents, [0] * len(documents)))
        deleted.append(np.array([isinstance(d, Deletion) for d in documents]))
    changes = Changes(np.concatenate(rows), np.concatenate(deleted), None)
    if not len(changes.rows):
        raise BadInputError(f"expected changes in {name}, got none; check the file.")
    _, first, counts = np.unique(
        changes.rows["id_hash"], return_index=True, return_counts=True
    )
    if (counts > 1).any():
        change = int(first[counts > 1].min())
        raise BadInputError(
            f"expected every id once in {name}, got {_id_of(source, change)!r} "
            f"{counts[first == change][0]} times; keep one of them."
        )
    return changes


def _document(record: Record) -> Document:
    match record:
        case BadRecord(where, reason):
            raise RecordError(where, reason)
        case Document():
            return record
    raise TypeError(f"no rule leaves out a change, but {record} was")


def _id_of(source: DocumentSource, change: int) -> str:
    """Returns the id of a change, read again; ids are only needed in errors."""
    [record] = itertools.islice(read_all(source), change, change + 1)
    return _document(record).source_id


def _require_known(there: _Existing, changes: Changes, places: Places) -> None:
    known = np.isin(np.arange(len(changes.rows)), places.changes)
    unknown = np.flatnonzero(changes.deleted & ~known)
    if len(unknown):
        more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise BadInputError(
            f"expected {there.config.changes} to delete documents of "
            f"{there.config.corpus}, got the id "
            f"{_id_of(there.source, int(unknown[0]))!r}{more}, which it does not have; "
            "correct the id or remove the line."
        )


def _with_blocks(
    there: _Existing,
    changes: Changes,
    folder: str,
    report: Report,
    stop: threading.Event | None,
    workers: Workers,
) -> Changes:
    """Makes the blocks of the new documents in a folder, as for any corpus."""
    if changes.deleted.all():
        return changes
    config, corpus = there.config, there.corpus
    blocks = BlocksConfig(
        corpus=folder,
        source=there.source,
        vocabulary=corpus.vocabulary,
        tagger=option_of(corpus.info["tagger"], config.tagger),
        chunk_length=corpus.chunk_length,
        part_bytes=config.part_bytes,
        scratch=config.scratch,
    )
    _remove_if_damaged(folder)
    try:
        store = prepare_blocks(blocks, report, stop, workers)
    except EmptyCorpusError:
        return changes  # No document has text.
    rows = np.array(read_documents(store))
    if not np.array_equal(rows["id_hash"], changes.rows["id_hash"]):
        raise BadInputError(
            f"expected {config.changes} to stay as it is while it is read, but it has "
            "changed; run again."
        )
    return dataclasses.replace(changes, rows=rows, store=store)


def _remove_if_damaged(folder: str) -> None:
    """Removes the blocks that an earlier run made of the changes, unless sound."""
    if not Path(folder).exists():
        return
    try:
        BlockStore.open(folder, verify=True)
    except BadInputError:
        _log.warning("%s is damaged and is made anew", folder)
        shutil.rmtree(folder)


def _num_blocks(there: _Existing, changes: Changes, places: Places) -> int:
    """Returns the number of blocks of the new version."""
    gone = there.documents["num_blocks"][places.documents].sum(dtype=np.int64)
    new = changes.rows["num_blocks"].sum(dtype=np.int64)
    return int(there.corpus.num_blocks - gone + new)


def _write(
    there: _Existing,
    changes: Changes,
    places: Places,
    settings: Mapping[str, str],
    report: Report,
    stop: threading.Event | None,
) -> None:
    corpus = there.corpus
    total = _num_blocks(there, changes, places)

    def progress(done: int) -> None:
        if stop is not None and stop.is_set():
            raise StoppedError("stopped; the same command goes on from here")
        report("copies", done, total)

    output = there.config.output
    with BlockWriter(output, corpus.vocabulary, corpus.chunk_length) as writer:
        write_changed(writer, corpus, there.documents, changes, places, progress)
        writer.metadata |= _metadata(corpus, writer.documents, settings)


def _metadata(
    corpus: BlockStore, documents: np.ndarray, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Returns corpus.json without the entries that the writer adds."""
    info = {**corpus.info, **settings, "num_documents": len(documents)}
    info["made_by"] = package_code()
    if "vocabulary_training" in info:
        info["vocabulary_training"] = None  # Not trained on this text, but given.
    if "summary" in info:
        counts = dataclasses.replace(
            Summary.from_json(info["summary"]),
            documents=len(documents),
            without_text=int(np.count_nonzero(documents["num_blocks"] == 0)),
            without_title=int(np.count_nonzero(~documents["has_title"])),
        )
        info["summary"] = counts.to_json()
    return info


def _summary(store: BlockStore, changes: Changes, places: Places) -> Update:
    changed = np.zeros(len(changes.rows), bool)
    changed[places.changes] = True
    documents = read_documents(store)
    new = documents["num_blocks"][changes.find(documents).documents]
    return Update(
        store=store,
        added=int(np.count_nonzero(~changed & ~changes.deleted)),
        replaced=int(np.count_nonzero(changed & ~changes.deleted)),
        deleted=int(np.count_nonzero(changes.deleted)),
        new_blocks=int(new.sum(dtype=np.int64)),
    )


def change_from_json(line: bytes, where: str) -> Document:
    """Reads a document with an `id`, or the `Deletion` of one.

    Args:
      line: an object in UTF-8: `id`, and either `"deleted": true` or what
        `document_from_json` reads.
    """
    fields = json_object(line, where)
    deleted = fields.get("deleted", False)
    if not id_field(fields, where) or not isinstance(deleted, bool):
        raise RecordError(
            where,
            "expected an 'id' with 'text' or with 'deleted': true, got "
            f"{shorten(json.dumps(fields))}; correct the line.",
        )
    if deleted:
        return Deletion("", "", id_field(fields, where))
    return document_from_fields(fields, where)


def write_changed(
    writer: BlockWriter,
    corpus: BlockStore,
    documents: np.ndarray,
    changes: Changes,
    places: Places,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes a corpus with changes applied, by copying blocks; none are computed.

    Args:
      writer: the writer of the new version; both versions share its vocabulary.
      documents: its table.
      places: positions of the changed documents in the table.
      progress: called with the number of blocks written so far.
    """
    ends = np.cumsum(changes.rows["num_blocks"], dtype=np.int64)
    starts = np.append(0, np.cumsum(documents["num_blocks"], dtype=np.int64))

    def put(change: int) -> None:
        row = changes.rows[change : change + 1]
        if changes.store is not None:
            start = int(ends[change] - row["num_blocks"][0])
            writer.copy(changes.store, start, int(ends[change]))
        writer.add_documents(row)

    def keep(first: int, stop: int) -> None:
        for at in range(first, stop, _DOCUMENTS_AT_ONCE):
            end = min(at + _DOCUMENTS_AT_ONCE, stop)
            writer.copy(corpus, int(starts[at]), int(starts[end]))
            writer.add_documents(documents[at:end])
            progress(writer.num_blocks)

    seen = np.zeros(len(changes.rows), bool)
    kept = 0
    for document, change in zip(
        places.documents.tolist(), places.changes.tolist(), strict=True
    ):
        keep(kept, document)
        kept = document + 1
        if not (changes.deleted[change] or seen[change]):
            put(change)
        seen[change] = True
    keep(kept, len(documents))
    for change in np.flatnonzero(~(seen | changes.deleted)).tolist():
        put(change)
