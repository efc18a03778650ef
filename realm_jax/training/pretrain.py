"""REALM pre-training: masked sentences, retrieved documents, an index kept fresh."""

import dataclasses
import functools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import PyTree

from realm_jax.data.examples import Examples
from realm_jax.errors import BadInputError
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.follower import LoadedIndex
from realm_jax.index.searchers import DeviceConfig, DeviceSearcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.training.accounting import Part
from realm_jax.training.checkpoint_manifests import HOLDS_INDEX, all_details
from realm_jax.training.checkpoints import KEPT_CHECKPOINTS
from realm_jax.training.held_out import HeldOutQuestions
from realm_jax.training.host_search import HostSearch
from realm_jax.training.index_link import IndexLink, IndexSource
from realm_jax.training.index_metrics import IndexMetrics
from realm_jax.training.loop import Report
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.training.metrics import Means
from realm_jax.training.probe import NUM_QUERIES, Probe
from realm_jax.training.refresh import (
    Refresher,
    RefreshMode,
    StalenessBound,
    WhenStale,
)
from realm_jax.training.renewal import Renewal, make_renewing_step
from realm_jax.training.retrieving import (
    DeviceSearch,
    RetrievingInputs,
    StepInputs,
)
from realm_jax.training.stage import Stage, StageConfig, require_one_of
from realm_jax.training.state import TrainState
from realm_jax.training.step import MakeStep
from realm_jax.types import PretrainBatch

NAME = "pretrain"


@dataclasses.dataclass(frozen=True)
class PretrainConfig(StageConfig):
    """A pre-training run; see `StageConfig` for the shared attributes.

    Attributes:
      task: masked sentences.
      num_candidates: documents per example, the null document included.
      refresh_mode: "off", "blocking", "async" (`realm build-index` beside this job) or
        "rolling"; see `refresh.py`.
      refresh_period: steps between two refreshes.
      write_back: whether the embeddings that a step computes of its candidates replace
        their rows in the index; see `renewal.py`.
      max_staleness_steps: how old the index of "async" may become, None for any age.
      when_stale: "wait" for a newer one, "warn" or "stop".
      searcher: "device" (inside the step) or "scann" (on the host).
      search_ahead: whether "scann" searches for the next update while one is running;
        see `host_search.py`.
      device: how "device" searches.
      marginalization: "per_span" (the paper) or "per_token" (the authors' code).
      questions: JSON lines of held-out questions for recall@5, or "".
      questions_split: the split of them that is searched.
      embed: how the trainer embeds the corpus itself (`off` and `blocking`).
      frozen: parameter paths that stay as they are, such as "retriever".
      wait_seconds: how long `async` waits for the first index before it gives up.
    """

    num_candidates: int = 8
    refresh_mode: str = "async"
    refresh_period: int = 500
    write_back: bool = False
    max_staleness_steps: int | None = None
    when_stale: str = "wait"
    searcher: str = "device"
    search_ahead: bool = True
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    marginalization: str = "per_span"
    questions: str = ""
    questions_split: str = "dev"
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    frozen: tuple[str, ...] = ()
    wait_seconds: float = 3600.0

    def __post_init__(self):
        require_one_of("REFRESH_MODE", self.refresh_mode, RefreshMode)
        require_one_of("when_stale", self.when_stale, WhenStale)
        if self.index_in_state and self.searcher != "device":
            raise BadInputError(
                'expected SEARCHER="device" for REFRESH_MODE="rolling" and for '
                f"write_back, got {self.searcher!r}: rows of a ScaNN index cannot be "
                "replaced; change one of them"
            )
        require_one_of("marginalization", self.marginalization, Marginalization)
        if self.num_candidates < 2:
            raise BadInputError(
                f"expected NUM_CANDIDATES of at least 2 (the null document and one "
                f"that is retrieved), got {self.num_candidates}"
            )

    @property
    def index_in_state(self) -> bool:
        """Whether the steps themselves renew the index, which checkpoints then hold."""
        return self.write_back or self.refresh_mode == RefreshMode.ROLLING.value


