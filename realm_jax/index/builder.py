"""The index-builder job: follow the trainer's retrievers and embed every block.

An index is filled shard by shard and committed last, so a builder that is stopped or
killed anywhere leaves what its successor resumes. The trainer's `blocking` mode calls
the same `build_once`.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index import arrays
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    embed_shards,
    query_embedder,
    shard_ranges,
)
from realm_jax.index.heartbeat import (
    Heartbeat,
    JobStatus,
    Listener,
    State,
    read_heartbeat,
)
from realm_jax.index.retrievers import (
    PARAMS_CRC32C,
    RETRIEVER_SERIES,
    TrainedRetriever,
    check_reads,
    load_retriever,
)
from realm_jax.index.reuse import (
    HASHES,
    INDEX_SERIES,
    KnownRows,
    find_known,
    index_series,
)
from realm_jax.index.scann_assets import LowRecallError, ScannAssets, write_assets
from realm_jax.index.snapshot_writer import data_folder
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    ArrayRecord,
    DamagedSnapshotError,
    Manifest,
    SnapshotSeries,
    SnapshotWriter,
)
from realm_jax.storage import MissingObjectError, Store

BUILDER_ROLE = "index_builder"
TRAINER_ROLE = "trainer"
RETRIEVER_CRC32C = "retriever_crc32c"
"""In the metadata of an index: the parameters that embedded it."""

DOCUMENT_CRC32C = "document_crc32c"
"""In the metadata of an index: those of the parameters that embed documents."""

OnProgress = Callable[[int, int], None]
"""(blocks embedded, blocks in all), after every shard."""

# Between two ways to batch the same block. bfloat16 rounds at 2^-8 in every layer, an
# embedding of another block is off by about 1.
_SAMPLE_TOLERANCE = 0.1
# Wordpieces of the queries that ScaNN is judged on.
_QUERY_LENGTH = 32
# A bucket takes about one write a second to an object.
_BEAT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class DivergedRetrieverError(BadInputError):
    """A retriever whose embeddings are not finite numbers."""


@dataclasses.dataclass(frozen=True)
class BuilderConfig:
    """How indexes are built.

    Attributes:
      embed: how blocks are embedded.
      keep: committed snapshots that stay, beside those in use.
      poll_seconds: how often to look for a new retriever.
      patience_seconds: how long to wait without a sign of life from a trainer.
      sampled_blocks: blocks that are read back and embedded again before a commit.
      scann: what is made for trainers that search with ScaNN, None for nothing.
    """

    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    keep: int = 2
    poll_seconds: float = 1.0
    patience_seconds: float = 600.0
    sampled_blocks: int = 16
    scann: ScannAssets | None = None


def build_once(
    retriever: TrainedRetriever,
    blocks: BlockStore,
    store: Store,
    config: BuilderConfig,
    *,
    stop: threading.Event | None = None,
    on_progress: OnProgress | None = None,
    require_wanted: Callable[[], None] = lambda: None,
) -> Manifest | None:
    """Embeds every block and commits the index; returns its manifest.

    Resumes what an interrupted call with the same arguments left, at most one shard of
    work is done again. An index that is already committed is returned as it is.

    Args:
      retriever: embeds the blocks.
      blocks: the corpus.
      store: the model directory.
      config: lengths and sizes.
      stop: when set, the call ends after the shard at work and returns None.
      on_progress: told after every shard.
      require_wanted: raises if the index is not to be committed any more; called just
        before that.

    Raises:
      MismatchedSnapshotError: the retriever cannot read the corpus.
      DivergedRetrieverError: embeddings are not finite.
      DamagedSnapshotError: what was written is not what was computed.
      LowRecallError: ScaNN finds too little; the attempt is deleted.
      AlreadyCommittedError: the step has the index of another retriever.
      BadInputError: the disk is full.
    """
    check_reads(retriever, blocks, config.embed.document_length)
    step, corpus = retriever.step, blocks.fingerprint
    series = index_series(store, corpus)
    metadata = _metadata(retriever, config)
    if step in series.steps():
        manifest = series.read_manifest(step)
        # What was measured stands beside what was asked for.
        found = {name: manifest.metadata.get(name) for name in metadata}
        if (manifest.corpus_fingerprint, found) == (corpus, metadata):
            return manifest
    writer = series.resume(step, corpus_fingerprint=corpus, metadata=metadata)
    if writer is None:
        writer = series.begin(step, corpus_fingerprint=corpus, metadata=metadata)
    made_by = {DOCUMENT_CRC32C: retriever.document_crc32c()}
    same = {name: metadata[name] for name in ("vocabulary_fingerprint", "embed")}
    known = find_known(store, made_by | same, corpus)
    build = _Build(retriever, blocks, series, config, writer, known)
    for done in build.write_shards():
        if on_progress:
            on_progress(done, blocks.num_blocks)
        if stop and stop.is_set() and done < blocks.num_blocks:
            return None
    build.verify_sample()
    if build.num_reused:
        _log.info("step %d: %d blocks as they were", step, build.num_reused)
    measured = build.write_scann_assets()
    require_wanted()
    return writer.commit({**measured, **made_by})


def _metadata(retriever: TrainedRetriever, config: BuilderConfig) -> dict[str, Any]:
    """What must agree for a shard of one attempt to fit another's."""
    metadata = {
        RETRIEVER_CRC32C: retriever.params_crc32c(),
        "retriever": dataclasses.asdict(retriever.config),
        "vocabulary_fingerprint": retriever.vocabulary_fingerprint,
        "embed": dataclasses.asdict(config.embed),
    }
    if config.scann is not None:
        metadata["scann"] = dataclasses.asdict(config.scann)
    return metadata


