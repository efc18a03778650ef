"""Implements the index-builder job, which embeds every block for newer retrievers.

An index is written shard by shard and committed last, so the successor of a builder
that is stopped or killed at any time can resume its attempt. The trainer's `blocking`
mode calls the same `build_once`.

Several processes work as one job: the first decides and commits, each embeds its own
shards, and they synchronise when all are done.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from realm_jax import multihost, ranges
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import NotReadyError
from realm_jax.extras import require_extra
from realm_jax.index.arrays import ArrayLayout
from realm_jax.index.build import (
    DivergedRetrieverError,
    IndexBuild,
    index_layouts,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C, find_known, index_series
from realm_jax.index.heartbeat import (
    DamagedHeartbeatError,
    Heartbeat,
    JobStatus,
    Listener,
    State,
    read_heartbeat,
)
from realm_jax.index.manifest import (
    AlreadyCommittedError,
    DamagedSnapshotError,
    Manifest,
    MissingAttemptError,
)
from realm_jax.index.retrievers import (
    PARAMS_CRC32C,
    TrainedRetriever,
    check_reads,
    load_retriever,
)
from realm_jax.index.scann_assets import ScannAssets
from realm_jax.index.scann_searcher import LowRecallError
from realm_jax.index.searchers import SCANN_PURPOSE
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import MissingObjectError, Store

BUILDER_ROLE = "index_builder"
TRAINER_ROLE = "trainer"
RETRIEVER_CRC32C = "retriever_crc32c"
"""Key in an index's metadata: checksum of the parameters that embedded it."""

OnProgress = Callable[[int, int], None]
"""Called after every shard with (number of embedded blocks, number of all blocks)."""

# A bucket accepts about one write per second to an object.
_BEAT_SECONDS = 1.0
# Training ScaNN, compiling and copying rows take minutes without a beat of their own.
_REPEAT_SECONDS = 10.0
# Name of the notes that processes exchange: (attempt, number of embedded blocks).
_EMBEDDED = "blocks_embedded"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BuilderConfig:
    """Configuration of index building.

    Attributes:
      embed: configuration of the embedding.
      keep: number of committed snapshots that are kept, in addition to those in use.
      poll_seconds: interval of checks for a new retriever, in seconds.
      patience_seconds: seconds without a heartbeat after which a trainer that was
        heard of is taken to be gone.
      wait_seconds: how long a trainer that was not heard of is waited for, in seconds;
        it may not be there yet.
      sampled_blocks: blocks that are read back and embedded again before a commit.
      scann: configuration of ScaNN for trainers that search with it, None for none.
    """

    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    keep: int = 2
    poll_seconds: float = 1.0
    patience_seconds: float = 600.0
    wait_seconds: float = 3600.0
    sampled_blocks: int = 16
    scann: ScannAssets | None = None

    def __post_init__(self):
        ranges.require_ranges(
            self,
            keep=ranges.whole(1),
            poll_seconds=ranges.POSITIVE,
            patience_seconds=ranges.POSITIVE,
            wait_seconds=ranges.NOT_NEGATIVE,
            sampled_blocks=ranges.whole(1),
        )