def run(config: PretrainConfig, report: Report, stop: threading.Event) -> bool:
    """Trains from the latest checkpoint on; returns whether all updates are done.

    Raises:
      BadInputError: as `Stage`, or the index cannot be had.
    """
    stage = Stage(
        NAME,
        config,
        KnowledgeEncoder,
        frozen=tuple(config.frozen),
        index=Precision(config.device.precision) if config.index_in_state else None,
    )
    source = IndexSource(
        stage.model_store,
        stage.corpus,
        stage.retriever_config,
        config.embed.at_length(config.models.lengths.document),
        config.searcher,
        stage.mesh,
        config.device,
        config.donors,
    )
    try:
        with IndexLink(source, stop, step=int(stage.state.step)) as link:
            if not stage.is_done:
                _Pretraining(stage, config, link).run(report, stop)
            if stage.is_done:
                # The builder embeds the corpus once more, for what comes after. Said
                # of a run that was done before, too: a builder beside it waits for it.
                link.finish(config.train_steps, stage.state.params["retriever"])
    finally:
        stage.close()
    return stage.is_done


def make_loss(
    config: PretrainConfig, retriever: Retriever, reader: KnowledgeEncoder
) -> PretrainLoss:
    """Returns the loss of a run, over candidates."""
    return PretrainLoss(
        retriever,
        reader,
        Marginalization(config.marginalization),
        config.microbatches,
    )


def make_step(config: PretrainConfig) -> MakeStep | None:
    """Returns what makes the step of a run whose state holds the index, else None."""
    if not config.index_in_state:
        return None
    rolling = config.refresh_mode == RefreshMode.ROLLING.value
    renewal = Renewal(
        config.refresh_period if rolling else None,
        config.write_back,
        config.embed.batch_size,
    )
    return functools.partial(make_renewing_step, renewal=renewal)


def _index_metrics(
    stage: Stage[KnowledgeEncoder], config: PretrainConfig, examples: Examples
) -> IndexMetrics:
    lengths = config.models.lengths
    rows = np.arange(min(NUM_QUERIES, len(examples)))
    probe = Probe(
        stage.corpus,
        stage.retriever_config,
        examples.batch(rows)["query_ids"],
        lengths.document,
    )
    questions = None
    if config.questions:
        questions = HeldOutQuestions(
            stage.corpus, config.questions, config.questions_split, lengths.query
        )
    return IndexMetrics(config.model_dir, stage.retriever_config, probe, questions)


