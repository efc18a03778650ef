"""Versioned, checksummed, transactional snapshots, exchanged by trainer and builder.

    <series>/data/<step>-<attempt>/…     written once, by one attempt, never overwritten
    <series>/commits/<step>.json         the manifest, created last and only if absent

A snapshot exists once its commit object does: partial attempts, and what a killed
writer left behind, are never visible. The latest snapshot is the highest commit, so
there is no pointer to update, and none that can be half-updated.
"""

import contextlib
import dataclasses
import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from realm_jax.index.arrays import ArrayLayout, read_rows
from realm_jax.index.manifest import (
    ArrayRecord,
    DamagedSnapshotError,
    Expectation,
    Manifest,
    MissingAttemptError,
    parse_manifest,
)
from realm_jax.index.snapshot_writer import (
    ATTEMPT_FILE,
    PROGRESS_FOLDER,
    SnapshotWriter,
    already_committed,
    commit_name,
    data_folder,
    read_header,
    withdraw,
    write_header,
)
from realm_jax.manifests import FileRecord, find_damage
from realm_jax.storage import MissingObjectError, Store

ATTEMPT_AGE_SECONDS = 3600.0
"""Time after which an unfinished attempt that gets no further is given up."""

RETRIEVER_SERIES = "retriever"
"""Series that the trainer writes and the builder reads."""

INDEX_SERIES = "index"
"""Series that the builder writes and the trainer reads."""


