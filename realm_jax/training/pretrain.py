"""REALM pre-training on masked sentences, retrieved documents and a refreshed index."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from jax.sharding import Mesh

from realm_jax import ranges
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
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.objectives import pretraining
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.retrieval import Normalization
from realm_jax.run_record import Attempt
from realm_jax.stages import PRETRAIN, StageSpec
from realm_jax.storage import absolute_url
from realm_jax.training.candidate_search import (
    DeviceSearch,
    HostSearch,
    RetrievingInputs,
    RetrievingLoss,
)
from realm_jax.training.checkpoint_manifests import (
    HELD_OUT_UTILITY,
    HOLDS_INDEX,
)
from realm_jax.training.checkpoints import KeptCheckpoints
from realm_jax.training.index_client import IndexClient
from realm_jax.training.index_metrics import IndexMetrics
from realm_jax.training.loop import train_loop
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.pretrain_loss import PretrainInputs, PretrainLoss
from realm_jax.training.refresh import (
    Refresher,
    RefreshMode,
    StalenessBound,
    WhenStale,
    blocking_rebuilds,
)
from realm_jax.training.rolling_refresh import Renewal, RenewingLoss
from realm_jax.training.stage import Report, Stage, StageParts
from realm_jax.training.stage_config import (
    SOME_PIECES,
    IndexUse,
    StageConfig,
    UpdateShapes,
    batch_of,
    require_one_of,
    shapes_of,
)
from realm_jax.training.step import Loss
from realm_jax.training.step_timing import Part
from realm_jax.types import Candidates, PretrainBatch

_MEASURED = "measured"
"""In a checkpoint's details: measurements for the next line of metrics."""


