"""Writes one attempt at a snapshot: files and arrays first, the commit last."""

import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore

from realm_jax.errors import BadInputError
from realm_jax.index import arrays
from realm_jax.index.manifest import (
    AlreadyCommittedError,
    ArrayRecord,
    DamagedSnapshotError,
    Manifest,
    MissingAttemptError,
    parse_manifest,
)
from realm_jax.manifests import FileRecord, file_records, require_fields, seal, unseal
from realm_jax.storage import (
    AlreadyExistsError,
    MissingObjectError,
    Store,
    UnavailableStoreError,
)

PROGRESS_FOLDER = "progress"
"""Folder of notes for later writers, which is not part of the snapshot."""

ATTEMPT_FILE = f"{PROGRESS_FOLDER}/attempt.json"
"""Header of an attempt: the settings that a resuming writer must have too."""

_HEADER = {"corpus_fingerprint": str, "metadata": dict, "began": int | float}
_ROWS = re.compile(r"([0-9]+)-([0-9]+)")


class SnapshotWriter:
    """Writes one attempt, of which readers see nothing until `commit`.

    Several hosts of one job may write to one attempt; one of them commits when all are
    done. Another job must never do so: continuing to write to an attempt that is
    committed would damage it. `began` is the start of the attempt, in Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        series: str,
        *,
        step: int,
        attempt: str,
        header: Mapping[str, Any],
    ):
        """Called by `SnapshotSeries`; `header` is the content of `attempt.json`."""
        self.step = step
        self.attempt = attempt
        self.corpus_fingerprint: str = header["corpus_fingerprint"]
        self.metadata: dict[str, Any] = header["metadata"]
        self.began: float = header["began"]
        self._store = store
        self._series = series
        self._folder = data_folder(series, step, attempt)
        self._written: dict[str, FileRecord] = {}
        self._arrays: dict[str, tuple[ArrayRecord, tensorstore.TensorStore]] = {}

    def write_file(self, name: str, data: bytes) -> None:
        """Writes a file of the snapshot."""
        self._store.write(f"{self._folder}/{name}", data)
        self._written[name] = FileRecord.of(data)

    def create_array(
        self, name: str, shape: tuple[int, ...], dtype: str, chunk_rows: int
    ) -> None:
        """Creates an array, or opens one of another host or of `take_over`.

        The arguments are those of an `ArrayLayout`.
        """
        record = ArrayRecord(tuple(shape), dtype)
        folder = f"{self._folder}/{name}"
        array = arrays.create_array(self._store, folder, record, chunk_rows)
        self._arrays[name] = record, array

    def write_rows(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows of an array durably, and then a note that they are complete.

        Rows fill whole files, so that each file is written once, by one host, and two
        writers never modify the same file: `start` is a multiple of the array's
        `chunk_rows`, and so is their number unless the array ends there.
        """
        record, array = self._arrays[name]
        stop = start + len(rows)
        chunk_rows = arrays.rows_per_chunk(array)
        fits = (
            rows.shape[1:] == record.shape[1:]
            and rows.dtype == record.dtype
            and _are_whole_chunks(start, stop, record.shape[0], chunk_rows)
        )
        if not fits:
            raise BadInputError(
                f"expected whole chunks of {chunk_rows} rows for {name!r}, "
                f"{record.dtype}{list(record.shape)}, got {rows.dtype}"
                f"{list(rows.shape)} at row {start}; check the shards and the model."
            )
        arrays.write_rows(self._store, f"{self._folder}/{name}", array, start, rows)
        self._store.write(f"{self._progress(name)}/{start}-{stop}", b"done\n")

    def completed_rows(self, name: str) -> list[tuple[int, int]]:
        """Returns the ranges [start, stop) that any writer completed, in order."""
        prefix = f"{self._progress(name)}/"
        notes = (n.removeprefix(prefix) for n in self._store.list(prefix.rstrip("/")))
        # Something else may have left files of other names there.
        matches = filter(None, map(_ROWS.fullmatch, notes))
        return sorted((int(m.group(1)), int(m.group(2))) for m in matches)

    def num_notes(self) -> int:
        """Returns the number of completed pieces of the attempt."""
        return len(self._store.list(f"{self._folder}/{PROGRESS_FOLDER}"))

    def take_over(
        self, other: "SnapshotWriter", layouts: Mapping[str, arrays.ArrayLayout]
    ) -> None:
        """Copies the rows of these arrays that an unfinished attempt has completed.

        Its writer may be alive, or collection may be deleting it, or its files may be
        damaged: rows that cannot be read are skipped, to be written again, and so are
        those of an array with other metadata than it would be created with here.
        """
        for name, layout in layouts.items():
            self.create_array(name, *layout)
            folder, record = f"{other._folder}/{name}", self._arrays[name][0]
            try:
                if not arrays.same_metadata(
                    self._store, f"{self._folder}/{name}", folder
                ):
                    continue
            except UnavailableStoreError:
                continue
            for start, stop in other.completed_rows(name):
                if not _are_whole_chunks(
                    start, stop, record.shape[0], layout.chunk_rows
                ):
                    continue
                try:
                    rows = arrays.read_rows(self._store, folder, record, start, stop)
                except (ValueError, UnavailableStoreError):
                    continue
                self.write_rows(name, start, rows)

    def commit(self, measured: Mapping[str, Any] | None = None) -> Manifest:
        """Makes the snapshot visible, atomically; `measured` is added to its metadata.

        Raises:
          BadInputError: an array has rows that were not written.
          DamagedSnapshotError: a file is missing or differs from what was written.
          MissingAttemptError: the attempt was deleted, such as by collection.
          AlreadyCommittedError: another attempt was committed first.
        """
        name = commit_name(self._series, self.step)
        if self._store.exists(name):
            # Checked first: collection may have deleted files of an attempt that lost.
            raise already_committed(self._store, self._series, self.step)
        for array, (record, _) in self._arrays.items():
            self._require_complete(array, record.shape[0])
        # TensorStore syncs its files, but not the names of the folders it makes.
        self._store.sync(self._folder)
        files = self._files()
        # What deletes an attempt begins with its header, and may not be done yet.
        self.require_present()
        now = time.time()
        manifest = Manifest(
            step=self.step,
            attempt=self.attempt,
            corpus_fingerprint=self.corpus_fingerprint,
            files=files,
            arrays={array: record for array, (record, _) in self._arrays.items()},
            committed=now,
            build_seconds=max(0.0, now - self.began),
            metadata={**self.metadata, **(measured or {})},
        )
        try:
            self._store.create(name, manifest.to_bytes())
        except AlreadyExistsError as error:
            raise already_committed(self._store, self._series, self.step) from error
        try:
            # Collection deletes the header and then looks for a commit, so at least one
            # of the two sees what the other has done.
            self.require_present()
        except MissingAttemptError:
            withdraw(self._store, self._series, manifest)
            raise
        return manifest

    def discard(self) -> None:
        """Deletes the attempt, such as one with wrong contents."""
        # Without its header, a half-deleted attempt cannot be resumed.
        self._store.delete(f"{self._folder}/{ATTEMPT_FILE}")
        self._store.delete_folder(self._folder)

    def require_present(self) -> None:
        """Raises MissingAttemptError if somebody has deleted the attempt.

        A builder that slept for long may find that another one's collection took its
        attempt for abandoned.
        """
        if not self._store.exists(f"{self._folder}/{ATTEMPT_FILE}"):
            raise MissingAttemptError(
                f"expected the attempt {self._store.url(self._folder)} to stay while "
                "it is written, but it was deleted; begin it anew."
            )

    def _progress(self, array: str) -> str:
        return f"{self._folder}/{PROGRESS_FOLDER}/{array}"

    def _require_complete(self, name: str, count: int) -> None:
        covered = 0
        for start, stop in self.completed_rows(name):
            if start > covered:
                break
            covered = max(covered, stop)
        if covered < count:
            self.require_present()
            raise BadInputError(
                f"expected all {count:,} rows of {name!r} before the commit of step "
                f"{self.step}, row {covered:,} is missing; resume the attempt."
            )

    def _files(self) -> dict[str, FileRecord]:
        records = file_records(self._store.stats(self._folder))
        files = {n.removeprefix(f"{self._folder}/"): r for n, r in records.items()}
        for name, (record, array) in self._arrays.items():
            num_chunks = -(-record.shape[0] // arrays.rows_per_chunk(array))
            found = sum(file.startswith(f"{name}/c/") for file in files)
            if found != num_chunks:
                raise self._damaged(name, f"{found} of its {num_chunks} chunks")
        for name, record in self._written.items():
            if files.get(name) != record:
                raise self._damaged(name, f"{files.get(name)}")
        return {
            name: record
            for name, record in files.items()
            if not name.startswith(f"{PROGRESS_FOLDER}/")
        }

    def _damaged(self, name: str, found: str) -> DamagedSnapshotError:
        self.require_present()
        return DamagedSnapshotError(
            f"expected {self._store.url(f'{self._folder}/{name}')} as it was written, "
            f"got {found}; check the disk and run again."
        )


def write_header(store: Store, folder: str, header: Mapping[str, Any]) -> None:
    """Begins an attempt in a folder of its own."""
    store.create(f"{folder}/{ATTEMPT_FILE}", seal(header))


def read_header(store: Store, folder: str) -> dict[str, Any]:
    """Returns the header of an attempt; a `MissingAttemptError` if there is none."""
    name = f"{folder}/{ATTEMPT_FILE}"
    try:
        data = store.read(name)
    except MissingObjectError as error:
        raise MissingAttemptError(str(error)) from error
    try:
        # Those of earlier releases carry no checksum.
        header = unseal(data, required=False)
        require_fields(header, _HEADER)
        if others := header.keys() - _HEADER.keys():
            # Perhaps the name of a checksum, which then compares nothing.
            raise ValueError(f"it has {sorted(others)}")
        return header
    except ValueError as error:
        raise MissingAttemptError(
            f"expected the header of an attempt in {store.url(name)}, got something "
            f"else ({error}); the attempt will be begun anew."
        ) from error


def _are_whole_chunks(start: int, stop: int, count: int, chunk_rows: int) -> bool:
    """Returns whether rows [start, stop) of `count` are whole chunks."""
    return (
        0 <= start <= stop <= count
        and start % chunk_rows == 0
        and (stop % chunk_rows == 0 or stop == count)
    )


def data_folder(series: str, step: int, attempt: str) -> str:
    """Returns the folder of an attempt."""
    return f"{series}/data/{step}-{attempt}"


def commit_name(series: str, step: int) -> str:
    """Returns the name of the commit object of a step."""
    return f"{series}/commits/{step}.json"


def withdraw(store: Store, series: str, manifest: Manifest) -> None:
    """Deletes the commit of a snapshot, unless another attempt is committed there."""
    name = commit_name(series, manifest.step)
    with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
        if parse_manifest(store.read(name), name).attempt == manifest.attempt:
            store.delete(name)


def already_committed(store: Store, series: str, step: int) -> AlreadyCommittedError:
    """Returns the error for a second snapshot of one step."""
    return AlreadyCommittedError(
        f"expected no snapshot at {store.url(commit_name(series, step))}, but step "
        f"{step} is committed; use it, or stop the second writer."
    )
