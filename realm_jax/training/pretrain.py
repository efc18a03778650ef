"""REALM pre-training on masked sentences, retrieved documents and a refreshed index."""

import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from jax.sharding import Mesh
from jaxtyping import PyTree

from realm_jax import ranges
from realm_jax.attempts import Attempt
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.data.masking import pretrain_specs
from realm_jax.errors import BadInputError
from realm_jax.index import device_search, device_tokens
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.index.device_tokens import DocumentLayout
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import (
    SEARCHERS,
    DeviceConfig,
    DeviceSearcher,
    Searcher,
)
from realm_jax.index.source import LoadedIndex
from realm_jax.metrics.means import Means
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.retrieval import Normalization
from realm_jax.stages import PRETRAIN, StageSpec
from realm_jax.storage import absolute_url
from realm_jax.training.candidate_search import (
    DeviceSearch,
    RetrievingInputs,
    RetrievingLoss,
    StepInputs,
)
from realm_jax.training.checkpoint_manifests import (
    HELD_OUT_UTILITY,
    HOLDS_INDEX,
)
from realm_jax.training.checkpoints import KeptCheckpoints
from realm_jax.training.host_search import HostSearch
from realm_jax.training.index_client import IndexClient
from realm_jax.training.index_metrics import make_index_metrics
from realm_jax.training.loop import Report
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.pretrain_loss import PretrainInputs, PretrainLoss
from realm_jax.training.refresh import (
    Refresher,
    RefreshMode,
    StalenessBound,
    WhenStale,
)
from realm_jax.training.rolling_refresh import Renewal, RenewingLoss
from realm_jax.training.stage import Stage
from realm_jax.training.stage_config import IndexUse, StageConfig, require_one_of
from realm_jax.training.state import TrainState
from realm_jax.training.step import Loss
from realm_jax.training.step_timing import Part
from realm_jax.training.update_shapes import (
    SOME_PIECES,
    UpdateShapes,
    batch_of,
    shapes_of,
)
from realm_jax.types import Candidates, PretrainBatch

_MEASURED = "measured"
"""In a checkpoint's details: measurements for the next line of metrics."""


