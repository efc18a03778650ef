"""REALM pre-training: masked sentences, retrieved documents, an index kept fresh."""

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from realm_jax.data.examples import batch_rows
from realm_jax.errors import BadInputError
from realm_jax.evaluation.curves import Level, health, read_curves
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.follower import LoadedIndex
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.training.checkpoints import KEPT_CHECKPOINTS, all_details
from realm_jax.training.held_out import HeldOutQuestions, query_embedder
from realm_jax.training.index_link import IndexLink, IndexSource
from realm_jax.training.loop import Report
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.training.metrics import Means
from realm_jax.training.refresh import Refresher, RefreshMode
from realm_jax.training.stage import Stage, StageConfig, require_one_of
from realm_jax.training.state import TrainState
from realm_jax.types import PretrainBatch

NAME = "pretrain"


@dataclasses.dataclass(frozen=True)
class PretrainConfig(StageConfig):
    """A pre-training run; see `StageConfig` for the shared attributes.

    Attributes:
      task: masked sentences.
      num_candidates: documents per example, the null document included.
      refresh_mode: "off", "blocking" or "async" (`realm build-index` beside this job).
      refresh_period: steps between two refreshes.
      searcher: "device" (exact) or "scann".
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
    searcher: str = "device"
    marginalization: str = "per_span"
    questions: str = ""
    questions_split: str = "dev"
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    frozen: tuple[str, ...] = ()
    wait_seconds: float = 3600.0

    def __post_init__(self):
        require_one_of("REFRESH_MODE", self.refresh_mode, RefreshMode)
        require_one_of("marginalization", self.marginalization, Marginalization)
        if self.num_candidates < 2:
            raise BadInputError(
                f"expected NUM_CANDIDATES of at least 2 (the null document and one "
                f"that is retrieved), got {self.num_candidates}"
            )


def run(config: PretrainConfig, report: Report, stop: threading.Event) -> bool:
    """Trains from the latest checkpoint on; returns whether all updates are done.

    Raises:
      BadInputError: as `Stage`, or the index cannot be had.
    """
    stage = Stage(NAME, config, KnowledgeEncoder, frozen=tuple(config.frozen))
    source = IndexSource(
        stage.model_store,
        stage.corpus,
        stage.retriever_config,
        config.embed.at_length(config.models.lengths.document),
        config.searcher,
    )
    try:
        with IndexLink(source, stop) as link:
            if not stage.is_done:
                _Pretraining(stage, config, link).run(report, stop)
            if stage.is_done:
                # The builder embeds the corpus once more, for what comes after. Said
                # of a run that was done before, too: a builder beside it waits for it.
                link.finish(config.train_steps, stage.state.params["retriever"])
    finally:
        stage.close()
    return stage.is_done


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
        self._embed_queries = query_embedder(stage.retriever_config)
        self._questions = (
            HeldOutQuestions(
                stage.corpus,
                config.questions,
                config.questions_split,
                config.models.lengths.query,
            )
            if config.questions
            else None
        )
        self._recall: dict[str, float] = {}
        # Of the checkpoints that are kept, which garbage collection must not take.
        self._saved: deque[int] = deque(maxlen=KEPT_CHECKPOINTS)
        self._refresher = Refresher(
            RefreshMode(config.refresh_mode),
            config.refresh_period,
            link,
            wait_seconds=config.wait_seconds,
            on_swap=self._on_swap,
        )

    def run(self, report: Report, stop: threading.Event) -> None:
        stage, refresher = self._stage, self._refresher
        saved = stage.details["index_step"] if stage.details is not None else None
        step = int(stage.state.step)
        self._saved.extend(
            details["index_step"] for details in all_details(stage.model_store)
        )
        refresher.start(step, stage.state.params["retriever"], saved)
        stage.train(
            PretrainLoss(
                stage.retriever,
                stage.reader,
                Marginalization(self._config.marginalization),
            ),
            self._inputs_at,
            report=report,
            stop=stop,
            log_extra=self._log_extra,
            # A line for every index, so that none of them goes without its recall.
            log_due=lambda: bool(self._recall),
            checkpoint_details=self._checkpoint_details,
            hooks=[self._beat],
        )
        logging.info("swapped to a newer index %d times", refresher.num_swaps)

    def _inputs_at(self, step: int, state: TrainState) -> PretrainInputs:
        config, lengths = self._config, self._config.models.lengths
        index = self._refresher.before_step(step, state.params["retriever"])
        rows = batch_rows(
            len(self._examples), step, batch_size=config.batch_size, seed=config.seed
        )
        batch = PretrainBatch(**self._examples.batch(rows))
        neighbours = index.searcher.search(
            self._embed_queries(state.params["retriever"], batch.query_ids),
            num_neighbours(config.num_candidates),
        )
        candidates = pretrain_candidates(
            self._stage.corpus,
            jax.device_get(neighbours),
            batch,
            num_candidates=config.num_candidates,
            document_length=lengths.document,
            joined_length=lengths.joined,
        )
        return PretrainInputs(batch, candidates)

    def _on_swap(self, step: int, params: PyTree, index: LoadedIndex) -> None:
        """Measures the new index at once, with the query tower of this moment."""
        self._link.use(index.manifest.step, tuple(self._saved))
        if self._questions is None:
            return
        recall = self._questions.recall(
            self._stage.retriever_config, params, index.searcher, k=5
        )
        self._recall = {"recall_at_5": float(recall.mean())}
        self._warn_of_collapse(step)

    def _warn_of_collapse(self, step: int) -> None:
        """Says early what the report would say late: collapse is money wasted."""
        for finding in health(read_curves([self._config.model_dir])):
            if finding.level is Level.ALARM:
                logging.warning("step %d: %s %s", step, finding.text, finding.advice)

    def _log_extra(self, step: int) -> Mapping[str, float]:
        """Staleness, and recall on the first line after a refresh."""
        recall, self._recall = self._recall, {}
        return dict(self._refresher.staleness(step)) | recall

    def _checkpoint_details(self) -> Mapping[str, Any]:
        step = self._refresher.index.manifest.step
        self._saved.append(step)
        self._link.use(step, tuple(self._saved))
        return {"index_step": step}

    def _beat(self, step: int, state: TrainState, metrics: Means) -> None:
        self._link.beat(step)