class _Build:
    """One attempt at one index."""

    def __init__(
        self,
        retriever: TrainedRetriever,
        blocks: BlockStore,
        series: SnapshotSeries,
        config: BuilderConfig,
        writer: SnapshotWriter,
        known: KnownRows | None,
    ):
        self._step = retriever.step
        # Once: an array of the host would be copied again with every batch.
        self._params: PyTree = jax.device_put(retriever.params)
        self._embed = document_embedder(retriever.config)
        self._embed_queries = query_embedder(retriever.config)
        self._blocks = blocks
        self._series = series
        self._config = config
        self._writer = writer
        self._known = known
        shape = (blocks.num_blocks, retriever.config.projection_size)
        self._record = ArrayRecord(shape, "float32")
        self.num_reused = 0

    def write_shards(self) -> Iterator[int]:
        """Writes the shards that are missing, yields the blocks done after each."""
        shard_blocks = self._config.embed.shard_blocks
        self._writer.create_array(
            EMBEDDINGS, self._record.shape, self._record.dtype, shard_blocks
        )
        hashes = self._blocks.content_hashes
        self._writer.create_array(HASHES, hashes.shape, "uint8", shard_blocks)
        completed = set(self._writer.completed_rows(EMBEDDINGS))
        missing = [
            shard
            for shard in shard_ranges(self._blocks.num_blocks, shard_blocks)
            if (shard.start, shard.stop) not in completed
        ]
        done = self._blocks.num_blocks - sum(map(len, missing))
        if done:
            _log.info("step %d: resuming at %d blocks", self._step, done)
            yield done
        for start, embeddings in self._embeddings_of(missing):
            self._check_finite(start, embeddings)
            stop = start + len(embeddings)
            # First, for the shard counts as done with its embeddings.
            self._writer.write_rows(HASHES, start, hashes[start:stop])
            self._writer.write_rows(EMBEDDINGS, start, embeddings)
            done += len(embeddings)
            yield done

    def _embeddings_of(
        self, shards: Sequence[range]
    ) -> Iterator[tuple[int, Float[np.ndarray, "block projection"]]]:
        """Yields first row and embeddings of shards; embeds only what is not known."""
        unknown = []
        for shard in shards:
            rows = self._known_rows(shard)
            if (rows < 0).all():
                unknown.append(shard)
                continue
            assert self._known is not None
            embeddings = np.empty((len(shard), self._record.shape[1]), np.float32)
            embeddings[rows >= 0] = self._known.read(rows[rows >= 0])
            changed = shard.start + np.flatnonzero(rows < 0)
            if len(changed):
                embeddings[rows < 0] = embed_blocks(
                    self._embed,
                    self._params,
                    self._blocks,
                    changed,
                    self._config.embed,
                )
            self.num_reused += int((rows >= 0).sum())
            yield shard.start, embeddings
        yield from embed_shards(
            self._embed, self._params, self._blocks, unknown, self._config.embed
        )

    def _known_rows(self, shard: range) -> Int[np.ndarray, " block"]:
        if self._known is None:
            return np.full(len(shard), -1)
        return self._known.find(self._blocks.content_hashes[shard.start : shard.stop])

    def verify_sample(self) -> None:
        """Reads rows back and compares them with their blocks, embedded anew.

        Raises:
          DamagedSnapshotError: they differ; the attempt is deleted.
        """
        num_sampled = min(self._config.sampled_blocks, self._blocks.num_blocks)
        spread = np.linspace(0, self._blocks.num_blocks - 1, num_sampled)
        block_ids = spread.astype(np.int64)
        expected = embed_blocks(
            self._embed, self._params, self._blocks, block_ids, self._config.embed
        )
        try:
            written = np.concatenate([self._read_row(row) for row in block_ids])
        except ValueError as error:
            raise self._damaged(str(error)) from error
        distance = np.linalg.norm(written - expected, axis=-1)
        wrong = distance > _SAMPLE_TOLERANCE * np.linalg.norm(expected, axis=-1)
        if wrong.any():
            raise self._damaged(f"another embedding of block {block_ids[wrong][0]}")

    def write_scann_assets(self) -> Mapping[str, float]:
        """Has ScaNN trained and judged, if it is wanted; returns what was measured.

        Raises:
          LowRecallError: it finds too little; the attempt is deleted.
        """
        assets = self._config.scann
        if assets is None:
            return {}
        try:
            return write_assets(
                self._writer, self._read_rows(), self._queries(assets), assets
            )
        except LowRecallError:
            self._writer.discard()
            raise

    def _queries(self, assets: ScannAssets) -> Float[np.ndarray, "query projection"]:
        """The beginnings of blocks, as if they were asked for."""
        num_queries = min(assets.num_queries, self._blocks.num_blocks)
        spread = np.linspace(0, self._blocks.num_blocks - 1, num_queries)
        vocabulary = self._blocks.vocabulary
        bodies = self._blocks.body_ids(spread.astype(np.int64), _QUERY_LENGTH - 2)
        ids = np.zeros((num_queries, _QUERY_LENGTH), np.int32)
        ids[:, 0] = vocabulary.cls
        ids[:, 1:-1] = bodies
        ids[np.arange(num_queries), 1 + np.count_nonzero(bodies, axis=1)] = (
            vocabulary.sep
        )
        return np.asarray(self._embed_queries(self._params, ids), np.float32)

    def _read_rows(self) -> Float[np.ndarray, "block projection"]:
        try:
            return self._read(0, self._blocks.num_blocks)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _read_row(self, row: int) -> Float[np.ndarray, "1 projection"]:
        return self._read(row, row + 1)

    def _read(self, start: int, stop: int) -> Float[np.ndarray, "row projection"]:
        name = self._series.name
        attempt = data_folder(name, self._writer.step, self._writer.attempt)
        folder = f"{attempt}/{EMBEDDINGS}"
        return arrays.read_rows(self._series.store, folder, self._record, start, stop)

    def _damaged(self, found: str) -> DamagedSnapshotError:
        self._writer.discard()
        return DamagedSnapshotError(
            f"expected to read the index of step {self._step} back as it was written, "
            f"got {found}; check the disk. The attempt was deleted."
        )

    def _check_finite(self, start: int, embeddings: np.ndarray) -> None:
        finite = np.isfinite(embeddings).all(axis=-1)
        if not finite.all():
            raise DivergedRetrieverError(
                f"expected finite embeddings from the retriever of step {self._step}, "
                f"got nan or inf for block {start + np.argmin(finite)}; training has "
                "diverged: lower the learning rate."
            )