@dataclasses.dataclass(frozen=True)
class PretrainConfig(StageConfig):
    """A pre-training run; see `StageConfig` for the shared attributes.

    Attributes:
      task: name of the task of masked sentences.
      num_candidates: documents per example, the null document included.
      own_block: whether one of them is the block that the sentence was taken from, read
        without the sentence, instead of a retrieved one; see `index/own_blocks.py`.
      refresh_mode: "off", "blocking", "async" (`realm build-index` beside this job) or
        "rolling"; see `refresh.py`.
      refresh_period: steps between two refreshes.
      write_back: whether the embeddings that a step computes of its candidates replace
        their rows in the index; see `rolling_refresh.py`.
      max_staleness_steps: maximum age of the index of "async", in steps; None for any.
      when_stale: "wait" for a newer one, "warn" or "stop".
      searcher: "device" (inside the step) or "scann" (on the host).
      search_ahead: whether "scann" searches for the next update while one is running;
        see `host_search.py`.
      device: how "device" searches.
      marginalization: "per_span" (the paper) or "per_token" (the authors' code).
      normalization: of p(z|x) in the loss: over the "candidates" of a sentence (the
        paper) or over the whole "batch"; see `objectives/retrieval.py`.
      questions: JSON lines of held-out questions for recall@5, or "".
      questions_split: the split of the questions that is searched.
      held_out_examples: number of masked sentences of the validation split that are
        predicted with every index and at the end, evenly spread; 0 for none. The
        checkpoint with the highest utility on them is kept beside the newest.
      embed: how the trainer embeds the corpus itself (`off` and `blocking`).
      frozen: parameter paths that are not trained, such as "retriever".
      embeddings_from_index: whether steps take the candidates' embeddings from the
        index instead of computing them. With the whole document tower `frozen` the
        index is exact, and a step saves an embedder's forward pass over all
        candidates.
      wait_seconds: how long `async` waits for an index while the builder embeds
        nothing, in seconds; it may not be there yet.
      builder_patience_seconds: how long a builder that was heard of may be silent, in
        seconds.
    """

    stage: ClassVar[StageSpec] = PRETRAIN

    num_candidates: int = 8
    own_block: bool = False
    refresh_mode: str = "async"
    refresh_period: int = 500
    write_back: bool = False
    max_staleness_steps: int | None = None
    when_stale: str = "wait"
    searcher: str = "device"
    search_ahead: bool = True
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    marginalization: str = "per_span"
    normalization: str = "candidates"
    questions: str = ""
    questions_split: str = "dev"
    held_out_examples: int = 256
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    frozen: tuple[str, ...] = ()
    embeddings_from_index: bool = False
    wait_seconds: float = 3600.0
    builder_patience_seconds: float = 300.0

    def __post_init__(self):
        super().__post_init__()
        ranges.require_ranges(
            self,
            task=ranges.TEXT,
            frozen=ranges.TEXTS,
            num_candidates=ranges.whole(1),
            refresh_period=ranges.whole(1),
            max_staleness_steps=ranges.whole(1).or_none(),
            held_out_examples=ranges.whole(0),
            wait_seconds=ranges.NOT_NEGATIVE,
            builder_patience_seconds=ranges.POSITIVE,
        )
        require_one_of("SEARCHER", self.searcher, SEARCHERS)
        require_one_of("REFRESH_MODE", self.refresh_mode, RefreshMode)
        require_one_of("when_stale", self.when_stale, WhenStale)
        if self.index_in_state and self.searcher != "device":
            raise BadInputError(
                'expected SEARCHER="device" for REFRESH_MODE="rolling" and for '
                f"write_back, got {self.searcher!r}: rows of a ScaNN index cannot be "
                "replaced; change one of them"
            )
        self._require_exact_index()
        require_one_of("marginalization", self.marginalization, Marginalization)
        require_one_of("normalization", self.normalization, Normalization)
        if self.num_candidates < 2 + self.own_block:
            raise BadInputError(
                f"expected NUM_CANDIDATES of at least {2 + self.own_block} (the null "
                f"document{', the own block' if self.own_block else ''} and one that "
                f"is retrieved), got {self.num_candidates}"
            )

    def _require_exact_index(self) -> None:
        """Requires a frozen document tower, and an index that steps can read.

        The index of a tower that trains is stale, and that of a host searcher is not
        available to the step.
        """
        if not self.embeddings_from_index:
            return
        if not {"retriever", "retriever/document_tower"} & set(self.frozen):
            raise BadInputError(
                'expected "retriever/document_tower" among the frozen parameters for '
                f"embeddings_from_index, got {list(self.frozen)}: the index would be "
                "of another tower; freeze it, or have the step embed its candidates"
            )
        if self.searcher != "device" or self.index_in_state:
            raise BadInputError(
                'expected SEARCHER="device" and an index of snapshots for '
                f"embeddings_from_index, got {self.searcher!r} with REFRESH_MODE="
                f"{self.refresh_mode!r} and write_back={self.write_back}; change one "
                "of them"
            )

    @property
    def index_in_state(self) -> bool:
        """True if the steps themselves renew the index, which checkpoints then hold."""
        return self.write_back or self.refresh_mode == RefreshMode.ROLLING.value

    @property
    def requires_held_out(self) -> bool:
        """True if a task without a validation split is refused.

        It is if a number of sentences was set explicitly.
        """
        return self.held_out_examples not in (0, PretrainConfig.held_out_examples)

    @property
    def index_use(self) -> IndexUse:
        """An index that is refreshed while the stage trains."""
        mode = RefreshMode(self.refresh_mode)
        blocking_rebuilds = {
            RefreshMode.ASYNC: 0.0,
            RefreshMode.BLOCKING: self.train_steps / self.refresh_period,
        }
        embed = self.embed.at_length(self.models.lengths.document)
        return IndexUse(
            self.searcher,
            embed,
            blocking_rebuilds.get(mode, 1.0),
            mode,
            device=self.device,
        )

    def data_order(self) -> dict[str, Any]:
        """Returns the settings a resumed run must keep, with those of its reader."""
        return {**super().data_order(), "span_scorer": self.models.span_scorer}

    def recorded(self) -> dict[str, Any]:
        """Returns what the record has for others, with the held-out questions."""
        questions = absolute_url(self.questions) if self.questions else ""
        return {**super().recorded(), "questions": questions}


