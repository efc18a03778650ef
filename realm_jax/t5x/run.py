"""The stage that T5X trains, and the inputs of its updates.

T5X asks for the inputs of an update without passing its state. So the trainer hands
over a copy of the retriever, with every summary and at every multiple of
REFRESH_PERIOD, and queries are embedded with the last copy.
"""

import dataclasses
import math
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import flax.core
import jax
import numpy as np
from absl import app
from jaxtyping import Int, PyTree

from realm_jax import multihost
from realm_jax.data.corpus_size import of_corpus
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.index.embed import local_mesh, place_locally
from realm_jax.run_record import Attempt
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.finetune import FinetuneConfig, QuestionInputs
from realm_jax.training.index_client import IndexClient
from realm_jax.training.lease import Lease
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.stage import StageParts
from realm_jax.training.stage_config import UpdateShapes
from realm_jax.training.state import TrainState
from realm_jax.training.warm_start import WarmStartConfig
from realm_jax.training.warm_start_loss import WarmStartInputs
from realm_jax.types import Array, InverseClozeBatch, PretrainBatch

Config = WarmStartConfig | PretrainConfig | FinetuneConfig

Batch = dict[str, Array]
"""The arrays of a step's inputs by their path, such as "candidates/block_ids"."""


class T5XStage(StageParts[Any]):
    """A stage that T5X trains: what its model, dataset and trainer share.

    Attributes:
      shapes: the loss, the frozen parameters and the inputs of an update.
      stop: ends waiting for an index.
    """

    config: Config

    def __init__(self, config: Config):
        """Opens the corpus; the configuration is that of a stage of `realm`."""
        _require_supported(config)
        is_finetuned = isinstance(config, FinetuneConfig)
        make_reader = (
            config.make_reader if is_finetuned else config.models.knowledge_encoder
        )
        # Each process searches alone: a search begins in another thread than updates.
        super().__init__(config, make_reader, local_mesh())
        self.shapes = self._update_shapes()
        self.stop = threading.Event()
        self._part = (0, 1)
        self._handed_over = threading.Event()
        self._lease: Lease | None = None
        self._inputs: _Inputs | None = None

    def _update_shapes(self) -> UpdateShapes:
        config = self.config
        corpus = of_corpus(config.corpus, config.tasks)
        assert corpus is not None  # It is open.
        given = (self.retriever, corpus, self.mesh)
        if isinstance(config, WarmStartConfig):
            return warm_start.update_shapes(config, *given)
        if isinstance(config, FinetuneConfig):
            return finetune.update_shapes(config, *given)
        # The step is given its candidates, as with ScaNN.
        return pretrain.update_shapes(
            dataclasses.replace(config, searcher="scann"), *given
        )

    def make_part(self, index: int, count: int) -> None:
        """Has this process make one part of each batch, from another thread."""
        self._part = (index, count)
        app.install_exception_handler(_EndsWaiting(self))

    @property
    def local_batch_size(self) -> int:
        """Examples of a batch that this process makes."""
        return self.config.batch_size // self._part[1]

    def _own_rows(self, batch_size: int) -> Int[np.ndarray, " row"]:
        index, count = self._part
        return np.split(np.arange(batch_size), count)[index]

    def begin(self, step: int, retriever: PyTree) -> None:
        """Makes inputs from a step on; the trainer calls it before its first update."""
        self._lease = Lease(self.model_store)
        self.details = {} if step else None
        Attempt(self.config.stage.command, self.config).begin(self.describe())
        self.hand_over(step, retriever)
        self._handed_over.set()

    def hand_over(self, step: int, retriever: PyTree) -> None:
        """Replaces the retriever that embeds queries, and that is published."""
        retriever = flax.core.unfreeze(multihost.fetch(retriever))
        self.state = TrainState(
            step=np.int32(step),  # pyright: ignore[reportArgumentType]
            params={"retriever": place_locally(retriever)},
            optimizer_state=None,
            key=None,  # pyright: ignore[reportArgumentType]
        )

    def next_hand_over(self, step: int) -> float:
        """Returns the step before which the trainer must hand over, after `step`."""
        if not isinstance(self.config, PretrainConfig):
            return math.inf
        period = self.config.refresh_period
        return (step // period + 1) * period

    def at(self, done: int | None) -> tuple[int, Batch]:
        """Returns a step and the inputs of the update after it.

        `done` are the updates for which inputs were made; None for those of the state.
        """
        while not self._handed_over.wait(1.0):
            if self.stop.is_set():
                raise StoppedError("training has ended before its first update")
        if self._inputs is None:
            self._inputs = _make_inputs(self)
        step = int(self.state.step) if done is None else done
        return step, to_batch(self._inputs.at(step, self.state))

    def scalars(self, step: int) -> Mapping[str, float]:
        """Returns further values for T5X's summaries."""
        return {} if self._inputs is None else self._inputs.scalars(step)

    def close(self, *, is_finished: bool) -> None:
        """Publishes the last retriever if training is finished, and lets others in."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None:
            inputs.close(self.state, is_finished=is_finished)
        self.stop.set()
        if self._lease is not None:
            self._lease.release()


def _require_supported(config: Config) -> None:
    found = ""
    if isinstance(config, WarmStartConfig):
        if config.task or not config.pairs_task:
            found = f"PAIRS_TASK={config.pairs_task!r} with TASK={config.task!r}"
        if config.bm25_weight:
            found = f"BM25_WEIGHT={config.bm25_weight}"
    if isinstance(config, PretrainConfig):
        if config.index_in_state:
            found = f"REFRESH_MODE={config.refresh_mode!r} and write_back"
        if config.embeddings_from_index:
            found = "embeddings_from_index"
    if isinstance(config, FinetuneConfig) and config.is_refreshed:
        found = f"REFRESH_MODE={config.refresh_mode!r} for fine-tuning"
    if found:
        raise BadInputError(
            "expected PAIRS_TASK alone for a warm start by T5X, and for pre-training "
            "an index that comes from snapshots and embeddings that the step computes, "
            f"and for fine-tuning the first index, got {found}; train with "
            f"`realm {config.stage.command}`, or change it"
        )


class _EndsWaiting(app.ExceptionHandler):
    """Has T5X end at an error while a thread of it waits for an index."""

    def __init__(self, run: T5XStage):
        self._run = run

    def handle(self, exc: BaseException) -> None:
        self._run.stop.set()
        self._run.close(is_finished=False)


class _Inputs(Protocol):
    """Makes the inputs of the updates of a stage."""

    def at(self, step: int, state: TrainState) -> Any:
        """Returns this process's rows of the inputs of the next update."""

    def scalars(self, step: int) -> Mapping[str, float]:
        """Returns further values for T5X's summaries."""
        return {}

    def close(self, state: TrainState, *, is_finished: bool) -> None:
        """Ends what is in the background."""


def _make_inputs(run: T5XStage) -> _Inputs:
    if isinstance(run.config, WarmStartConfig):
        return _Pairs(run, run.config)
    if isinstance(run.config, FinetuneConfig):
        return _Questions(run, run.config)
    return _Sentences(run, run.config)


class _Pairs(_Inputs):
    """Sentence-block pairs, for the inverse cloze task."""

    def __init__(self, run: T5XStage, config: WarmStartConfig):
        self._run = run
        self._pairs = run.open_examples(config.pairs_task, "train")

    def at(self, step: int, state: TrainState) -> WarmStartInputs:
        batch = self._run.batch(self._pairs, step)
        return WarmStartInputs(InverseClozeBatch(**batch), None)


class _Questions(_Inputs):
    """Questions with the blocks that the frozen index finds."""

    def __init__(self, run: T5XStage, config: FinetuneConfig):
        local = dataclasses.replace(config, batch_size=run.local_batch_size)
        index = finetune.frozen_index(run, local, run.stop)
        self._inputs = QuestionInputs(run, local, index)

    def at(self, step: int, state: TrainState) -> Any:
        return self._inputs.at(step, state)


class _Sentences(_Inputs):
    """Masked sentences with the candidates that the newest index finds."""

    def __init__(self, run: T5XStage, config: PretrainConfig):
        self._run = run
        self._examples = run.open_examples(config.task, "train")
        local = dataclasses.replace(config, batch_size=run.local_batch_size)
        self._search = pretrain.host_search(run, local)
        source = run.index_source(config.searcher, config.embed, config.device)
        step, patience = int(run.state.step), config.builder_patience_seconds
        self._client = IndexClient(source, run.stop, patience, step, run._lease)
        self._refresher = pretrain.make_refresher(run, config, self._client)
        # Every index of this directory up to the step is of this run.
        saved = [found for found in source.series.steps() if found <= step]
        newest = multihost.from_first(max(saved, default=None))
        self._refresher.start(
            step, run.state.params["retriever"], newest if step else None
        )

    def at(self, step: int, state: TrainState) -> Any:
        retriever = state.params["retriever"]
        index = self._refresher.before_step(step, retriever)
        self._client.beat(step)
        return self._search(step, retriever, index, self._batch_at)

    def scalars(self, step: int) -> Mapping[str, float]:
        return {
            **self._refresher.staleness(step),
            "index_swaps": float(self._refresher.num_swaps),
        }

    def close(self, state: TrainState, *, is_finished: bool) -> None:
        if is_finished:
            self._client.finish(int(state.step), state.params["retriever"])
        self._client.__exit__(None, None, None)

    def _batch_at(self, step: int) -> PretrainBatch:
        return PretrainBatch(**self._run.batch(self._examples, step))


def to_batch(inputs: Any) -> Batch:
    """Returns the arrays of a step's inputs by their path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(inputs)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }
