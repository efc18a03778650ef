"""How a trainer meets the index: it publishes, builds, follows, and says it lives.

Of several processes the first writes and speaks for all; each loads its own rows.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from jax.sharding import Mesh
from jaxtyping import PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.index.builder import (
    BUILDER_ROLE,
    RETRIEVER_CRC32C,
    TRAINER_ROLE,
    BuilderConfig,
    build_once,
    collect_garbage,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import index_series
from realm_jax.index.follower import IndexFollower, LoadedIndex, load_index
from realm_jax.index.heartbeat import Heartbeat, JobStatus, Listener, State
from realm_jax.index.manifest import (
    EMBEDDINGS,
    AlreadyCommittedError,
    Expectation,
    Manifest,
    MismatchedSnapshotError,
)
from realm_jax.index.retrievers import (
    PARAMS_CRC32C,
    TrainedRetriever,
    publish_retriever,
)
from realm_jax.index.scann_assets import load_assets
from realm_jax.index.searchers import DeviceConfig, Searcher, make_searcher
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import MissingObjectError, Store, absolute_url

_BEAT_SECONDS = 2.0
_LISTEN_SECONDS = 5.0
_KEEP = 2
_FIRST_STEP = 0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IndexSource:
    """What an index is made of and how it is searched.

    Attributes:
      model_store: the model directory.
      corpus: the blocks.
      config: of the retriever.
      embed: how blocks are embedded here.
      searcher: "device" or "scann".
      mesh: the devices of the searcher "device".
      device: how they search.
      donors: other model directories whose indexes may be by the same document tower,
        such as that of the stage before.
    """

    model_store: Store
    corpus: BlockStore
    config: RetrieverConfig
    embed: EmbedConfig
    searcher: str
    mesh: Mesh | None = None
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    donors: Sequence[str] = ()

    @property
    def series(self) -> SnapshotSeries:
        """The index snapshots of the corpus in the model directory."""
        return index_series(self.model_store, self.corpus.fingerprint)

    def retriever(self, step: int, params: PyTree) -> TrainedRetriever:
        """The retriever of a step, on the host; all processes take part."""
        return TrainedRetriever(
            step,
            self.config,
            multihost.fetch(params),
            self.corpus.vocabulary.fingerprint,
            tuple(map(absolute_url, self.donors)),
        )

    def expectation(self) -> Expectation:
        """What a snapshot must be to be searched by this run."""
        return Expectation(
            corpus_fingerprint=self.corpus.fingerprint,
            dimension=self.config.projection_size,
            count=self.corpus.num_blocks,
        )

    def make_searcher(self, series: SnapshotSeries, manifest: Manifest) -> Searcher:
        """Places embeddings where they are searched; each process reads its own rows.

        Of `scann`, what the builder has trained is taken; else it is trained here.
        """
        if self.searcher == "scann":
            trained = load_assets(series, manifest)
            if trained is not None:
                return trained
        return make_searcher(
            self.searcher,
            series.array(manifest, EMBEDDINGS),
            manifest.step,
            mesh=self.mesh,
            device=self.device,
        )

    def load(self, step: int) -> LoadedIndex | None:
        """The committed index of a step, None if there is none (any more).

        Raises:
          DamagedSnapshotError: it is not what was committed.
          MismatchedSnapshotError: it is of another corpus or model.
        """
        if not multihost.run_on_primary(lambda: step in self.series.steps()):
            return None
        manifest = self.series.read_manifest(step)
        return load_index(self.series, manifest, self.expectation(), self.make_searcher)

    def require_made_by(self, index: LoadedIndex, step: int, params: PyTree) -> None:
        """Checks that an index was embedded by these very parameters.

        Raises:
          BadInputError: by others, such as those of an earlier run in this folder.
        """
        made_by = index.manifest.metadata.get(RETRIEVER_CRC32C)
        if made_by != self.retriever(step, params).params_crc32c():
            where = self.model_store.url(f"index/commits/{step}.json")
            raise BadInputError(
                f"expected an index of the retriever of step {step}, but {where} is of "
                "other parameters; delete it, and it will be made anew"
            )

    def build(
        self, step: int, params: PyTree, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Embeds the corpus here, unless that index or its rows are there already.

        Raises:
          StoppedError: `stop` was set; the next call resumes.
          AlreadyCommittedError: the step has the index of another run.
        """
        try:
            manifest = build_once(
                self.retriever(step, params),
                self.corpus,
                self.model_store,
                BuilderConfig(embed=self.embed),
                stop=stop,
            )
        except AlreadyCommittedError as error:
            raise _of_another_run(self.series, step) from error
        if manifest is None:
            raise StoppedError("stopped while the corpus was being embedded")
        return load_index(self.series, manifest, self.expectation(), self.make_searcher)