def run(
    config: PretrainConfig,
    report: Report,
    stop: threading.Event,
    attempt: Attempt | None = None,
) -> bool:
    """Trains from the latest checkpoint; returns whether all updates are done.

    Raises:
      BadInputError: as `Stage`, or no index is available.
      NotReadyError: the index builder has not made one in time.
    """
    stage = Stage(
        config.stage.name,
        config,
        config.models.knowledge_encoder,
        frozen=frozen_parameters(config),
        index=Precision(config.device.precision) if config.index_in_state else None,
        attempt=attempt,
    )
    source = stage.index_source(config.searcher, config.embed, config.device)
    try:
        patience, step = config.builder_patience_seconds, int(stage.state.step)
        with IndexClient(source, stop, patience, step, stage.lease) as client:
            if not stage.is_done:
                _Pretraining(stage, config, client).run(report, stop)
            if stage.is_done:
                # The builder embeds the corpus once more, for later stages. A run that
                # was already done publishes too, as a builder may be waiting for it.
                step = int(stage.state.step)
                client.finish(step, stage.state.params["retriever"])
    finally:
        stage.close()
    return stage.is_done


def frozen_parameters(config: PretrainConfig) -> tuple[str, ...]:
    """Returns the configured paths, and those of the unused span scorer."""
    scorer = ("reader/span_dense", "reader/span_norm", "reader/span_output")
    return (*config.frozen, *(scorer if config.models.span_scorer else ()))


def make_loss(
    config: PretrainConfig,
    retriever: Retriever,
    reader: KnowledgeEncoder,
    layout: DocumentLayout,
    mesh: Mesh,
    packing: PackedLengths | None = None,
) -> Loss:
    """Returns the loss that a run minimises.

    It searches, if the step does, and renews the index, if the state holds it.
    """
    loss = PretrainLoss(
        retriever,
        reader,
        Marginalization(config.marginalization),
        Normalization(config.normalization),
        config.microbatches,
        packing,
    )
    if config.searcher != "device":
        return loss
    retrieving = (
        *(loss, config.num_candidates, layout, mesh),
        *(config.device.approximate, config.embeddings_from_index),
    )
    if not config.index_in_state:
        return RetrievingLoss(*retrieving)
    rolling = config.refresh_mode == RefreshMode.ROLLING.value
    renewal = Renewal(
        config.refresh_period if rolling else None,
        config.write_back,
        config.embed.batch_size,
    )
    return RenewingLoss(*retrieving, renewal=renewal)


def update_shapes(
    config: PretrainConfig, retriever: Retriever, corpus: CorpusSize, mesh: Mesh
) -> UpdateShapes:
    """Returns what an update of a run is compiled for; see `UpdateShapes`."""
    lengths, size = config.models.lengths, config.batch_size
    layout = DocumentLayout(lengths.document, lengths.joined, *SOME_PIECES)
    reader = config.models.knowledge_encoder(retriever.config.bert)
    loss = make_loss(config, retriever, reader, layout, mesh)
    frozen = frozen_parameters(config)
    specs = corpus.specs.get(config.task, pretrain_specs(lengths.query))
    batch = batch_of(PretrainBatch, specs, size, mesh)

    def candidates(count: int) -> Candidates:
        sizes = {"batch": size, "candidate": count, **dataclasses.asdict(lengths)}
        return shapes_of(Candidates, sizes, mesh)

    if config.searcher != "device":
        inputs = PretrainInputs(batch, candidates(config.num_candidates))
        return UpdateShapes(reader, loss, frozen, inputs)
    table = device_search.table_shapes(
        corpus.num_blocks,
        retriever.config.projection_size,
        mesh,
        Precision(config.device.precision),
    )
    inputs = RetrievingInputs(
        batch,
        None if config.index_in_state else table,
        device_tokens.table_shapes(
            corpus.num_blocks, corpus.longest, corpus.id_dtype, layout, mesh
        ),
        candidates(1) if config.own_block else None,
    )
    kept = table if config.index_in_state else None
    return UpdateShapes(reader, loss, frozen, inputs, kept)


class _Pretraining:
    """The parts of a run, which refer to each other."""

    def __init__(
        self,
        stage: Stage[KnowledgeEncoder],
        config: PretrainConfig,
        client: IndexClient,
    ):
        self._stage = stage
        self._config = config
        self._client = client
        self._examples = stage.open_examples(config.task, "train")
        num_packed = config.batch_size * (config.num_candidates - 1)
        packing = stage.packed_lengths(
            self._examples.features["query_ids"],
            num_documents=0 if config.embeddings_from_index else num_packed,
            num_joined=num_packed,
        )
        lengths = config.models.lengths
        layout = DocumentLayout.of(lengths, stage.corpus.vocabulary)
        of_models = (stage.retriever, stage.reader)
        self._loss = make_loss(config, *of_models, layout, stage.mesh, packing)
        self._step_inputs: StepInputs = (
            DeviceSearch(stage.corpus, layout, stage.mesh, config.own_block)
            if config.searcher == "device"
            else HostSearch(
                *(stage.retriever_config, stage.corpus, lengths),
                *(config.num_candidates, stage.mesh, config.batch_size),
                *(config.search_ahead, stage.stopwatch, config.own_block),
            )
        )
        self._metrics = make_index_metrics(
            stage,
            self._examples,
            questions=config.questions,
            questions_split=config.questions_split,
            num_candidates=config.num_candidates,
            max_spans=config.held_out_examples,
            require_spans=config.requires_held_out,
        )
        self._index_in_use: LoadedIndex | None = None
        # The index that the state holds, before it is replaced.
        self._renewed: EmbeddingTable | None = None
        self._is_rolling = config.refresh_mode == RefreshMode.ROLLING.value
        self._kept = KeptCheckpoints(stage.model_store)
        self._refresher = Refresher(
            RefreshMode(config.refresh_mode),
            config.refresh_period,
            client,
            wait_seconds=config.wait_seconds,
            on_swap=self._on_swap,
            bound=StalenessBound(
                config.max_staleness_steps, WhenStale(config.when_stale)
            ),
            slices=(stage.mesh.size, config.embed.batch_size, config.refresh_period),
        )

    def run(self, report: Report, stop: threading.Event) -> None:
        stage, refresher = self._stage, self._refresher
        details, saved = stage.details or {}, self._resumed_index
        step = int(stage.state.step)
        retriever = stage.state.params["retriever"]
        self._step_inputs.resume(details, self._batch_at)
        self._metrics.resume(details.get(_MEASURED, {}))
        if (
            details.get(HOLDS_INDEX)
            and saved is not None
            and stage.state.index is not None
        ):
            searcher = self._searcher_of(stage.state.index, saved)
            index = LoadedIndex(searcher, self._client.manifest(saved))
            refresher.adopt(step, retriever, index, details)
        else:
            refresher.start(step, retriever, saved)
        stage.train(
            self._loss,
            self._inputs_at,
            report=report,
            stop=stop,
            log_extra=self._log_extra,
            # Every index gets a line, so that its recall is recorded.
            log_due=lambda: self._metrics.is_due,
            checkpoint_details=self._checkpoint_details,
            measure=[self._measure_last],
            hooks=[self._beat],
            replace_state=self._refresh,
        )
        logging.info("swapped to a newer index %d times", refresher.num_swaps)
        if refresher.failure is not None:
            raise refresher.failure

    @property
    def _resumed_index(self) -> int | None:
        """Version of the index with which this process resumed; None in a new run."""
        details = self._stage.details
        return None if details is None else details["index_step"]

    def _searcher_of(self, table: EmbeddingTable, step: int) -> DeviceSearcher:
        stage, config = self._stage, self._config
        return DeviceSearcher.over(
            table, stage.corpus.num_blocks, step, stage.mesh, config.device
        )

    def _refresh(self, step: int, state: TrainState) -> TrainState:
        """Gets the index of the next update, and puts it into a state that holds one.

        Raises:
          StoppedError: no index is available that is fresh enough.
          BadInputError: parameters that would be published or measured are not finite.
        """
        retriever, stopwatch = state.params["retriever"], self._stage.stopwatch
        self._renewed, before = state.index, self._index_in_use
        if self._refresher.is_due(step):
            stopwatch.wait_for(retriever)
            self._stage.require_finite(step, retriever)
        with stopwatch.part(Part.SWAP):
            index = self._index_in_use = self._refresher.before_step(step, retriever)
            if state.index is not None and index is not before:
                # Updates change the state's copy, which is the only one in memory.
                state = state.replace(index=index.searcher.table)
        if self._is_renewed(step):
            stopwatch.wait_for(retriever)
            self._stage.require_finite(step, retriever)
            with stopwatch.part(Part.SWAP):
                self._metrics.record_renewal(
                    step, retriever, self._searcher(step, state)
                )
        elif index is before:
            return state
        utility = self._fill_in_spans(step, state)
        # A resumed run also measures the index with which it resumes, for the metrics.
        # An uninterrupted run would not, so this must not save a checkpoint.
        is_known = index.manifest.step == self._resumed_index
        if utility is None or (is_known and not self._is_renewed(step)):
            return state
        if self._kept.note_score(step, HELD_OUT_UTILITY, utility):
            logging.info("step %d: held-out utility %+.3f, the best", step, utility)
            self._stage.save(step, state, self._checkpoint_details)
        return state

    def _is_renewed(self, step: int) -> bool:
        """Returns whether a rolling index has been renewed completely at this step."""
        if not self._is_rolling or step % self._config.refresh_period:
            return False
        return step > self._refresher.index.manifest.step

    def _searcher(self, step: int, state: TrainState) -> Searcher:
        """Returns a searcher of the index in use."""
        if state.index is None:
            return self._refresher.index.searcher
        return self._searcher_of(state.index, step)

    def _fill_in_spans(self, step: int, state: TrainState) -> float | None:
        """Measures on held-out sentences; returns the utility, if there are any."""
        stopwatch = self._stage.stopwatch
        stopwatch.wait_for(state.params)
        self._stage.require_finite(step, state.params)
        with stopwatch.part(Part.SWAP):
            return self._metrics.of_spans(state.params, self._searcher(step, state))

    def _measure_last(self, step: int, state: TrainState, metrics: Means) -> None:
        """Measures after the last update, whose checkpoint is saved in any case."""
        if step == self._config.train_steps:
            utility = self._fill_in_spans(step, state)
            if utility is not None:
                self._kept.note_score(step, HELD_OUT_UTILITY, utility)

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
        self._client.use(index.manifest.step, self._kept.index_steps)
        if replaced is None:
            self._metrics.record_first(step, params, index.searcher)
            return
        self._stage.stopwatch.wait_for(params)
        self._stage.require_finite(step, params)
        old = replaced.searcher
        if self._renewed is not None:
            old = self._searcher_of(self._renewed, step)
        self._metrics.record_swap(step, params, old, index.searcher)
        self._metrics.add("index_swap_seconds", self._refresher.swap_seconds)

    def _log_extra(self, step: int) -> Mapping[str, float]:
        """Returns staleness, builder progress, and measurements since the last line."""
        return {
            **self._refresher.staleness(step),
            **self._client.builder_progress(),
            **self._metrics.take(),
        }

    def _checkpoint_details(self, step: int) -> Mapping[str, Any]:
        index_step = self._refresher.index.manifest.step
        details = {
            "index_step": index_step,
            **self._refresher.details(),
            **self._step_inputs.details(),
        }
        if self._metrics.is_due:
            details[_MEASURED] = self._metrics.pending
        details = self._kept.add(step, details)
        self._client.use(index_step, self._kept.index_steps)
        return details

    def _beat(self, step: int, state: TrainState, metrics: Means) -> None:
        self._client.beat(step)
