"""A new version of a corpus: documents added, replaced and deleted.

The version there is stays as it was, for indexes and checkpoints are bound to it. The
new one lies in a folder of its own, and is what `prepare` makes of the changed source
with the vocabulary of the old one: the changed documents go through the same code, the
blocks of all others are copied. The two name each other, see `data/versions.py`.
"""

import dataclasses
import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realm_jax.data.block_writer import BlockWriter, EmptyCorpusError, require_free
from realm_jax.data.blocks import INFO_FILE, BlockStore, read_info
from realm_jax.data.corpus import settings_fingerprint
from realm_jax.data.corpus_diff import (
    Changes,
    Deletion,
    Places,
    change_from_json,
    write_changed,
)
from realm_jax.data.document_table import document_rows, read_documents
from realm_jax.data.documents import Document, Record
from realm_jax.data.records import BadRecord, RecordError
from realm_jax.data.versions import link_versions, require_no_other_successor
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.block_parts import Summary
from realm_jax.prepare.blocks import PART_BYTES, BlocksConfig, prepare_blocks
from realm_jax.prepare.documents.files import combined_sha256, find_files
from realm_jax.prepare.documents.lines import LineSource
from realm_jax.prepare.documents.source import DocumentSource, read_all
from realm_jax.prepare.scratch import ALL_CORES, Report, Scratch, Workers
from realm_jax.prepare.taggers import option_of

_CHANGES_AT_ONCE = 1 << 12


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What to change.

    Attributes:
      corpus: the version there is; it stays as it is.
      changes: JSON lines, see `data.corpus_diff`; a file or a pattern of files, plain
        or compressed, local or on gs://.
      output: folder of the new version.
      tagger: of salient spans; "" for the one the corpus was made with. A checkpoint
        must be named, for a corpus does not know where it lies.
      part_bytes: about how much of the changes is one part.
      scratch: where parts lie until all are there, "" for beside the new version.
    """

    corpus: str
    changes: str
    output: str
    tagger: str = ""
    part_bytes: int = PART_BYTES
    scratch: str = ""


class Update(NamedTuple):
    """A new version, and how it came about.

    Attributes:
      store: the new version.
      added: documents that are new.
      replaced: documents that another one replaced.
      deleted: documents that are no more.
      new_blocks: blocks that were made, not copied.
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
    """Makes a new version of a corpus where it is missing.

    Raises:
      BadInputError: there is no corpus, or one that cannot be changed or has another
        successor; the changes are malformed, or delete what there is not; nothing
        would be left; or the folder of the new version is taken.
      StoppedError: asked to stop; blocks that were made stay.
    """
    corpus = BlockStore.open(config.corpus)
    there = _There(config, corpus, read_documents(corpus), _source(config))
    require_no_other_successor(config.corpus, config.output)
    settings = _settings(corpus, there.source)
    made_before = _is_made(config.output, settings)
    if not made_before:
        require_free(Path(config.output))
    # What costs little to check comes before hours of work.
    changes = _read_changes(there.source, config.changes)
    places = changes.find(there.documents)
    _require_known(there, changes, places)
    if not made_before:
        corpus.verify()  # Or new checksums would vouch for what is damaged.
        scratch = Scratch(config.output)
        folder = scratch.folder(f"changes-{settings['source'][:16]}")
        changes = _with_blocks(there, changes, folder, report, stop, workers)
        if not _num_blocks(there, changes, places):
            scratch.clear()
            raise BadInputError(
                f"expected {config.changes} to leave text in {config.corpus}, but not "
                "one block would be left; delete less."
            )
        _write(there, changes, places, settings, report, stop)
        scratch.clear()
    link_versions(config.corpus, config.output)
    return _told(BlockStore.open(config.output), changes, places)


class _There(NamedTuple):
    """What is there before anything is made: see `UpdateConfig`."""

    config: UpdateConfig
    corpus: BlockStore
    documents: np.ndarray
    source: LineSource


def _source(config: UpdateConfig) -> LineSource:
    paths = find_files(config.changes, "JSON lines of changes")
    return LineSource("changes", paths, change_from_json, shard_bytes=config.part_bytes)


def _settings(corpus: BlockStore, source: DocumentSource) -> dict[str, str]:
    """What corpus.json says of how the new version was made."""
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
    """Whether a run that was killed before it linked the versions made this one."""
    if not (Path(output) / INFO_FILE).exists():
        return False
    return settings.items() <= read_info(output).items()


def _read_changes(source: DocumentSource, name: str) -> Changes:
    """Reads all changes once, before hours of work, and keeps a row of each."""
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
    """Reads again what need not be kept unless there is an error to tell."""
    [record] = itertools.islice(read_all(source), change, change + 1)
    return _document(record).source_id


def _require_known(there: _There, changes: Changes, places: Places) -> None:
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
    there: _There,
    changes: Changes,
    folder: str,
    report: Report,
    stop: threading.Event | None,
    workers: Workers,
) -> Changes:
    """Makes the blocks of the new documents, as those of any corpus, in a folder."""
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
    try:
        store = prepare_blocks(blocks, report, stop, workers)
    except EmptyCorpusError:
        return changes  # Documents without text alone.
    rows = np.array(read_documents(store))
    if not np.array_equal(rows["id_hash"], changes.rows["id_hash"]):
        raise BadInputError(
            f"expected {config.changes} to stay as it is while it is read, but it has "
            "changed; run again."
        )
    return dataclasses.replace(changes, rows=rows, store=store)


def _num_blocks(there: _There, changes: Changes, places: Places) -> int:
    """How many blocks the new version will have."""
    gone = there.documents["num_blocks"][places.documents].sum(dtype=np.int64)
    new = changes.rows["num_blocks"].sum(dtype=np.int64)
    return int(there.corpus.num_blocks - gone + new)


def _write(
    there: _There,
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
    """Returns corpus.json but for what the writer counts itself."""
    info = {**corpus.info, **settings, "num_documents": len(documents)}
    if "vocabulary_training" in info:
        info["vocabulary_training"] = None  # It was given: the text is another one.
    if "summary" in info:
        counts = dataclasses.replace(
            Summary.from_json(info["summary"]),
            documents=len(documents),
            without_text=int(np.count_nonzero(documents["num_blocks"] == 0)),
            without_title=int(np.count_nonzero(~documents["has_title"])),
        )
        info["summary"] = counts.to_json()
    return info


def _told(store: BlockStore, changes: Changes, places: Places) -> Update:
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