def build_once(
    retriever: TrainedRetriever,
    blocks: BlockStore,
    store: Store,
    config: BuilderConfig,
    *,
    stop: threading.Event | None = None,
    on_progress: OnProgress | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
    require_wanted: Callable[[], None] = lambda: None,
) -> Manifest | None:
    """Embeds every block and commits the index; returns its manifest.

    Rows of an index by the same document encoder, in this model directory or in one of
    the retriever's `donors`, are copied. The attempt of an interrupted call with the
    same arguments is resumed, and at most one shard is embedded again; one that
    collection deletes during the call is begun anew. The manifest of an index that is
    already committed is returned, also if another builder commits it during the call.

    Args:
      store: the model directory.
      stop: when set, the call ends after the current shard and returns None.
      is_superseded: returns whether no job will search this index; called after every
        shard, it ends the call in the same way as `stop`.
      require_wanted: raises an error if the index must not be committed any more;
        called just before the commit.

    Raises:
      MismatchedSnapshotError: the retriever does not fit the corpus.
      DivergedRetrieverError: embeddings are not finite.
      DamagedSnapshotError: the written rows differ from the computed ones.
      LowRecallError: ScaNN's recall is too low; the attempt is deleted.
      AlreadyCommittedError: the step has the index of another retriever.
    """
    check_reads(retriever, blocks, config.embed.document_length)
    step, corpus = retriever.step, blocks.fingerprint
    name = multihost.run_on_primary(lambda: index_series(store, corpus).name)
    series = SnapshotSeries(store, name)
    metadata = index_metadata(retriever, config)
    made_by = {DOCUMENT_CRC32C: retriever.document_crc32c()}
    known = find_known(store, retriever.donors, metadata | made_by, corpus)

    def write(attempt: str) -> bool:
        """Writes and commits an attempt; returns False if it is to be resumed."""
        writer = multihost.run_on_all(lambda: series.join(step, attempt))
        build = IndexBuild(
            retriever, blocks, series, writer, embed=config.embed, known=known
        )

        def write_shards() -> bool:
            """Returns whether this process has written all its shards."""
            for done in build.write_shards():
                multihost.post(_EMBEDDED, (attempt, done))
                if on_progress:
                    on_progress(_embedded(attempt, done), blocks.num_blocks)
                ends = (stop is not None and stop.is_set()) or is_superseded()
                if ends and done < build.num_own:
                    return False
            return True

        if not all(multihost.gather(multihost.run_on_all(write_shards))):
            return False

        def verify_and_commit() -> None:
            try:
                build.verify_sample(config.sampled_blocks)
                assets = config.scann
                measured = build.write_scann_assets(assets) if assets else {}
                require_wanted()
                writer.commit({**measured, **made_by})
            except (AlreadyCommittedError, DamagedSnapshotError):
                # Another builder may have committed first.
                if not _is_committed(series, step, corpus, metadata):
                    raise
                _log.info("step %d: another builder was first", step)

        multihost.run_on_primary(verify_and_commit)
        if known is not None and build.num_reused:
            _log.info(
                "step %d: %d of %d blocks copied from %s",
                step,
                build.num_reused,
                build.num_own,
                known.url,
            )
        return True

    def begin() -> str | None:
        layouts = index_layouts(blocks, retriever.config, config.embed)
        return _begin(series, step, corpus, metadata, layouts)

    while (attempt := multihost.run_on_primary(begin)) is not None:
        try:
            return series.read_manifest(step) if write(attempt) else None
        except MissingAttemptError as error:
            # Garbage collection of another builder, which has committed first, or has
            # taken this one for dead while it slept.
            _log.warning("step %d: %s", step, error)
    return series.read_manifest(step)


def _begin(
    series: SnapshotSeries,
    step: int,
    corpus: str,
    metadata: dict[str, Any],
    layouts: Mapping[str, ArrayLayout],
) -> str | None:
    """Begins or resumes an attempt, and returns it; None if the index is committed."""
    if _is_committed(series, step, corpus, metadata):
        return None
    writer = series.resume(
        step, corpus_fingerprint=corpus, metadata=metadata, layouts=layouts
    )
    if writer is None:
        writer = series.begin(step, corpus_fingerprint=corpus, metadata=metadata)
    return writer.attempt


def _is_committed(
    series: SnapshotSeries, step: int, corpus: str, metadata: Mapping[str, Any]
) -> bool:
    if step not in series.steps():
        return False
    manifest = series.read_manifest(step)
    # The manifest also holds metrics, which are not compared.
    found = {name: manifest.metadata.get(name) for name in metadata}
    return (manifest.corpus_fingerprint, found) == (corpus, metadata)


def _embedded(attempt: str, done: int) -> int:
    """Returns the number of embedded blocks of all processes, in the first process."""
    others = dict(multihost.posted(_EMBEDDED))
    others.pop(multihost.number(), None)
    return done + sum(count for name, count in others.values() if name == attempt)


def index_metadata(
    retriever: TrainedRetriever, config: BuilderConfig
) -> dict[str, Any]:
    """Returns the metadata that must agree for shards to belong to one index."""
    metadata = {
        RETRIEVER_CRC32C: retriever.params_crc32c(),
        "retriever": retriever.config.recorded(),
        "vocabulary_fingerprint": retriever.vocabulary_fingerprint,
        "embed": dataclasses.asdict(config.embed),
    }
    if config.scann is not None:
        metadata["scann"] = dataclasses.asdict(config.scann)
    return metadata


