"""Provides the source of a run's indexes, which builds and loads them."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.extras import require_extra
from realm_jax.index.builder import (
    RETRIEVER_CRC32C,
    BuilderConfig,
    OnProgress,
    build_once,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import index_series
from realm_jax.index.manifest import (
    EMBEDDINGS,
    AlreadyCommittedError,
    Expectation,
    Manifest,
)
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.scann_assets import load_assets
from realm_jax.index.searchers import (
    SCANN_PURPOSE,
    DeviceConfig,
    Searcher,
    make_searcher,
)
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import Store, absolute_url

FIRST_STEP = 0
"""Step of the index that a run is given before its first update."""

SearcherT = TypeVar("SearcherT")


@dataclasses.dataclass(frozen=True)
class LoadedIndex(Generic[SearcherT]):
    """An index ready to be searched; `rows` on the host if the source keeps them."""

    searcher: SearcherT
    manifest: Manifest
    rows: Float[np.ndarray, "block projection"] | None = None

    def staleness(self, step: int) -> "Staleness":
        """Returns how far the index lags behind the trainer at `step`.

        The age in seconds is the time since its embedding began, by which its encoder
        was published.
        """
        seconds = max(0.0, time.time() - self.manifest.began)
        return Staleness(steps=step - self.manifest.step, seconds=seconds)


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The age of an index, in training steps and in seconds."""

    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class IndexSource:
    """Builds, loads and opens the indexes of a run.

    Attributes:
      donors: other model directories whose indexes may have the same document tower,
        such as that of the previous stage.
      keeps_rows: whether loaded indexes have their embeddings on the host, too.
      on_progress: called while the corpus is embedded in this process.
    """

    model_store: Store
    corpus: BlockStore
    config: RetrieverConfig
    embed: EmbedConfig
    searcher: str
    mesh: Mesh | None = None
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    donors: Sequence[str] = ()
    keeps_rows: bool = False
    on_progress: OnProgress | None = None

    def __post_init__(self):
        if self.searcher == "scann":
            # Checked before an index is embedded or waited for.
            require_extra("scann", SCANN_PURPOSE)

    @property
    def series(self) -> SnapshotSeries:
        """The index snapshots of the corpus in the model directory."""
        return index_series(self.model_store, self.corpus.fingerprint)

    def retriever(self, step: int, params: PyTree) -> TrainedRetriever:
        """Returns the retriever of a step, on the host; all processes take part."""
        return TrainedRetriever(
            step,
            self.config,
            multihost.fetch(params),
            self.corpus.vocabulary.fingerprint,
            tuple(map(absolute_url, self.donors)),
        )

    def make_searcher(self, series: SnapshotSeries, manifest: Manifest) -> Searcher:
        """Places embeddings where they are searched; each process reads its own rows.

        With `scann`, the assets trained by the builder are loaded; if there are none,
        they are trained here.
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
        """Loads the committed index of a step, None if there is none (any more)."""
        if not multihost.run_on_primary(lambda: step in self.series.steps()):
            return None
        return self.load_manifest(self.series.read_manifest(step))

    def load_manifest(self, manifest: Manifest) -> LoadedIndex:
        """Verifies that a snapshot is sound and fits this run, and loads it."""
        expected = Expectation(
            self.corpus.fingerprint, self.config.projection_size, self.corpus.num_blocks
        )
        self.series.verify(manifest, expected)
        searcher = self.make_searcher(self.series, manifest)
        rows = self.series.read_array(manifest, EMBEDDINGS) if self.keeps_rows else None
        return LoadedIndex(searcher, manifest, rows)

    def load_or_build(
        self, step: int, params: PyTree, stop: threading.Event | None = None
    ) -> LoadedIndex:
        """Loads the index that these parameters made at a step, or makes it."""
        index = self.load(step)
        if index is None:
            return self.build(step, params, stop)
        made_by = index.manifest.metadata.get(RETRIEVER_CRC32C)
        if made_by != self.retriever(step, params).params_crc32c():
            where = self.series.url_of(step)
            raise BadInputError(
                f"expected an index of the retriever of step {step}, but {where} is of "
                "other parameters; delete it, and it will be made anew"
            )
        return index

    def build(
        self,
        step: int,
        params: PyTree,
        stop: threading.Event | None = None,
        *,
        require_wanted: Callable[[], None] = lambda: None,
    ) -> LoadedIndex:
        """Embeds the corpus in this process, reusing an existing index or its rows.

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
                on_progress=self.on_progress,
                require_wanted=require_wanted,
            )
        except AlreadyCommittedError as error:
            raise of_another_run(self.series, step) from error
        if manifest is None:
            raise StoppedError("stopped while the corpus was being embedded")
        return self.load_manifest(manifest)

    def open_first(
        self,
        params: PyTree,
        stop: threading.Event,
        *,
        resumes: bool,
        trained: str = "",
    ) -> LoadedIndex:
        """Opens or builds the index of a run that has one for all its steps.

        A warm start reads retrieved documents from it, and fine-tuning searches it.
        `trained` names the part of the document tower that a run which `resumes` has
        trained; only where that is "", for none, can a missing index be built again.

        Raises:
          StoppedError: stopped while the corpus was being embedded.
        """
        index = self.load(FIRST_STEP) if resumes else None
        if index is None and resumes and trained:
            raise BadInputError(
                f"expected the index that this run started with in "
                f"{self.model_store.url()}, found none, and its {trained} has trained "
                "on since; delete that folder and start anew"
            )
        # A run without a checkpoint may have left an index; `build` uses it only if it
        # has these parameters.
        return index or self.build(FIRST_STEP, params, stop)


def of_another_run(series: SnapshotSeries, step: int) -> AlreadyCommittedError:
    """Returns the error for a snapshot of another run at a step of this one."""
    return AlreadyCommittedError(
        f"expected {series.store.url(series.name)} without snapshots of another run, "
        f"but step {step} has one of other parameters; use another MODEL_DIR, or "
        "delete that folder"
    )