@dataclasses.dataclass(frozen=True)
class PretrainConfig(StageConfig):
    """A pre-training run; see `StageConfig` for the shared attributes.

    Attributes:
      task: name of the task of masked sentences, such as "my_salient".
      num_candidates: documents per example, the null document included.
      own_block: whether one of them is the block that the sentence was taken from, read
        without the sentence, instead of a retrieved one; see `index/candidates.py`.
      refresh_mode: "off", "blocking", "async" (`realm build-index` beside this job) or
        "rolling"; see `refresh.py`.
      refresh_period: steps between two refreshes.
      write_back: whether the embeddings that a step computes of its candidates replace
        their rows in the index; see `rolling_refresh.py`.
      max_staleness_steps: maximum age of the index of "async", in steps; None for any.
      when_stale: "wait" for a newer one, "warn" or "stop".
      searcher: "device" (inside the step) or "scann" (on the host).
      search_ahead: whether "scann" searches for the next update while one is running;
        see `candidate_search.py`.
      device: how "device" searches.
      marginalization: "per_span" (the paper) or "per_token" (the authors' code).
      normalization: of p(z|x) in the loss: over the "candidates" of a sentence (the
        paper) or over the whole "batch"; see `objectives/retrieval.py`.
      objective: "marginal_likelihood" (the paper), or one that a module of yours
        registers; see `objectives/pretraining.py`. That follows `normalization` if it
        uses `Evidence.log_share`.
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
    objective: str = pretraining.MARGINAL_LIKELIHOOD
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
        pretraining.registered(self.objective)
        if self.num_candidates < 2 + self.own_block:
            raise BadInputError(
                f"expected NUM_CANDIDATES of at least {2 + self.own_block} (the null "
                f"document{', the own block' if self.own_block else ''} and one that "
                f"is retrieved), got {self.num_candidates}"
            )

    def _require_exact_index(self) -> None:
        """Requires an index that steps can read, of a tower that does not train."""
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
        """True if the number of held-out sentences was set, so that they must exist."""
        return self.held_out_examples not in (0, PretrainConfig.held_out_examples)

    @property
    def index_use(self) -> IndexUse:
        """An index that is refreshed while the stage trains."""
        mode = RefreshMode(self.refresh_mode)
        rebuilds = blocking_rebuilds(mode, self.train_steps, self.refresh_period)
        embed = self.embed.at_length(self.models.lengths.document)
        return IndexUse(
            self.searcher,
            embed,
            rebuilds,
            mode,
            device=self.device,
            is_in_step=self.searcher == "device",
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
      NotReadyError: the index builder has not made one in time.
    """
    # Without an update nothing is saved.
    ranges.require_ranges(config, train_steps=ranges.whole(1))
    stage = Stage(
        config,
        config.models.knowledge_encoder,
        frozen=frozen_parameters(config),
        index=Precision(config.device.precision) if config.index_in_state else None,
        report=report,
        attempt=attempt,
    )
    with contextlib.closing(stage):
        source = stage.index_source(config.searcher, config.embed, config.device)
        patience = config.builder_patience_seconds
        with IndexClient(source, stop, patience, stage.step, stage.lease) as client:
            if not stage.is_done:
                _Pretraining(stage, config, client).train(stop)
            if stage.is_done:
                # The builder embeds the corpus once more, for later stages. A run that
                # was already done publishes too, as a builder may be waiting for it.
                client.finish(stage.step, stage.state.params["retriever"])
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
    """Returns the loss of a run, which searches and renews the index if steps do."""
    loss = PretrainLoss(
        retriever=retriever,
        reader=reader,
        marginalization=Marginalization(config.marginalization),
        normalization=Normalization(config.normalization),
        microbatches=config.microbatches,
        packing=packing,
        objective=pretraining.registered(config.objective),
    )
    if config.searcher != "device":
        return loss
    retrieving = (
        loss,
        config.num_candidates,
        layout,
        mesh,
        config.device.approximate,
        config.embeddings_from_index,
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


def host_search(stage: StageParts[Any], config: PretrainConfig) -> HostSearch:
    """Returns the search of a run whose updates are given their candidates."""
    return HostSearch(
        retriever=stage.retriever_config,
        corpus=stage.corpus,
        lengths=config.models.lengths,
        num_candidates=config.num_candidates,
        mesh=stage.mesh,
        batch_size=config.batch_size,
        ahead=config.search_ahead,
        stopwatch=stage.stopwatch,
        own_block=config.own_block,
    )


def make_refresher(
    stage: StageParts[Any], config: PretrainConfig, client: IndexClient
) -> Refresher:
    """Returns what keeps the index of a run fresh, still to be started."""
    return Refresher(
        RefreshMode(config.refresh_mode),
        config.refresh_period,
        client,
        wait_seconds=config.wait_seconds,
        bound=StalenessBound(config.max_staleness_steps, WhenStale(config.when_stale)),
        slices=(stage.mesh.size, config.embed.batch_size, config.refresh_period),
    )


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
            num_queries=config.batch_size,
        )
        layout = DocumentLayout.of(config.models.lengths, stage.corpus.vocabulary)
        of_models = (stage.retriever, stage.reader)
        self._loss = make_loss(config, *of_models, layout, stage.mesh, packing)
        self._find_candidates: DeviceSearch | HostSearch = (
            DeviceSearch(stage.corpus, layout, stage.mesh, config.own_block)
            if config.searcher == "device"
            else host_search(stage, config)
        )
        self._metrics = IndexMetrics(
            stage,
            self._examples,
            questions=config.questions,
            questions_split=config.questions_split,
            num_candidates=config.num_candidates,
            max_spans=config.held_out_examples,
            require_spans=config.requires_held_out,
        )
        self._kept = KeptCheckpoints(stage.model_store)
        self._refresher = make_refresher(stage, config, client)

    def train(self, stop: threading.Event) -> None:
        """Trains until the last update or a stop: the loop of pre-training.

        A retriever is published before the update after its step, so that a snapshot
        holds exactly the parameters that its step names, and an index is swapped before
        it is searched. If none came that is fresh enough, the state is saved.
        """
        stage, refresher = self._stage, self._refresher
        self._begin()
        first = stage.step
        with train_loop(stage, self._loss, stop, self._details) as loop:
            for done in loop:
                # Publishes or embeds, if it is time, and takes a newer index.
                swapped = self._refresh(done)
                renewed = refresher.has_renewed(done)
                if renewed:
                    self._measure_renewal(done)
                if swapped or renewed or done == first:
                    utility = self._held_out_utility()
                    # An uninterrupted run would not measure the index with which this
                    # one resumed: that is for the metrics, and saves nothing.
                    resumed = refresher.index.manifest.step == self._resumed_index
                    if (renewed or not resumed) and self._note_utility(utility):
                        stage.save(self._details)

                loop.update(self._batch_and_candidates(done))

                if stage.is_done:
                    self._note_utility(self._held_out_utility())
                # Every index gets a line, so that its recall is recorded.
                loop.log(self._state_of_index, now=self._metrics.is_due)
                self._client.beat(stage.step)
                loop.save_if_due()
        logging.info("swapped to a newer index %d times", refresher.num_swaps)
        if refresher.failure is not None:
            raise refresher.failure

    def _begin(self) -> None:
        """Gets the index of the first update: of the checkpoint, or a new one."""
        stage, refresher, saved = self._stage, self._refresher, self._resumed_index
        details, table = stage.details or {}, stage.state.index
        retriever = stage.state.params["retriever"]
        self._find_candidates.resume(details, self._batch_at)
        self._metrics.resume(details.get(_MEASURED, {}))
        self._client.keep(self._kept.index_steps)
        if saved is not None and table is not None and details.get(HOLDS_INDEX):
            searcher = self._searcher_over(table, saved)
            index = LoadedIndex(searcher, self._client.manifest(saved))
            refresher.adopt(stage.step, index, details)
        else:
            refresher.start(stage.step, retriever, saved)
            self._put_into_state(refresher.index)
        self._metrics.record_recall(stage.step, retriever, refresher.index.searcher)

    @property
    def _resumed_index(self) -> int | None:
        """Version of the index with which this process resumed; None in a new run."""
        details = self._stage.details
        return None if details is None else details["index_step"]

    def _refresh(self, done: int) -> bool:
        """Gets the index of the next update; returns whether it replaces another."""
        stage, refresher = self._stage, self._refresher
        retriever = stage.state.params["retriever"]
        if refresher.is_due(done):
            stage.require_finite(retriever)
        with stage.stopwatch.part(Part.SWAP):
            replaced = refresher.index
            index = refresher.before_step(done, retriever)
            if index is replaced:
                return False
            stage.require_finite(retriever)
            old, table = replaced.searcher, stage.state.index
            if table is not None:
                old = self._searcher_over(table, done)
            self._metrics.record_swap(done, retriever, old, index.searcher)
            self._metrics.add("index_swap_seconds", refresher.swap_seconds)
            self._put_into_state(index)
        return True

    def _put_into_state(self, index: LoadedIndex) -> None:
        """Makes an index part of the state, whose updates change it, if it has one."""
        stage = self._stage
        if stage.state.index is not None:
            stage.state = stage.state.replace(index=index.searcher.table)

    def _searcher_over(self, table: EmbeddingTable, step: int) -> DeviceSearcher:
        stage, config = self._stage, self._config
        return DeviceSearcher.over(
            table, stage.corpus.num_blocks, step, stage.mesh, config.device
        )

    def _searcher(self) -> Searcher:
        table = self._stage.state.index
        if table is None:
            return self._refresher.index.searcher
        return self._searcher_over(table, self._stage.step)

    def _measure_renewal(self, done: int) -> None:
        stage, retriever = self._stage, self._stage.state.params["retriever"]
        stage.require_finite(retriever)
        with stage.stopwatch.part(Part.SWAP):
            self._metrics.record_renewal(done, retriever, self._searcher())

    def _held_out_utility(self) -> float | None:
        stage = self._stage
        stage.require_finite(stage.state.params)
        with stage.stopwatch.part(Part.SWAP):
            return self._metrics.of_spans(stage.state.params, self._searcher())

    def _note_utility(self, utility: float | None) -> bool:
        """Notes the score of this step's checkpoint; returns whether it is the best."""
        step = self._stage.step
        if utility is None or not self._kept.note_score(
            step, HELD_OUT_UTILITY, utility
        ):
            return False
        logging.info("step %d: held-out utility %+.3f, the best", step, utility)
        return True

    def _batch_and_candidates(self, done: int) -> PretrainInputs | RetrievingInputs:
        """Returns the inputs of the next update: with candidates, or to search them."""
        state, index = self._stage.state, self._refresher.index
        inputs = self._find_candidates(
            done, state.params["retriever"], index, self._batch_at
        )
        # An index that is part of the state is not passed a second time.
        return inputs if state.index is None else inputs.replace(embeddings=None)

    def _batch_at(self, step: int) -> PretrainBatch:
        return PretrainBatch(**self._stage.batch(self._examples, step))

    def _state_of_index(self) -> Mapping[str, float]:
        """Returns staleness, builder progress, and measurements since the last line."""
        return {
            **self._refresher.staleness(self._stage.step),
            **self._client.builder_progress(),
            **self._metrics.take(),
        }

    def _details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold for a resumed run to be the same."""
        details = {
            "index_step": self._refresher.index.manifest.step,
            **self._refresher.details(),
            **self._find_candidates.details(),
        }
        if self._metrics.is_due:
            details[_MEASURED] = self._metrics.pending
        details = self._kept.add(self._stage.step, details)
        self._client.keep(self._kept.index_steps)
        return details