class IndexLink:
    """A trainer's side of the model directory; a context manager.

    Its heartbeat names the index in use, which garbage collection then keeps, and ends
    with "finished" or "failed", which tells the builder to end too.
    """

    def __init__(
        self,
        source: IndexSource,
        stop: threading.Event,
        builder_patience_seconds: float = 300.0,
        step: int = 0,
    ):
        """Prepares the link.

        Args:
          source: what indexes are made of.
          stop: set when the process was asked to stop.
          builder_patience_seconds: for how long an index builder may be silent.
          step: updates done.
        """
        self._source = source
        self._patience_seconds = builder_patience_seconds
        self._builder: Listener | None = None
        self._builder_said: JobStatus | None = None
        self._listened = 0.0
        self._warned_of = ""
        self._stop = stop
        self._heartbeat = Heartbeat(source.model_store, TRAINER_ROLE, _BEAT_SECONDS)
        self._follower: IndexFollower | None = None
        self._step = step
        # The index of the stage before, if there was one: what measures that stage
        # later takes its rows from here.
        self._first = [_FIRST_STEP] if source.donors else []
        self._in_use: dict[str, object] = {"kept_index_steps": self._first}
        # Checksums of the retrievers that this process published, by step.
        self._published: dict[int, int] = {}
        self._resumed_at = -1
        self._finished = False

    def __enter__(self) -> "IndexLink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._follower is not None:
            self._follower.stop()
        self._say("finished" if self._finished else "failed")

    def beat(self, step: int) -> None:
        """Says that the trainer lives; at most every few seconds."""
        self._step = step
        self._say("running")
        now = time.monotonic()
        if self._builder is not None and now - self._listened >= _LISTEN_SECONDS:
            self._listened = now
            problem = self._builder_problem()
            if problem and problem.rpartition(",")[0] != self._warned_of:
                _log.warning("%s; training goes on with the index it has", problem)
            self._warned_of = problem.rpartition(",")[0]

    def _say(self, state: State) -> None:
        if multihost.is_first():
            self._heartbeat.beat(self._step, state, **self._in_use)

    def _builder_problem(self) -> str:
        """Says of a builder that is gone which one it is; "" if one is there."""
        assert self._builder is not None
        status, silent_seconds = self._builder.listen()
        self._builder_said = status
        # One that ended or failed may be started again.
        if silent_seconds <= self._patience_seconds:
            return ""
        heard = f"last heard of {silent_seconds:.0f} s ago"
        if status is None:
            return f"no index builder has given a sign of life, {heard}"
        return (
            f"the index builder (process {status.pid} on {status.host}, "
            f"{status.state}) is silent at step {status.step}, {heard}"
        )

    def builder_progress(self) -> Mapping[str, float]:
        """Which retriever is being embedded, and how much of it, as metrics."""
        said = self._builder_said
        if said is None or said.extra.get("activity") != "embedding":
            return {}
        share = said.extra["blocks_done"] / said.extra["num_blocks"]
        return {"builder_step": said.step, "builder_share": share}

    def use(self, index_step: int, kept: tuple[int, ...] = ()) -> None:
        """Names the index in use and those that checkpoints resume with."""
        named = list(dict.fromkeys([*self._first, *kept]))
        self._in_use = {"index_step": index_step, "kept_index_steps": named}
        self._say("running")

    def build(self, step: int, params: PyTree) -> LoadedIndex:
        """Embeds the corpus in this process, then drops what nobody needs."""
        index = self._source.build(step, params, self._stop)
        if multihost.is_first():
            collect_garbage(self._source.model_store, _KEEP)
        return index

    def load(self, step: int) -> LoadedIndex | None:
        """The committed index of a step, None if there is none (any more)."""
        return self._source.load(step)

    def manifest(self, step: int) -> Manifest:
        """What the index of a step was committed with.

        Raises:
          BadInputError: it is gone.
        """
        try:
            return self._source.series.read_manifest(step)
        except MissingObjectError as error:
            raise BadInputError(
                f"expected the manifest of the index of step {step}, from which the "
                f"one in the checkpoint was made, in {self._source.series.store.url()}"
                "; use another MODEL_DIR"
            ) from error

    def forget_after(self, step: int) -> None:
        """Drops the snapshots of a lost run's later steps, which are run again."""
        self._resumed_at = step

        def forget() -> None:
            # Retrievers first: one without its index would be embedded again.
            for name in (RETRIEVER_SERIES, INDEX_SERIES):
                SnapshotSeries(self._source.model_store, name).forget_after(step)

        multihost.run_on_primary(forget)

    def publish(self, step: int, params: PyTree) -> None:
        """Hands the retriever to the builder; once a step.

        Raises:
          AlreadyCommittedError: the step has the retriever of another run.
        """
        store = self._source.model_store
        retriever = self._source.retriever(step, params)
        try:
            # What this run published before it was resumed is the same to the last bit.
            manifest = multihost.run_on_primary(
                lambda: publish_retriever(
                    store, retriever, self._source.corpus.fingerprint
                )
            )
        except AlreadyCommittedError as error:
            series = SnapshotSeries(store, RETRIEVER_SERIES)
            raise _of_another_run(series, step) from error
        self._published[step] = manifest.metadata[PARAMS_CRC32C]

    def follow(self, newer_than: int) -> None:
        """Starts to look for newer indexes in the background."""
        if multihost.is_first():
            self._builder = Listener(self._source.model_store, BUILDER_ROLE)
        self._follower = IndexFollower(
            self._source.series,
            self._source.expectation(),
            self._source.make_searcher,
            check=self._require_of_this_run,
            newer_than=newer_than,
        ).start()

    def _require_of_this_run(self, manifest: Manifest) -> None:
        """A builder may commit what a lost run, or another one, had it embed."""
        step = manifest.step
        length = manifest.metadata["embed"]["document_length"]
        if length != self._source.embed.document_length:
            raise MismatchedSnapshotError(
                f"expected documents embedded at {self._source.embed.document_length} "
                f"wordpieces, as this run reads them, those of step {step} are at "
                f"{length}; start the builder with the same document_length."
            )
        if step not in self._published and step <= self._resumed_at:
            return  # Published before this process, and not withdrawn by it.
        if manifest.metadata.get(RETRIEVER_CRC32C) != self._published.get(step):
            raise MismatchedSnapshotError(
                f"expected an index of a retriever that this run published, that of "
                f"step {step} is of another; it is made anew."
            )

    def take(self) -> LoadedIndex | None:
        """A newer index if one is loaded; does not wait."""
        return None if self._follower is None else self._follower.take()

    def wait(self, seconds: float) -> LoadedIndex:
        """Waits for the builder's next index.

        Raises:
          StoppedError: the process was asked to stop.
          BadInputError: none came in time, or the builder is gone; it is named.
        """
        assert self._follower is not None

        def problem() -> str:
            # Its patience is shorter than the embedding of a large corpus.
            self.beat(self._step)
            return self._builder_problem()

        return self._follower.wait_for_first(
            seconds, problem, multihost.StopRequest(self._stop).asked
        )

    def finish(self, step: int, params: PyTree) -> None:
        """Publishes the last retriever; the heartbeat will end with "finished"."""
        self.publish(step, params)
        self._step, self._finished = step, True


def _of_another_run(series: SnapshotSeries, step: int) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"expected {series.store.url(series.name)} without snapshots of another run, "
        f"but step {step} has one of other parameters; use another MODEL_DIR, or "
        "delete that folder"
    )