def collect_garbage(store: Store, keep: int) -> None:
    """Deletes old retrievers and indexes of a model directory.

    The newest `keep` of both stay, and the indexes that the trainer's heartbeat names:
    `index_step`, the one it searches, and `kept_index_steps`, those its checkpoints
    resume with.
    """
    trainer = read_heartbeat(store, TRAINER_ROLE)
    said = trainer.extra if trainer else {}
    named = [said.get("index_step"), *said.get("kept_index_steps", ())]
    in_use = [step for step in named if step is not None]
    SnapshotSeries(store, INDEX_SERIES).collect(keep, in_use)
    SnapshotSeries(store, RETRIEVER_SERIES).collect(keep)


class IndexBuilder:
    """The job: builds the index of the newest retriever, again and again.

    Its heartbeat holds the step it is at, `activity` (`waiting` or `embedding`),
    `blocks_done` of `num_blocks`, the `index_step` it committed last, and in `refused`
    what it said of retrievers it did not use.
    """

    def __init__(
        self,
        store: Store,
        blocks: BlockStore,
        config: BuilderConfig,
        on_progress: OnProgress | None = None,
    ):
        """Prepares the job; see `run`.

        Args:
          store: the model directory.
          blocks: the corpus to index.
          config: lengths, sizes and patience.
          on_progress: told after every shard.
        """
        self._store = store
        self._blocks = blocks
        self._config = config
        self._on_progress = on_progress
        self._retrievers = SnapshotSeries(store, RETRIEVER_SERIES)
        self._indexes = index_series(store, blocks.fingerprint)
        self._heartbeat = Heartbeat(store, BUILDER_ROLE, every_seconds=_BEAT_SECONDS)
        self._last_progress_beat = 0.0
        self._step = 0
        self._index_step: int | None = None
        self._refused: dict[int, str] = {}

    def run(self, stop: threading.Event) -> None:
        """Works until the trainer is done and nothing is left, or `stop` is set.

        Stopped, it finishes the shard at work and leaves the rest to be resumed.
        A damaged or diverged retriever is refused once; the next is waited for.

        Raises:
          BadInputError: no retriever of this trainer can be used, or the disk is full.
        """
        try:
            self._follow(stop)
        except BaseException:
            # The error itself matters more than that it could not be announced.
            with contextlib.suppress(Exception):
                self._beat("failed")
            raise
        self._beat("finished")

    def _follow(self, stop: threading.Event) -> None:
        trainer = Listener(self._store, TRAINER_ROLE)
        self._index_step = self._indexes.latest_step()
        while not stop.is_set():
            # Asked before looking for work, so that what the trainer published just
            # before it ended is found.
            trainer_is_done = self._is_done(*trainer.listen())
            step = self._newest_step()
            if step is not None:
                self._build(step, stop)
            elif trainer_is_done:
                return
            else:
                self._wait(stop)

    def _is_done(self, trainer: JobStatus | None, silent_seconds: float) -> bool:
        """Whether no more retrievers will come."""
        if trainer is not None and trainer.state != "running":
            return True
        return silent_seconds > self._config.patience_seconds

    def _wait(self, stop: threading.Event) -> None:
        self._beat("running", activity="waiting")
        stop.wait(self._config.poll_seconds)

    def _newest_step(self) -> int | None:
        """Returns the newest retriever's step if it has no index; skips older ones."""
        published = self._retrievers.steps()
        # A step that was withdrawn may be published anew.
        self._refused = {s: why for s, why in self._refused.items() if s in published}
        if not published or published[-1] in self._refused:
            return None
        newest = published[-1]
        try:
            return None if self._has_index(newest) else newest
        except MissingObjectError:
            return None  # Withdrawn meanwhile; the next look will see what is there.

    def _has_index(self, step: int) -> bool:
        """Whether the retriever of a step has its index; drops that of another one."""
        if step not in self._indexes.steps():
            return False
        try:
            made_by = self._indexes.read_manifest(step).metadata.get(RETRIEVER_CRC32C)
        except DamagedSnapshotError:
            return True  # Named by who reads it; a person is to delete it.
        if made_by == self._retrievers.read_manifest(step).metadata.get(PARAMS_CRC32C):
            return True
        _log.warning("step %d: dropping the index of a retriever that is gone", step)
        self._indexes.forget(step)
        return False

    def _build(self, step: int, stop: threading.Event) -> None:
        self._step = step
        began = time.monotonic()
        try:
            attempt = self._retrievers.read_manifest(step).attempt

            def require_published() -> None:
                if self._retrievers.read_manifest(step).attempt != attempt:
                    raise MissingObjectError(
                        f"expected the retriever of step {step} to stay, it was "
                        "published anew; its index will follow."
                    )

            manifest = build_once(
                load_retriever(self._store, step),
                self._blocks,
                self._store,
                self._config,
                stop=stop,
                on_progress=self._report,
                require_wanted=require_published,
            )
        except MissingObjectError as error:
            # A trainer that resumes from an older checkpoint withdraws later steps.
            _log.warning("step %d was withdrawn: %s", step, error)
            self._wait(stop)
            return
        except (DamagedSnapshotError, DivergedRetrieverError, LowRecallError) as error:
            self._refused[step] = str(error)
            _log.warning("no index for step %d: %s", step, error)
            return
        if manifest is None:
            _log.info("step %d: stopped; the next builder resumes", step)
            return
        self._index_step = step
        seconds = time.monotonic() - began
        _log.info("step %d: %d blocks in %.1f s", step, manifest.count, seconds)
        collect_garbage(self._store, self._config.keep)

    def _report(self, done: int, num_blocks: int) -> None:
        if self._on_progress:
            self._on_progress(done, num_blocks)
        now = time.monotonic()
        if now - self._last_progress_beat >= _BEAT_SECONDS:
            self._last_progress_beat = now
            self._beat("running", activity="embedding", blocks_done=done)

    def _beat(self, state: State, **extra: Any) -> None:
        self._heartbeat.beat(
            self._step,
            state,
            num_blocks=self._blocks.num_blocks,
            index_step=self._index_step,
            refused={str(step): reason for step, reason in self._refused.items()},
            **extra,
        )
