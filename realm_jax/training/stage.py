"""Shared parts of the training stages: models, state, resuming, checkpoints."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PyTree

from realm_jax import axes, multihost, placement
from realm_jax.data.batch_order import Spans
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import AnyFeature, Examples
from realm_jax.data.features import Example
from realm_jax.data.mixture import Mixture
from realm_jax.errors import BadInputError
from realm_jax.index.device_search import Precision, empty_table
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.index.source import IndexSource
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.run_record import Attempt, Trained
from realm_jax.storage import Store, open_store
from realm_jax.training import checkpoints, initialization, partitioning
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.checkpoints import Checkpointer
from realm_jax.training.finite import FiniteUpdates
from realm_jax.training.initialization import Reader
from realm_jax.training.lease import Lease
from realm_jax.training.optimizers import learning_rate_schedule, make_optimizer
from realm_jax.training.packed_updates import PackedLengths, choose_packed_lengths
from realm_jax.training.recorded import TRAINED, open_run
from realm_jax.training.stage_config import StageConfig
from realm_jax.training.starting import starting_params
from realm_jax.training.state import TrainState, create_state, place_state
from realm_jax.training.step import SKIPPED_UPDATES, Loss, Step, make_step
from realm_jax.training.step_timing import Part, Stopwatch

_log = logging.getLogger(__name__)

ReaderT = TypeVar("ReaderT", bound=Reader)

CheckpointDetails = Callable[[], Mapping[str, Any]]
"""Returns the details of a checkpoint beyond those of every stage."""


class Report(Protocol):
    """Shows how many updates are done, with their metrics.

    Or, if `what` is not empty, how much of that: blocks that are embedded before the
    first update or between two.
    """

    def __call__(
        self, done: int, total: int, values: Mapping[str, float], what: str = "", /
    ) -> None:
        """Shows it; called more often than can be read."""


def _show_nothing(
    done: int, total: int, values: Mapping[str, float], what: str = ""
) -> None:
    del done, total, values, what


class StageParts(Generic[ReaderT]):
    """The parts of a stage that make its inputs, whatever trains it.

    Attributes:
      report: shows the progress.
      details: details of the checkpoint that was restored, None for a new run.
    """

    state: TrainState
    details: Mapping[str, Any] | None

    def __init__(
        self,
        config: StageConfig,
        make_reader: Callable[[BertConfig], ReaderT],
        mesh: Mesh,
        report: Report = _show_nothing,
    ):
        self.config = config
        self.report = report
        self.mesh = mesh
        config.require_divisible(placement.num_parts(mesh))
        # Each host reads its own copy; a damaged one ends all processes.
        self.corpus = multihost.run_on_all(
            lambda: BlockStore.open(config.corpus, verify=config.verify_files)
        )
        self.model_store: Store = open_store(config.model_dir)
        vocab_size = self.corpus.vocabulary.size
        self.retriever_config: RetrieverConfig = config.models.retriever_config(
            vocab_size
        )
        self.retriever = Retriever(self.retriever_config)
        self.reader = make_reader(self.retriever_config.bert)
        self.stopwatch = Stopwatch()

    def index_source(
        self,
        searcher: str,
        embed: EmbedConfig,
        device: DeviceConfig | None = None,
    ) -> IndexSource:
        """Returns the source of this run's indexes, at its documents' length."""
        return IndexSource(
            model_store=self.model_store,
            corpus=self.corpus,
            config=self.retriever_config,
            embed=embed.at_length(self.config.models.lengths.document),
            searcher=searcher,
            mesh=self.mesh,
            device=device or DeviceConfig(),
            donors=self.config.donors,
            on_progress=self._show_embedded,
        )

    def _show_embedded(self, done: int, num_blocks: int) -> None:
        self.report(done, num_blocks, {}, "blocks embedded")

    def open_examples(
        self, task: str, split: str, *, of_corpus: bool = True
    ) -> Examples:
        """Opens CORPUS/examples/TASK/SPLIT, made from this very corpus if `of_corpus`.

        Questions are only in its vocabulary. Masked sentences have to fit into a query.
        """

        def open_fitting() -> Examples:
            examples = open_examples(
                self.corpus,
                task,
                split,
                of_corpus=of_corpus,
                verify=self.config.verify_files,
            )
            if "mask_ids" in examples.specs:
                _require_fitting(examples, self.config.models.lengths.query)
            return examples

        return multihost.run_on_all(open_fitting)

    def batch(
        self,
        examples: Examples | Mixture,
        step: int,
        batch_size: int | None = None,
    ) -> Example:
        """Returns this process's rows of a batch.

        Its size, None for the configuration's, is over all devices.
        """
        config = self.config
        size = batch_size or config.batch_size
        spans = Spans(config.spans)
        rows = examples.step_rows(step, batch_size=size, seed=config.seed, spans=spans)
        rows = rows[self._own_rows(size)]
        if spans is Spans.TOGETHER:
            return examples.together(rows)
        return examples.batch(rows)

    def packed_lengths(
        self,
        query_ids: AnyFeature,
        *,
        num_documents: int,
        num_joined: int,
        num_queries: int = 0,
    ) -> PackedLengths | None:
        """Returns the lengths of rows that two sequences share; None to pack none.

        An update embeds `num_documents` with a gradient and `num_queries`, and reads
        `num_joined`.
        """
        config = self.config
        if not config.pack_documents:
            return None
        parts = config.microbatches * axes.num_batch_shards(self.mesh.shape)
        chosen = choose_packed_lengths(
            self.corpus,
            query_ids,
            config.models.lengths,
            num_documents=num_documents // parts,
            num_joined=num_joined // parts,
            num_queries=num_queries // parts,
        )
        _log.info("PACK_DOCUMENTS: %s", _describe_packing(chosen))
        return chosen

    def describe(self) -> Trained:
        """Returns the record of what is trained."""
        config, bert = self.config, self.retriever_config.bert
        return Trained(
            stage=config.stage.name,
            model=initialization.describe(self.retriever_config),
            lengths=dataclasses.asdict(config.models.lengths),
            corpus_fingerprint=self.corpus.fingerprint,
            vocabulary_fingerprint=self.corpus.vocabulary.fingerprint,
            data_order=config.data_order(),
            numerics={"dtype": bert.dtype, "products": bert.products},
            **config.recorded(),
        )

    def _own_rows(self, batch_size: int) -> Int[np.ndarray, " row"]:
        return placement.local_rows(self.mesh, batch_size)


class Stage(StageParts[ReaderT]):
    """A training stage of one run, continued from its latest checkpoint.

    Attributes:
      step: number of updates done, as in the state, which may still be computed.
      finite: the updates, as far as they have been found finite.
      learning_rate: (updates done) -> learning rate of the next update.
    """

    def __init__(
        self,
        config: StageConfig,
        make_reader: Callable[[BertConfig], ReaderT],
        frozen: tuple[str, ...] = (),
        index: Precision | None = None,
        report: Report = _show_nothing,
        attempt: Attempt | None = None,
    ):
        """Opens corpus and model directory; draws, warm-starts or restores the state.

        `frozen` are parameter paths that are not trained. An index in the state, of a
        given precision, is all zeros until it is replaced, unless it was restored.
        `attempt` records the run when its work begins; None is for one of the library.
        """
        mesh = partitioning.make_mesh(config.mesh)
        super().__init__(config, make_reader, mesh, report)
        self._frozen = frozen
        of_optimizer = config.optimizer(total_steps=config.train_steps)
        self._optimizer = make_optimizer(of_optimizer, frozen)
        self.learning_rate = learning_rate_schedule(of_optimizer)
        partitioning.require_models_split(self.mesh, self.retriever_config.bert)
        self._attempt = attempt or Attempt(config.stage.command, config)
        self._trained = self.describe()
        self._check_resumable()
        self.lease = Lease(self.model_store)
        try:
            self._checkpointer = Checkpointer(
                self.model_store, require_alone=self.lease.require_held
            )
            self.state, self.details = self._restore_or_create(index)
            self.step = int(self.state.step)
            self.finite = FiniteUpdates(
                config.skip_nonfinite_updates,
                (self.details or {}).get(SKIPPED_UPDATES, 0),
            )
            self.require_finite(self.state)
        except BaseException:
            self.lease.release()
            raise

    @property
    def is_done(self) -> bool:
        """True if all updates are done."""
        return self.step >= self.config.train_steps

    def begin(self) -> None:
        """Records the attempt, before anything is trained or saved."""
        self._attempt.begin(self._trained)

    def make_step(self, loss: Loss) -> Step:
        """Returns the jitted update of `state`."""
        return make_step(
            loss,
            self._optimizer,
            self._frozen,
            skip_nonfinite=self.config.skip_nonfinite_updates > 0,
            separate_gradient_and_update=self.mesh.devices.flat[0].platform == "cpu",
        )

    def save(self, more_details: CheckpointDetails = dict) -> None:
        """Saves the state, which has to be finite, as a checkpoint with details."""
        self.begin()  # One without updates is saved without a loop.
        self.stopwatch.wait_for(self.state)
        with self.stopwatch.part(Part.CHECKPOINT):
            self.require_alone()
            self.require_finite(self.state)
            details = {**more_details(), "train_steps": self.config.train_steps}
            details[TRAINED] = dataclasses.asdict(self._trained)
            if self.finite.num_skipped:
                details[SKIPPED_UPDATES] = self.finite.num_skipped
            self._checkpointer.save(self.state, details)

    def require_finite(self, tree: PyTree) -> None:
        """Waits for a tree, such as the state, and requires that it is finite."""
        self.stopwatch.wait_for(tree)
        self.finite.require(self.step, tree)

    def require_alone(self) -> None:
        """Requires that no other trainer has taken over; all processes call it."""
        multihost.run_on_primary(self.lease.require_held)

    def close(self) -> None:
        """Finishes the checkpoint being saved, and lets the next trainer in."""
        try:
            self._checkpointer.close()
        finally:
            self.lease.release()

    def _check_resumable(self) -> None:
        run = open_run(self.config.model_dir)
        if run is None:
            return
        for change in run.trained.differences(self._trained.identity()):
            raise BadInputError(
                f"expected a run with {change.name} {change.first!r} in "
                f"{self.model_store.url()}, but it was begun with {change.second!r}; "
                "use another MODEL_DIR, or the settings that run was started with"
            )
        if run.step > self.config.train_steps:
            raise BadInputError(
                f"expected TRAIN_STEPS of at least {run.step}, the updates of the "
                f"newest checkpoint in {self.model_store.url()}, got "
                f"{self.config.train_steps}; raise it, or use another MODEL_DIR"
            )

    def _restore_or_create(
        self, index: Precision | None
    ) -> tuple[TrainState, Mapping[str, Any] | None]:
        config = self.config
        params, params_axes = initialization.initial_params(
            self.retriever, self.reader, config.models.lengths, config.seed
        )
        newest = multihost.run_on_primary(lambda: finished_steps(self.model_store))
        if not newest:
            params = starting_params(params, config, self.retriever_config, self.corpus)
        state = place_state(
            create_state(params, self._optimizer, config.seed),
            partitioning.parameter_shardings(self.mesh, params_axes),
            self.mesh,
        )
        if index is not None:
            state = state.replace(
                index=empty_table(
                    self.corpus.num_blocks,
                    self.retriever_config.projection_size,
                    self.mesh,
                    index,
                )
            )
        restored = checkpoints.restore_state(self.model_store, state)
        if restored is None:
            return state, None
        return restored.tree, restored.details


def _describe_packing(lengths: PackedLengths | None) -> str:
    if lengths is None:
        return "this corpus leaves too little of a row empty; nothing is packed"
    rows = [
        f"{length} wordpieces of {model}"
        for length, model in (
            (lengths.document, "the document tower"),
            (lengths.joined, "the reader"),
            (lengths.query, "the query tower"),
        )
        if length is not None
    ]
    return f"two sequences share a row of {' or '.join(rows)}, where they fit"


def _require_fitting(examples: Examples, query_length: int) -> None:
    # Cut like questions, a sentence could lose its mask.
    (length,) = examples.specs["query_ids"].shape
    if length > query_length:
        raise BadInputError(
            f"expected QUERY_LENGTH of at least {length}, with which the sentences in "
            f"{examples.directory} were prepared, got {query_length}; raise it, or "
            "prepare them again with a shorter one"
        )


def open_examples(
    corpus: BlockStore,
    task: str,
    split: str,
    *,
    of_corpus: bool = True,
    verify: bool = False,
) -> Examples:
    """Opens the examples of a prepared corpus; see `Stage.open_examples`."""
    expect = {"corpus_fingerprint": corpus.fingerprint}
    if not of_corpus:
        expect = {"vocabulary_fingerprint": corpus.vocabulary.fingerprint}
    folder = corpus.directory / "examples" / task / split
    return Examples.open(folder, expect, verify=verify, corpus=corpus)