class _Pretraining:
    """The parts of a run that refer to each other."""

    def __init__(
        self,
        stage: Stage[KnowledgeEncoder],
        config: PretrainConfig,
        link: IndexLink,
    ):
        self._stage = stage
        self._config = config
        self._link = link
        self._examples = stage.open_examples(config.task, "train")
        loss = make_loss(config, stage.retriever, stage.reader)
        of_all = (
            *(loss, stage.corpus, config.models.lengths, config.num_candidates),
            stage.mesh,
        )
        self._step_inputs: StepInputs = (
            DeviceSearch(*of_all, config.device.approximate)
            if config.searcher == "device"
            else HostSearch(
                *of_all, config.batch_size, config.search_ahead, stage.stopwatch
            )
        )
        self._metrics = _index_metrics(stage, config, self._examples)
        self._index_in_use: LoadedIndex | None = None
        # The index that the state holds, before it is replaced.
        self._renewed: EmbeddingTable | None = None
        self._is_rolling = config.refresh_mode == RefreshMode.ROLLING.value
        # Of the checkpoints that are kept, which garbage collection must not take.
        self._saved: deque[int] = deque(maxlen=KEPT_CHECKPOINTS)
        self._refresher = Refresher(
            RefreshMode(config.refresh_mode),
            config.refresh_period,
            link,
            wait_seconds=config.wait_seconds,
            on_swap=self._on_swap,
            bound=StalenessBound(
                config.max_staleness_steps, WhenStale(config.when_stale)
            ),
        )

    def run(self, report: Report, stop: threading.Event) -> None:
        stage, refresher = self._stage, self._refresher
        saved = stage.details["index_step"] if stage.details is not None else None
        step = int(stage.state.step)
        self._saved.extend(
            details["index_step"] for details in all_details(stage.model_store).values()
        )
        retriever = stage.state.params["retriever"]
        self._step_inputs.resume(stage.details or {}, self._batch_at)
        held = stage.details is not None and stage.details.get(HOLDS_INDEX)
        if held and saved is not None and stage.state.index is not None:
            searcher = self._searcher_of(stage.state.index, saved)
            index = LoadedIndex(searcher, self._link.manifest(saved))
            refresher.adopt(step, retriever, index)
        else:
            refresher.start(step, retriever, saved)
        stage.train(
            self._step_inputs.loss,
            self._inputs_at,
            report=report,
            stop=stop,
            log_extra=self._log_extra,
            # A line for every index, so that none of them goes without its recall.
            log_due=lambda: self._metrics.is_due,
            checkpoint_details=self._checkpoint_details,
            hooks=[self._beat],
            replace_state=self._refresh,
            make_step=make_step(self._config),
        )
        logging.info("swapped to a newer index %d times", refresher.num_swaps)
        if refresher.failure is not None:
            raise refresher.failure

    def _searcher_of(self, table: EmbeddingTable, step: int) -> DeviceSearcher:
        stage, config = self._stage, self._config
        return DeviceSearcher.over(
            table, stage.corpus.num_blocks, step, stage.mesh, config.device
        )

    def _refresh(self, step: int, state: TrainState) -> TrainState:
        """Gets the index of the next update; puts it into the state if it lives there.

        Raises:
          StoppedError: none can be had that is fresh enough.
        """
        retriever, stopwatch = state.params["retriever"], self._stage.stopwatch
        self._renewed, before = state.index, self._index_in_use
        if self._refresher.is_due(step):
            stopwatch.wait_for(retriever)
        with stopwatch.part(Part.SWAP):
            index = self._index_in_use = self._refresher.before_step(step, retriever)
            if state.index is None:
                return state
            if index is not before:
                # It changes with every update: the one in memory is the state's.
                return state.replace(index=index.searcher.table)
            if self._is_rolling and step % self._config.refresh_period == 0:
                # All its rows are others than a period ago.
                renewed = self._searcher_of(state.index, step)
                stopwatch.wait_for(retriever)
                self._metrics.of_renewal(step, retriever, renewed)
            return state

    def _inputs_at(
        self, step: int, state: TrainState
    ) -> PretrainInputs | RetrievingInputs:
        inputs = self._step_inputs(
            step, state.params["retriever"], self._refresher.index, self._batch_at
        )
        if self._config.index_in_state:
            return inputs.replace(embeddings=None)
        return inputs

    def _batch_at(self, step: int) -> PretrainBatch:
        return PretrainBatch(**self._stage.batch(self._examples, step))

    def _on_swap(
        self,
        step: int,
        params: PyTree,
        index: LoadedIndex,
        replaced: LoadedIndex | None,
    ) -> None:
        self._link.use(index.manifest.step, tuple(self._saved))
        if replaced is None:
            self._metrics.of_first(step, params, index.searcher)
            return
        self._stage.stopwatch.wait_for(params)
        old = replaced.searcher
        if self._renewed is not None:
            old = self._searcher_of(self._renewed, step)
        self._metrics.of_swap(step, params, old, index.searcher)
        self._metrics.add("index_swap_seconds", self._refresher.swap_seconds)

    def _log_extra(self, step: int) -> Mapping[str, float]:
        """Staleness, the builder, and after a refresh what was measured then."""
        return {
            **self._refresher.staleness(step),
            **self._link.builder_progress(),
            **self._metrics.take(),
        }

    def _checkpoint_details(self) -> Mapping[str, Any]:
        step = self._refresher.index.manifest.step
        self._saved.append(step)
        self._link.use(step, tuple(self._saved))
        return {"index_step": step, **self._step_inputs.details()}

    def _beat(self, step: int, state: TrainState, metrics: Means) -> None:
        self._link.beat(step)
