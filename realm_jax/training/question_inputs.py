"""Makes the inputs of fine-tuning: questions, and the blocks found for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from realm_jax.answering.reader import Answerer
from realm_jax.data.examples import Examples
from realm_jax.data.mixture import Mixture
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.candidates import question_candidates
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.training.answer_coverage import require_answers
from realm_jax.training.finetune_loss import FinetuneInputs
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.question_index import FrozenIndex
from realm_jax.training.search_ahead import SearchAhead
from realm_jax.training.stage import StageParts
from realm_jax.training.state import TrainState
from realm_jax.types import Neighbours, QuestionBatch

if TYPE_CHECKING:
    from realm_jax.training.finetune import FinetuneConfig

DOCUMENTS = ("document_ids", "document_segment_ids")
"""The inputs of an update that embeds blocks itself."""


def on_devices(questions: QuestionBatch) -> QuestionBatch:
    """Returns questions without their texts, which are compared on the host only."""
    return questions.replace(answer_patterns=None, answer_texts=None)


class QuestionInputs:
    """Searches, reads and labels the questions of a step."""

    def __init__(
        self,
        stage: StageParts[SpanReader],
        config: "FinetuneConfig",
        index: FrozenIndex,
    ):
        """Opens the questions, and then the index.

        Args:
          stage: the run, with its initial state.
          config: its configuration.
          index: the index, which is not open yet.

        Raises:
          BadInputError: no answer is in a retrieved block, or the index is missing.
          StoppedError: stopped while the corpus was being embedded.
          NotReadyError: the index builder has not made an index in time.
        """
        self._stage = stage
        self._config = config
        self._examples = _open_questions(stage, config)
        self._index = index
        index.open()
        self._labels = AnswerLabels(stage.corpus, config.max_span)
        num_neighbours = config.num_neighbours(stage.corpus.num_blocks)
        if stage.details is None:
            require_answers(
                *(stage.retriever_config, stage.state.params["retriever"]),
                *(index.current.searcher, self._examples, self._labels),
                *(num_neighbours, config.batch_size),
            )
        self._search: SearchAhead[QuestionBatch, FinetuneInputs] = SearchAhead(
            stage.retriever_config,
            lambda questions: questions.question_ids,
            self._gather,
            num_neighbours=num_neighbours,
            mesh=stage.mesh,
            batch_size=config.batch_size,
            # Only in the main thread can a pattern that never ends be stopped.
            ahead=config.search_ahead
            and not config.index_in_state
            and "answer_patterns" not in self._examples.features,
            stopwatch=stage.stopwatch,
        )
        self._search.resume(stage.details or {}, self._questions_at)

    def packed_lengths(self) -> PackedLengths | None:
        """Returns the length of rows that two documents share; None to pack none."""
        return self._stage.packed_lengths(
            self._examples.features["question_ids"],
            # The embeddings of the others are the index's.
            num_documents=self._config.batch_size * self._config.num_embedded,
            num_joined=self._config.batch_size * self._config.blocks_per_update,
        )

    def at(self, step: int, state: TrainState) -> FinetuneInputs:
        """Returns the inputs of the next update."""
        retriever = state.params["retriever"]
        return self._search(step, retriever, self._index.current, self._questions_at)

    def details(self) -> Mapping[str, Any]:
        """Returns what a checkpoint has to hold of the inputs after it."""
        return self._search.details()

    def answerer(self, state: TrainState) -> Answerer:
        """Returns the model of a state, which answers from the index in use."""
        config, stage = self._config, self._stage
        return Answerer(
            retriever=stage.retriever_config,
            reader=stage.reader,
            params=state.params,
            corpus=stage.corpus,
            searcher=self._index.current.searcher,
            num_read=config.num_read,
            lengths=config.models.lengths,
            marginalization=AnswerMarginalization(config.marginalization),
            batch_size=config.batch_size,
            mesh=stage.mesh,
        )

    def _questions_at(self, step: int) -> QuestionBatch:
        return QuestionBatch(**self._stage.batch(self._examples, step))

    def _gather(
        self, questions: QuestionBatch, neighbours: Neighbours
    ) -> FinetuneInputs:
        lengths = self._config.models.lengths
        candidates = question_candidates(
            self._stage.corpus,
            neighbours,
            questions.question_ids,
            num_candidates=self._config.blocks_per_update,
            document_length=lengths.document,
            joined_length=lengths.joined,
        )
        block_ids = np.asarray(neighbours.ids)
        documents = {}
        if count := self._config.num_embedded:
            arrays = self._stage.corpus.document_ids(
                block_ids[:, :count], lengths.document
            )
            documents = dict(zip(DOCUMENTS, arrays, strict=True))
        return FinetuneInputs(
            questions=on_devices(questions),
            block_embeddings=self._index.embeddings_of(block_ids),
            block_valid=block_ids >= 0,
            block_has_answer=self._labels.blocks(questions, block_ids),
            joined_ids=candidates.joined_ids,
            joined_segment_ids=candidates.joined_segment_ids,
            span_is_answer=self._labels.spans(questions, candidates),
            tokens=self._index.tokens,
            **documents,
        )


def _open_questions(
    stage: StageParts[Any], config: "FinetuneConfig"
) -> Examples | Mixture:
    """Opens the questions to train on: of one task, or of several that are mixed."""
    sets = {
        task: stage.open_examples(task, "train", of_corpus=False)
        for task in config.tasks
    }
    return Mixture(sets, config.shares) if len(sets) > 1 else sets[config.task]