class SnapshotSeries:
    """The snapshots of one kind, such as `INDEX_SERIES`, in a model directory."""

    def __init__(self, store: Store, name: str):
        self.store = store
        self.name = name

    def begin(
        self,
        step: int,
        *,
        corpus_fingerprint: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> SnapshotWriter:
        """Starts an attempt at a step; AlreadyCommittedError if it has a snapshot.

        The metadata is plain JSON that readers get back in the manifest.
        """
        return self._begin(step, corpus_fingerprint, dict(metadata or {}), time.time())

    def _begin(
        self, step: int, corpus_fingerprint: str, metadata: dict[str, Any], began: float
    ) -> SnapshotWriter:
        if self.store.exists(commit_name(self.name, step)):
            raise already_committed(self.store, self.name, step)
        attempt = uuid.uuid4().hex[:12]
        header = {
            "corpus_fingerprint": corpus_fingerprint,
            "metadata": metadata,
            "began": began,
        }
        write_header(self.store, self._folder(step, attempt), header)
        return self.join(step, attempt)

    def join(self, step: int, attempt: str) -> SnapshotWriter:
        """Returns a writer for an attempt begun elsewhere, such as on host 0 of a pod.

        A MissingAttemptError says that it was deleted, or that its header is damaged.
        """
        header = read_header(self.store, self._folder(step, attempt))
        return SnapshotWriter(
            self.store, self.name, step=step, attempt=attempt, header=header
        )

    def resume(
        self,
        step: int,
        *,
        corpus_fingerprint: str,
        metadata: Mapping[str, Any] | None = None,
        layouts: Mapping[str, ArrayLayout] | None = None,
        attempt_age_seconds: float = ATTEMPT_AGE_SECONDS,
    ) -> SnapshotWriter | None:
        """Starts an attempt with the finished rows of an unfinished one.

        Of the attempts with the same settings, the one with the most finished pieces is
        used. It is copied, not continued, because its writer may be alive: the arrays
        in `layouts`, where they are stored alike. None if there is no such attempt, or
        if the step is committed. `SnapshotWriter.completed_rows` then returns what need
        not be written again. Other attempts at the step are deleted as by `collect`.
        """
        if self.store.exists(commit_name(self.name, step)):
            return None
        wanted = json.loads(json.dumps(dict(metadata or {})))
        writers = []
        names = self.store.list(f"{self.name}/data")
        for found_step, attempt in self._attempts(names):
            if found_step != step:
                continue
            with contextlib.suppress(MissingAttemptError):
                writers.append(self.join(step, attempt))
        fitting = [
            writer
            for writer in writers
            if writer.corpus_fingerprint == corpus_fingerprint
            and writer.metadata == wanted
        ]
        best = max(fitting, key=lambda w: (w.num_notes(), w.began), default=None)
        if best is None:
            return None
        writer = self._begin(step, corpus_fingerprint, wanted, best.began)
        writer.take_over(best, layouts or {})
        for found in writers:
            # Each start of a builder that is preempted again and again leaves a copy.
            if self._idle_seconds(step, found.attempt) >= attempt_age_seconds:
                self._remove(step, found.attempt)
        return writer

    def steps(self) -> list[int]:
        """Returns the steps with a committed snapshot, lowest first."""
        pattern = re.compile(rf"{re.escape(self.name)}/commits/(\d+)\.json")
        names = self.store.list(f"{self.name}/commits")
        return sorted(int(m.group(1)) for m in map(pattern.fullmatch, names) if m)

    def url_of(self, step: int) -> str:
        """Returns the place of the manifest of a step, for messages."""
        return self.store.url(commit_name(self.name, step))

    def latest_step(self) -> int | None:
        """Returns the highest committed step, None before the first commit."""
        return max(self.steps(), default=None)

    def latest(self) -> Manifest | None:
        """Returns the newest snapshot's manifest, None before the first commit."""
        step = self.latest_step()
        return None if step is None else self.read_manifest(step)

    def read_manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step.

        Raises:
          MissingObjectError: the step has no snapshot (any more).
          DamagedSnapshotError: the manifest differs from what was committed.
        """
        name = commit_name(self.name, step)
        manifest = parse_manifest(self.store.read(name), self.url_of(step))
        if manifest.step != step:
            raise DamagedSnapshotError(
                f"expected the manifest of step {step} in {self.url_of(step)}, got "
                f"that of step {manifest.step}; delete it."
            )
        return manifest

    def verify(self, manifest: Manifest, expect: Expectation | None = None) -> None:
        """Checks that a snapshot is undamaged and has the required properties.

        In a local folder it reads every byte; a bucket provides its own checksums.

        Raises:
          MismatchedSnapshotError: it does not have the required properties.
          DamagedSnapshotError: a file is missing or was changed; names it.
        """
        if expect is not None:
            expect.check(manifest)
        folder = self._folder(manifest.step, manifest.attempt)
        stats = self.store.stats(folder)
        damage = find_damage(manifest.files, lambda n: stats.get(f"{folder}/{n}"))
        if damage is not None:
            raise self._damaged(manifest, damage)

    def read_file(self, manifest: Manifest, name: str) -> bytes:
        """Returns the contents of a file of a snapshot, after checking them."""
        record = manifest.files.get(name)
        if record is None:
            raise self._damaged(manifest, f"{name} is not in its manifest")
        folder = self._folder(manifest.step, manifest.attempt)
        try:
            data = self.store.read(f"{folder}/{name}")
        except MissingObjectError as error:
            raise self._damaged(manifest, f"{name} is missing") from error
        damage = find_damage({name: record}, lambda _: FileRecord.of(data))
        if damage is not None:
            raise self._damaged(manifest, damage)
        return data

    def read_array(
        self, manifest: Manifest, name: str, rows: slice = slice(None)
    ) -> np.ndarray:
        """Returns rows, a slice of step 1; every chunk that is read is checked.

        Raises:
          DamagedSnapshotError: a chunk is missing or was changed.
        """
        record = self._array_record(manifest, name)
        start, stop, _ = rows.indices(record.shape[0])
        folder = f"{self._folder(manifest.step, manifest.attempt)}/{name}"
        try:
            return read_rows(self.store, folder, record, start, max(start, stop))
        except ValueError as error:
            problem = f"{name} cannot be read ({error})"
            raise self._damaged(manifest, problem) from error

    def array(self, manifest: Manifest, name: str) -> "SnapshotArray":
        """Returns an array of a snapshot whose rows are read on access."""
        shape = self._array_record(manifest, name).shape
        return SnapshotArray(self, manifest, name, shape)

    def forget_after(self, step: int) -> None:
        """Withdraws the snapshots of later steps, highest first.

        A run resumed from an older checkpoint runs those steps again. The data remains
        until `collect` finds it without a commit.
        """
        for later in reversed([found for found in self.steps() if found > step]):
            self.forget(later)

    def forget(self, step: int) -> None:
        """Withdraws the snapshot of a step; see `forget_after`."""
        self.store.delete(commit_name(self.name, step))

    def withdraw_damaged(self, step: int) -> bool:
        """Withdraws the snapshot of a step if its manifest is damaged; returns whether.

        Its data remains, for an attempt with the same settings to resume.
        """
        try:
            self.read_manifest(step)
        except DamagedSnapshotError:
            self.forget(step)
            return True
        except MissingObjectError:
            pass
        return False

    def collect(
        self,
        keep: int,
        in_use: Collection[int] = (),
        attempt_age_seconds: float = ATTEMPT_AGE_SECONDS,
    ) -> list[str]:
        """Deletes old snapshots, abandoned attempts, and attempts that lost their race.

        The newest `keep` stay, and those `in_use`. An uncommitted attempt stays until
        it is as old as `attempt_age_seconds` and no rows were written to it for so
        long, because its writer may only be slow. Returns the folders that were
        deleted.
        """
        committed = self.steps()
        newest = committed[max(0, len(committed) - keep) :]
        retired = [s for s in committed if s not in newest and s not in in_use]
        manifests = self._manifests(committed)
        for step in retired:
            # The commit is deleted first: no reader may find one without its data.
            self.store.delete(commit_name(self.name, step))
        live = {
            self._folder(step, manifest.attempt): manifest
            for step, manifest in self._manifests(self.steps()).items()
        }
        names = self.store.list(f"{self.name}/data")
        for folder, manifest in live.items():
            # Its writer was stopped before the commit while another collected the
            # attempt, and killed right after it.
            if not {f"{folder}/{file}" for file in manifest.files} <= set(names):
                withdraw(self.store, self.name, manifest)
        removed = []
        for step, attempt in self._attempts(names):
            folder = self._folder(step, attempt)
            if folder in live:
                continue
            is_idle = self._idle_seconds(step, attempt) >= attempt_age_seconds
            is_over = is_idle or self._is_settled(step, attempt, manifests.get(step))
            if is_over and self._remove(step, attempt):
                removed.append(self.store.url(folder))
        return removed

    def _remove(self, step: int, attempt: str) -> bool:
        """Deletes an attempt, unless it has been committed; returns whether it did."""
        folder = self._folder(step, attempt)
        # Without its header, a half-deleted attempt cannot be resumed.
        self.store.delete(f"{folder}/{ATTEMPT_FILE}")
        # Looked for after that, see `SnapshotWriter.commit`.
        since = self._manifests([step]).get(step)
        if since is not None and since.attempt == attempt:
            return False
        self.store.delete_folder(folder)
        return True

    def _folder(self, step: int, attempt: str) -> str:
        return data_folder(self.name, step, attempt)

    def _attempts(self, names: Iterable[str]) -> list[tuple[int, str]]:
        pattern = re.compile(rf"{re.escape(self.name)}/data/(\d+)-([0-9a-f]+)/.+")
        matches = filter(None, map(pattern.fullmatch, names))
        return sorted({(int(m.group(1)), m.group(2)) for m in matches})

    def _manifests(self, steps: Iterable[int]) -> dict[int, Manifest]:
        manifests = {}
        for step in steps:
            # An unreadable manifest protects nothing: its snapshot is lost.
            with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
                manifests[step] = self.read_manifest(step)
        return manifests

    def _is_settled(self, step: int, attempt: str, manifest: Manifest | None) -> bool:
        """Returns whether an attempt was committed, or another one was instead."""
        if manifest is None:
            return False
        if manifest.attempt == attempt:
            return True
        try:
            # A later one may be for a step that has been withdrawn since.
            return self.join(step, attempt).began <= manifest.committed
        except MissingAttemptError:
            return True

    def _idle_seconds(self, step: int, attempt: str) -> float:
        # Each write of rows ends with a note there; listing the notes is cheap.
        notes = self.store.stats(f"{self._folder(step, attempt)}/{PROGRESS_FOLDER}")
        times = [stat.modified for stat in notes.values()]
        with contextlib.suppress(MissingAttemptError):
            # Its first rows may take long.
            times.append(self.join(step, attempt).began)
        return time.time() - max(times, default=0.0)

    def _array_record(self, manifest: Manifest, name: str) -> ArrayRecord:
        if name not in manifest.arrays:
            raise self._damaged(manifest, f"{name} is not in its manifest")
        return manifest.arrays[name]

    def _damaged(self, manifest: Manifest, problem: str) -> DamagedSnapshotError:
        url = self.store.url(self._folder(manifest.step, manifest.attempt))
        return DamagedSnapshotError(
            f"expected the snapshot of step {manifest.step} as it was committed, but "
            f"{url}/{problem}; delete {self.url_of(manifest.step)} and the snapshot "
            "will be made anew."
        )


@dataclasses.dataclass(frozen=True)
class SnapshotArray:
    """An array of a snapshot that is read on access; a slice of it is a NumPy array."""

    series: SnapshotSeries
    manifest: Manifest
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.series.read_array(self.manifest, self.name, rows)
