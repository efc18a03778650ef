"""Open-QA fine-tuning of query tower and span reader over a frozen document index.

ORQA, section 5; REALM, section 3.4. The document tower stays as pre-training left it,
so its index is built once and is used to the end of training, and by evaluation.
"""

import dataclasses
import threading
from typing import Any, ClassVar

import numpy as np

from realm_jax.errors import BadInputError
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.candidates import question_candidates
from realm_jax.index.embed import EmbedConfig, query_embedder
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.models.bert import BertConfig
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.stages import FINETUNE, StageSpec
from realm_jax.storage import absolute_url
from realm_jax.training.host_search import search_local
from realm_jax.training.loop import Report
from realm_jax.training.losses import FinetuneInputs, FinetuneLoss
from realm_jax.training.partitioning import place_batch
from realm_jax.training.stage import Stage
from realm_jax.training.stage_config import IndexUse, StageConfig, require_one_of
from realm_jax.training.state import TrainState
from realm_jax.training.step_timing import Part
from realm_jax.types import QuestionBatch

ANSWERING = "answering"
"""In a checkpoint's details: see `FinetuneConfig.answering`."""


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(StageConfig):
    """A fine-tuning run; see `StageConfig` for the shared attributes.

    Attributes:
      task: name of the question task.
      searcher: "device" (exact) or "scann".
      num_retrieved: number of blocks in the retriever's loss.
      num_read: number of blocks that are read.
      max_span: length of the longest answer, in wordpieces.
      marginalization: "product" (the paper) or "joint_softmax" (the authors' code).
      span_layer_norm_epsilon: epsilon of the span scorer; 1e-3 in ORQA's readers.
      embed: how the corpus is embedded, once.
    """

    stage: ClassVar[StageSpec] = FINETUNE

    searcher: str = "device"
    num_retrieved: int = 5000
    num_read: int = 5
    max_span: int = 10
    marginalization: str = "product"
    span_layer_norm_epsilon: float = 1e-3
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)

    def __post_init__(self):
        super().__post_init__()
        require_one_of("marginalization", self.marginalization, AnswerMarginalization)
        if not 1 <= self.num_read <= self.num_retrieved:
            raise BadInputError(
                f"expected num_read among 1..{self.num_retrieved} (num_retrieved), got "
                f"{self.num_read}; the blocks that are read are the best retrieved"
            )

    @property
    def index_use(self) -> IndexUse:
        """An index that is built once, at the start."""
        embed = self.embed.at_length(self.models.lengths.document)
        return IndexUse(self.searcher, embed)

    def data_order(self) -> dict[str, Any]:
        """Returns the settings a resumed run must keep, with those of span scoring."""
        order = {**super().data_order(), **self.reading()}
        del order["spans"]  # Questions have none to draw from.
        return order

    def reading(self) -> dict[str, Any]:
        """Returns how spans are scored and marginalised, as evaluation must do too."""
        return {
            "marginalization": self.marginalization,
            "max_span": self.max_span,
            "span_layer_norm_epsilon": self.span_layer_norm_epsilon,
        }

    def answering(self, bert: BertConfig) -> dict[str, Any]:
        """Returns what a checkpoint records so that it can be opened without gin files.

        `evaluation/loading.py` reads it. A resumed run may change any of it, so
        `Stage` does not compare it.
        """
        source = self.retriever_source
        return {
            "corpus": absolute_url(self.corpus),
            "pretrained": absolute_url(source) if source else "",
            "pretrained_checkpoint": self.warm_start_checkpoint,
            "searcher": self.searcher,
            "num_read": self.num_read,
            "dtype": bert.dtype,
            "products": bert.products,
        }

    def make_reader(self, bert: BertConfig) -> SpanReader:
        """Returns the span reader around an encoder."""
        return SpanReader(
            bert,
            max_span=self.max_span,
            layer_norm_epsilon=self.span_layer_norm_epsilon,
        )


def run(config: FinetuneConfig, report: Report, stop: threading.Event) -> bool:
    """Trains from the latest checkpoint; returns whether all updates are done.

    Raises:
      BadInputError: as `Stage`.
      StoppedError: stopped while the corpus was being embedded.
    """
    stage = Stage(
        config.stage.name,
        config,
        config.make_reader,
        frozen=frozen_parameters(config),
    )
    if stage.is_done:
        return True
    try:
        inputs = _Inputs(stage, config, stop)
        loss = FinetuneLoss(
            stage.retriever,
            stage.reader,
            AnswerMarginalization(config.marginalization),
            config.microbatches,
        )
        details = {ANSWERING: config.answering(stage.retriever_config.bert)}
        return stage.train(
            loss,
            inputs.at,
            report=report,
            stop=stop,
            checkpoint_details=lambda step: details,
        )
    finally:
        stage.close()


def frozen_parameters(config: FinetuneConfig) -> tuple[str, ...]:
    """Returns the path of the document tower; none if the towers are shared.

    A shared tower trains, and only its index is frozen: the query side moves away from
    the index it searches, as in the authors' code.
    """
    shared = config.models.retriever_config(vocab_size=1).shared
    return () if shared else ("retriever/document_tower",)


class _Inputs:
    """Searches, reads and labels the questions of a step."""

    def __init__(
        self,
        stage: Stage[SpanReader],
        config: FinetuneConfig,
        stop: threading.Event,
    ):
        self._stage = stage
        self._config = config
        self._examples = stage.open_examples(config.task, "train", of_corpus=False)
        self._embed_queries = query_embedder(stage.retriever_config, stage.mesh)
        self._labels = AnswerLabels(stage.corpus, config.max_span)
        source = stage.index_source(config.searcher, config.embed)
        self._index = source.open_first(
            stage.state.params["retriever"],
            stop,
            resumes=stage.details is not None,
            trained="" if frozen_parameters(config) else "shared tower",
        )
        self._embeddings = source.series.read_array(self._index.manifest, EMBEDDINGS)

    def at(self, step: int, state: TrainState) -> FinetuneInputs:
        """Returns the inputs of the next update."""
        config, lengths = self._config, self._config.models.lengths
        num_blocks = self._stage.corpus.num_blocks
        questions = QuestionBatch(**self._stage.batch(self._examples, step))
        queries = self._embed_queries(
            state.params["retriever"],
            place_batch(self._stage.mesh, questions.question_ids),
        )
        # Waits for the update before.
        self._stage.stopwatch.wait_for(state.step)
        with self._stage.stopwatch.part(Part.SEARCH):
            neighbours = search_local(
                self._index.searcher,
                queries,
                # With fewer blocks in the corpus than are read, some slots stay empty.
                max(config.num_read, min(config.num_retrieved, num_blocks)),
                self._stage.mesh,
            )
            candidates = question_candidates(
                self._stage.corpus,
                neighbours,
                questions.question_ids,
                num_candidates=config.num_read,
                document_length=lengths.document,
                joined_length=lengths.joined,
            )
        block_ids = np.asarray(neighbours.ids)
        return FinetuneInputs(
            # Patterns are matched on the host only; devices cannot take them.
            questions=questions.replace(answer_patterns=None),
            block_embeddings=self._embeddings[np.maximum(block_ids, 0)],
            block_valid=block_ids >= 0,
            block_has_answer=self._labels.blocks(questions, block_ids),
            joined_ids=candidates.joined_ids,
            joined_segment_ids=candidates.joined_segment_ids,
            span_is_answer=self._labels.spans(questions, candidates),
        )