def collect_garbage(store: Store, keep: int) -> None:
    """Deletes old retrievers and indexes of a model directory.

    The newest `keep` of both are kept, and the indexes that the trainer's heartbeat
    names: `index_step`, the one it searches, and `kept_index_steps`, those needed to
    resume from its checkpoints. Nothing is deleted while the heartbeat cannot be read.
    """
    try:
        trainer = read_heartbeat(store, TRAINER_ROLE)
        said = trainer.extra if trainer else {}
        named = [said.get("index_step"), *said.get("kept_index_steps", ())]
    except (DamagedHeartbeatError, TypeError) as error:
        _log.warning("nothing is deleted: %s", error)
        return
    in_use = [step for step in named if step is not None]
    SnapshotSeries(store, INDEX_SERIES).collect(keep, in_use)
    SnapshotSeries(store, RETRIEVER_SERIES).collect(keep)


class IndexBuilder:
    """The job, which repeatedly builds the index of the newest retriever.

    Its heartbeat contains the step of the retriever it embeds, `activity` (`waiting` or
    `embedding`), `blocks_done` of `num_blocks`, the `index_step` it committed last, and
    in `refused` the reasons for retrievers it did not use.
    """

    def __init__(
        self,
        store: Store,
        blocks: BlockStore,
        config: BuilderConfig,
        on_progress: OnProgress | None = None,
    ):
        if config.scann is not None:
            # Later a missing ScaNN would be taken for a fault of the retriever.
            require_extra("scann", SCANN_PURPOSE)
        self._store = store
        self._blocks = blocks
        self._config = config
        self._on_progress = on_progress
        self._retrievers = SnapshotSeries(store, RETRIEVER_SERIES)
        self._indexes = index_series(store, blocks.fingerprint)
        self._trainer = Listener(store, TRAINER_ROLE)
        self._heartbeat = Heartbeat(store, BUILDER_ROLE, every_seconds=_BEAT_SECONDS)
        self._last_progress_beat = 0.0
        # When the trainer was first heard of, by `time.monotonic`.
        self._heard: float | None = None
        self._step = 0
        self._index_step: int | None = None
        self._refused: dict[int, str] = {}

    def run(self, stop: threading.Event) -> bool:
        """Builds indexes until `stop`; returns whether the trainer has finished first.

        When stopped, it finishes the current shard and leaves the rest to be resumed. A
        damaged or diverged retriever is refused once, and the next one is awaited. A
        trainer that failed or fell silent may be started again and need a builder then,
        so this job must be started again, too.

        Raises:
          NotReadyError: no trainer has been heard of within `wait_seconds`; or it has
            failed, or has been silent for `patience_seconds`, and no retriever is left.
        """
        try:
            with self._heartbeat.repeated(_REPEAT_SECONDS):
                has_finished = self._follow(stop)
        except BaseException:
            # The original error takes precedence over a failed heartbeat.
            with contextlib.suppress(Exception):
                self._beat("failed")
            raise
        self._beat("finished")
        return has_finished

    def _follow(self, stop: threading.Event) -> bool:
        self._index_step = self._indexes.latest_step()

        def look() -> tuple[str, int | None]:
            # Read the trainer's heartbeat first, so that a retriever published just
            # before its end is found.
            return self._trainer_end(*self._trainer.listen()), self._newest_step()

        def is_indexed() -> bool:
            return bool(self._retrievers.steps()) and self._newest_step() is None

        if multihost.run_on_primary(is_indexed):
            # A builder killed after its last commit has left this to its successor.
            self._collect_garbage()
        asked_to_stop = multihost.StopRequest(stop)
        while not asked_to_stop.is_set():
            trainer_end, step = multihost.run_on_primary(look)
            if step is not None:
                self._build(step, stop)
            elif trainer_end == "finished":
                return True
            elif trainer_end:
                raise NotReadyError(
                    f"expected the trainer in {self._store.url()} to finish, but it "
                    f"{trainer_end}; start it, and run this command again, unless it "
                    "had finished before"
                )
            else:
                self._wait(stop)
        return False

    def _trainer_end(self, trainer: JobStatus | None, silent_seconds: float) -> str:
        """Returns how the trainer has ended, in words; "" if it is at work."""
        if trainer is not None and trainer.state != "running":
            return trainer.state
        now, waited = time.monotonic(), self._config.wait_seconds
        if self._heard is None and (trainer is not None or self._retrievers.steps()):
            self._heard = now
        if self._heard is not None:
            # Its silence before that was that of a queue.
            silent_seconds = min(silent_seconds, now - self._heard)
            is_silent = silent_seconds > self._config.patience_seconds
            silence = f"was not heard of for {self._config.patience_seconds:g} s"
            return silence if is_silent else ""
        if silent_seconds > waited:
            raise NotReadyError(
                f"expected a trainer in {self._store.url()}, but none gave a sign of "
                f"life within {waited:g} s; start it, and run this command again, or "
                "raise BuilderConfig.wait_seconds"
            )
        return ""

    def _wait(self, stop: threading.Event) -> None:
        self._beat("running", activity="waiting")
        stop.wait(self._config.poll_seconds)

    def _newest_step(self) -> int | None:
        """Returns the newest retriever's step if it has no index; skips older ones."""
        published = self._retrievers.steps()
        # A withdrawn step may be published again.
        self._refused = {s: why for s, why in self._refused.items() if s in published}
        if not published or published[-1] in self._refused:
            return None
        newest = published[-1]
        try:
            return None if self._has_index(newest) else newest
        except MissingObjectError:
            return None  # Withdrawn since it was listed; the next poll sees the change.

    def _has_index(self, step: int) -> bool:
        """Returns whether a step has its index; withdraws a damaged or outdated one."""
        if step not in self._indexes.steps():
            return False
        try:
            made_by = self._indexes.read_manifest(step).metadata.get(RETRIEVER_CRC32C)
        except DamagedSnapshotError as error:
            # No reader can ever use it, and a trainer may be waiting for it.
            if self._indexes.withdraw_damaged(step):
                _log.warning("the index of step %d is withdrawn: %s", step, error)
            self._index_step = self._indexes.latest_step()
            return False
        try:
            wanted = self._retrievers.read_manifest(step).metadata.get(PARAMS_CRC32C)
        except DamagedSnapshotError:
            return True  # None can be made of it, so the one that there is stays.
        if made_by == wanted:
            return True
        _log.warning("step %d: dropping the index of a retriever that is gone", step)
        self._indexes.forget(step)
        return False

    def _build(self, step: int, stop: threading.Event) -> None:
        self._step = step
        began = time.monotonic()
        try:
            # The step may be published again; all use what the first process has read.
            attempt = multihost.run_on_primary(
                lambda: self._retrievers.read_manifest(step).attempt
            )

            def is_superseded() -> bool:
                """Returns whether the trainer is done, and has a later retriever.

                The stage after it reads the index of its last retriever only.
                """
                said, _ = self._trainer.listen()
                is_last = self._retrievers.latest_step() == step
                return said is not None and said.state == "finished" and not is_last

            def require_published() -> None:
                if self._retrievers.read_manifest(step).attempt != attempt:
                    raise MissingObjectError(
                        f"expected the retriever of step {step} to stay, it was "
                        "published anew; its index will follow."
                    )

            manifest = build_once(
                multihost.run_on_all(lambda: load_retriever(self._store, step)),
                self._blocks,
                self._store,
                self._config,
                stop=stop,
                on_progress=self._report,
                is_superseded=is_superseded,
                require_wanted=require_published,
            )
        except (MissingObjectError, AlreadyCommittedError) as error:
            # A trainer that resumes from an older checkpoint withdraws later steps, and
            # another builder may have embedded the retriever that it published again.
            _log.warning("step %d was withdrawn: %s", step, error)
            self._wait(stop)
            return
        except (DamagedSnapshotError, DivergedRetrieverError, LowRecallError) as error:
            self._refused[step] = str(error)
            _log.warning("no index for step %d: %s", step, error)
            return
        if manifest is None:
            _log.info("step %d: given up; a stopped build is resumed", step)
            return
        self._index_step = step
        seconds = time.monotonic() - began
        _log.info("step %d: %d blocks in %.1f s", step, manifest.count, seconds)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        if multihost.is_first():
            collect_garbage(self._store, self._config.keep)

    def _report(self, done: int, num_blocks: int) -> None:
        if self._on_progress:
            self._on_progress(done, num_blocks)
        now = time.monotonic()
        if now - self._last_progress_beat >= _BEAT_SECONDS:
            self._last_progress_beat = now
            self._beat("running", activity="embedding", blocks_done=done)

    def _beat(self, state: State, **extra: Any) -> None:
        if not multihost.is_first():
            return
        self._heartbeat.beat(
            self._step,
            state,
            num_blocks=self._blocks.num_blocks,
            index_step=self._index_step,
            refused={str(step): reason for step, reason in self._refused.items()},
            **extra,
        )
