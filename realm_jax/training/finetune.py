"""Open-QA fine-tuning of retriever and span reader on questions.

ORQA, section 5; REALM, section 3.4. There the document tower stays as pre-training left
it, so its index is built once and is used to the end of training, and by evaluation. As
an extension the index follows the retriever (`question_index.py`), and the document
tower is trained through the best blocks of each question. With held-out questions the
checkpoint that answers most of them is kept beside the newest, and is the one that is
evaluated and asked (`dev_exact_match.py`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from realm_jax import multihost, ranges
from realm_jax.answering.reader import Answerer
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.data.examples import Examples
from realm_jax.data.mixture import CYCLE, Mixture, common_specs
from realm_jax.data.questions import cut_questions, question_specs
from realm_jax.errors import BadInputError
from realm_jax.index import device_search, device_tokens
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.candidates import question_candidates
from realm_jax.index.device_search import Precision
from realm_jax.index.device_tokens import DocumentLayout
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import SEARCHERS
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.run_record import Attempt
from realm_jax.stages import FINETUNE, StageSpec
from realm_jax.storage import absolute_url
from realm_jax.training.answer_coverage import require_answers
from realm_jax.training.dev_exact_match import DevExactMatch, read_dev_questions
from realm_jax.training.finetune_loss import FinetuneInputs, FinetuneLoss
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.loop import train_loop
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.question_index import (
    FrozenIndex,
    RefreshedIndex,
    RollingIndex,
)
from realm_jax.training.refresh import RefreshMode, blocking_rebuilds
from realm_jax.training.rolling_refresh import Renewal, RenewingFinetuneLoss
from realm_jax.training.search_ahead import SearchAhead
from realm_jax.training.stage import Report, Stage, StageParts
from realm_jax.training.stage_config import (
    SOME_PIECES,
    IndexUse,
    StageConfig,
    UpdateShapes,
    batch_of,
    require_one_of,
    rows_of_batch,
    shapes_of,
)
from realm_jax.training.state import TrainState
from realm_jax.types import Neighbours, QuestionBatch


@dataclasses.dataclass(frozen=True)
class AnsweringConfig:
    """A fine-tuned model as it answers; its training is described elsewhere.

    The attributes are those of `FinetuneConfig`.
    """

    model_dir: str
    models: ModelFactory
    searcher: str = "device"
    num_read: int = 5
    max_span: int = 10
    marginalization: str = "product"
    span_layer_norm_epsilon: float = 1e-3
    retrieval_weight: float = 1.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            num_read=ranges.whole(1),
            max_span=ranges.whole(1),
            span_layer_norm_epsilon=ranges.POSITIVE,
            retrieval_weight=ranges.POSITIVE,
        )
        require_one_of("SEARCHER", self.searcher, SEARCHERS)
        require_one_of("marginalization", self.marginalization, AnswerMarginalization)

    def reading(self) -> dict[str, Any]:
        """Returns how spans are scored and marginalised."""
        return {name: getattr(self, name) for name in READING}

    def make_reader(self, bert: BertConfig) -> SpanReader:
        """Returns the span reader around an encoder."""
        return SpanReader(
            bert,
            max_span=self.max_span,
            layer_norm_epsilon=self.span_layer_norm_epsilon,
        )


REFRESHES_INDEX = "refreshes_index"
"""In the record of a run: whether its index followed the retriever, else None."""

MORE_TASKS = "more_tasks"
"""In the record of a run: the tasks beside `task`, with their shares, or None."""

READING = ("marginalization", "max_span", "span_layer_norm_epsilon")
"""Settings of `AnsweringConfig` with which a model must answer as it was trained."""

_DOCUMENTS = ("document_ids", "document_segment_ids")


def _in_cycle(share: float) -> int:
    return round(CYCLE * share)


def _are_shares(value: Any) -> bool:
    if not isinstance(value, Mapping) or not ranges.TEXTS.contains(list(value)):
        return False
    shares = value.values()
    if not all(map(ranges.SHARE.contains, shares)):
        return False
    counts = [*map(_in_cycle, shares)]
    return all(counts) and sum(counts) < CYCLE


_SHARES = ranges.Range(
    "a dictionary of tasks with their shares, each at least a thousandth and together "
    "below 1",
    _are_shares,
)


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(StageConfig):
    """A fine-tuning run; see `StageConfig` for the shared attributes.

    Attributes:
      task: name of the question task.
      searcher: "device" (exact) or "scann".
      num_retrieved: number of blocks in the retriever's loss.
      num_read: number of blocks that are read for a question.
      train_num_read: the same of an update; None for `num_read`. Where the best block
        is mostly the right one, more questions with fewer blocks each teach more in the
        same time.
      max_span: length of the longest answer, in wordpieces.
      marginalization: "product" (the paper) or "joint_softmax" (the authors' code).
      span_layer_norm_epsilon: epsilon of the span scorer; 1e-3 in ORQA's readers.
      retrieval_weight: factor of f(x, z) where an answer combines it with the reader's
        logits; updates have 1. A reader that is trained with one block of a question
        has not learned to weigh several, as BERTserini's (Yang et al. 2019).
      embed: how the corpus is embedded here.
      more_tasks: further question tasks to be trained on, each with its share of all
        questions, in thousandths; `task` has the rest. See `data/mixture.py`.
      refresh_mode: "off" searches the first index to the end; "blocking", "async"
        (`realm build-index` beside this job) and "rolling" have it follow the
        retriever; see `refresh.py`.
      refresh_period: updates between two refreshes.
      num_embedded: number of the best retrieved blocks that an update embeds itself, so
        that the document tower is trained through them; the others keep the embeddings
        of the index. 0 trains no separate document tower.
      frozen: paths of further parameters that are not trained, such as
        "retriever/query_tower".
      questions: JSON lines of questions by which a checkpoint is chosen, or "" for the
        last one.
      questions_split: their split; never the one that is trained on.
      max_questions: the most of them that are answered, evenly spread; None for all.
      evaluation_period: updates between two measurements of exact match on them; one
        more follows the last update.
      early_stopping: measurements in a row without a higher exact match than before,
        after which training ends; None to make all updates.
      search_ahead: whether the inputs of the next update are made while one is running,
        of blocks that are found with parameters one update old; see
        `search_ahead.py`. Not where answers are patterns, nor with "rolling".
    """

    stage: ClassVar[StageSpec] = FINETUNE

    searcher: str = "device"
    num_retrieved: int = 5000
    num_read: int = 5
    train_num_read: int | None = None
    max_span: int = 10
    marginalization: str = "product"
    span_layer_norm_epsilon: float = 1e-3
    retrieval_weight: float = 1.0
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    search_ahead: bool = True
    more_tasks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    refresh_mode: str = "off"
    refresh_period: int = 500
    num_embedded: int = 0
    frozen: tuple[str, ...] = ()
    questions: str = ""
    questions_split: str = "dev"
    max_questions: int | None = None
    evaluation_period: int = 1000
    early_stopping: int | None = None

    def __post_init__(self):
        super().__post_init__()
        ranges.require_ranges(
            self,
            num_retrieved=ranges.whole(1),
            train_num_read=ranges.whole(1).or_none(),
            max_questions=ranges.whole(1).or_none(),
            evaluation_period=ranges.whole(1),
            early_stopping=ranges.whole(1).or_none(),
            refresh_period=ranges.whole(1),
            num_embedded=ranges.whole(0),
            frozen=ranges.TEXTS,
            more_tasks=_SHARES,
        )
        self.answering()  # Checks the settings that both have.
        require_one_of("REFRESH_MODE", self.refresh_mode, RefreshMode)
        self._require_consistent()
        for read in (self.num_read, self.blocks_per_update):
            if read > self.num_retrieved:
                raise BadInputError(
                    f"expected num_read among 1..{self.num_retrieved} (num_retrieved), "
                    f"got {read}; the blocks that are read are the best retrieved"
                )

    def _require_consistent(self) -> None:
        if self.early_stopping is not None and not self.questions:
            raise BadInputError(
                "expected QUESTIONS, by whose exact match training ends early, got "
                f"none with EARLY_STOPPING={self.early_stopping}; give both or neither"
            )
        if self.task in self.more_tasks:
            raise BadInputError(
                f"expected other tasks than TASK in MORE_TASKS, got {self.task!r}; it "
                "has what the shares of the others leave"
            )
        if self.num_embedded > self.num_retrieved:
            raise BadInputError(
                f"expected NUM_EMBEDDED of at most {self.num_retrieved} "
                f"(NUM_RETRIEVED), got {self.num_embedded}; the best retrieved blocks "
                "are embedded"
            )
        if self.num_embedded and not self.is_refreshed:
            raise BadInputError(
                'expected REFRESH_MODE="blocking", "async" or "rolling" with '
                f"NUM_EMBEDDED={self.num_embedded}, got {self.refresh_mode!r}: the "
                "index would be of another document tower than the one that trains"
            )
        if self.index_in_state and self.searcher != "device":
            raise BadInputError(
                'expected SEARCHER="device" for REFRESH_MODE="rolling", got '
                f"{self.searcher!r}: rows of a ScaNN index cannot be replaced; change "
                "one of them"
            )
        if self.is_refreshed and not _trains_documents(self):
            raise BadInputError(
                "expected NUM_EMBEDDED above 0, or one shared tower, with REFRESH_MODE="
                f'"{self.refresh_mode}", and no tower of the documents in FROZEN, got '
                f"{self.num_embedded} and FROZEN={list(self.frozen)}: that tower would "
                "not change, and its index be made again for nothing"
            )

    @property
    def is_refreshed(self) -> bool:
        """True if the index follows the retriever."""
        return self.refresh_mode != RefreshMode.OFF.value

    @property
    def index_in_state(self) -> bool:
        """True if the updates themselves renew the index, which checkpoints hold."""
        return self.refresh_mode == RefreshMode.ROLLING.value

    @property
    def tasks(self) -> Sequence[str]:
        """See `StageConfig`."""
        return [*super().tasks, *self.more_tasks]

    @property
    def shares(self) -> list[int]:
        """Of each of the tasks, how many of `CYCLE` questions are its."""
        others = [_in_cycle(share) for share in self.more_tasks.values()]
        return [CYCLE - sum(others), *others]

    @property
    def blocks_per_update(self) -> int:
        """Blocks that an update reads for each question."""
        return self.num_read if self.train_num_read is None else self.train_num_read

    def num_neighbours(self, num_blocks: int) -> int:
        """Returns how many blocks an update searches for in a corpus of `num_blocks`.

        With fewer blocks in the corpus than are read, some slots stay empty.
        """
        read = max(self.num_read, self.blocks_per_update, self.num_embedded)
        return max(read, min(self.num_retrieved, num_blocks))

    @property
    def index_use(self) -> IndexUse:
        """An index that is built once, at the start, or refreshed."""
        embed = self.embed.at_length(self.models.lengths.document)
        if not self.is_refreshed:
            return IndexUse(self.searcher, embed)
        mode = RefreshMode(self.refresh_mode)
        rebuilds = blocking_rebuilds(mode, self.train_steps, self.refresh_period)
        return IndexUse(self.searcher, embed, rebuilds, mode)

    def data_order(self) -> dict[str, Any]:
        """Returns the settings a resumed run must keep, with those of span scoring."""
        order = {**super().data_order(), **self.answering().reading()}
        del order["spans"]  # Questions have none to draw from.
        # None, as of runs that are older than these settings.
        order[REFRESHES_INDEX] = self.is_refreshed or None
        order[MORE_TASKS] = dict(self.more_tasks) or None
        return order

    def recorded(self) -> dict[str, Any]:
        """Returns what the record has for others, with what answering needs."""
        return {
            **super().recorded(),
            "questions": absolute_url(self.questions) if self.questions else "",
            "searcher": self.searcher,
            "num_read": self.num_read,
            "retrieval_weight": self.retrieval_weight,
        }

    def answering(self) -> AnsweringConfig:
        """Returns the configuration with which the trained model answers."""
        names = [field.name for field in dataclasses.fields(AnsweringConfig)]
        return AnsweringConfig(**{name: getattr(self, name) for name in names})

    def make_reader(self, bert: BertConfig) -> SpanReader:
        """Returns the span reader around an encoder."""
        return self.answering().make_reader(bert)


def run(
    config: FinetuneConfig,
    report: Report,
    stop: threading.Event,
    attempt: Attempt | None = None,
) -> bool:
    """Trains from the latest checkpoint; returns whether all updates are done."""
    # Not required of every configuration: evaluate.gin and ask.gin make one without.
    ranges.require_ranges(config, task=ranges.TEXT, train_steps=ranges.whole(1))
    # First, so that questions that cannot be used leave nothing behind.
    questions = multihost.run_on_all(
        lambda: read_dev_questions(
            config.questions, config.questions_split, config.max_questions
        )
    )
    stage = Stage(
        config,
        config.make_reader,
        frozen=frozen_parameters(config),
        index=Precision.FLOAT32 if config.index_in_state else None,
        report=report,
        attempt=attempt,
    )
    with contextlib.closing(stage):
        if stage.is_done and not config.is_refreshed:
            return True
        dev = DevExactMatch(
            stage, questions, config.evaluation_period, config.early_stopping
        )
        with make_index(stage, config, stop) as index:
            if dev.has_ended:
                dev.note()
            elif not stage.is_done or dev.is_missing:
                _train(stage, config, index, dev, stop)
            has_ended = stage.is_done or dev.has_ended
            if has_ended:
                index.finish()
    return has_ended


def _train(
    stage: Stage[SpanReader],
    config: FinetuneConfig,
    index: FrozenIndex,
    dev: DevExactMatch,
    stop: threading.Event,
) -> None:
    """Trains until the last update, a stop or an early end: the loop of fine-tuning.

    A refresh comes before the update that searches, and before measuring, so that exact
    match is that of the newest index there can be. A rolling one comes with the update.
    """
    index.keep(dev.kept)
    inputs = QuestionInputs(stage, config, index)
    layout = DocumentLayout.of(config.models.lengths, stage.corpus.vocabulary)
    of_models = (stage.retriever, stage.reader)
    packing = inputs.packed_lengths()
    loss = make_loss(config, *of_models, layout, stage.mesh, packing)

    def details() -> Mapping[str, Any]:
        found = dev.details({**inputs.details(), **index.details()})
        index.keep(dev.kept)
        return found

    def values() -> Mapping[str, float]:
        return {**index.metrics(), **dev.take()}

    with train_loop(stage, loss, stop, details) as loop:
        if config.is_refreshed and dev.is_missing:
            # The refresh before it was stopped, and the state saved.
            index.refresh()
            dev.measure(inputs.answerer(stage.state))
            dev.note()
        for done in loop:
            if dev.has_ended:
                break
            index.refresh()
            loop.update(inputs.at(done, stage.state))
            if dev.is_time:
                index.refresh()
                dev.measure(inputs.answerer(stage.state))
            loop.log(values, now=dev.is_due)
            dev.save_if_best(details)
            loop.save_if_due()


def frozen_parameters(config: FinetuneConfig) -> tuple[str, ...]:
    """Returns the configured paths, and a document tower of its own without gradient.

    A shared tower has one. Without a refresh only its index is frozen: the query side
    moves away from the index it searches, as in the authors' code.
    """
    shared = config.models.retriever_config(vocab_size=1).shared
    has_gradient = shared or config.num_embedded
    return (*config.frozen, *(() if has_gradient else ("retriever/document_tower",)))


def _trains_documents(config: FinetuneConfig) -> bool:
    """Returns whether updates change what embeds the documents."""
    towers = {"retriever", "retriever/document_tower", "retriever/tower"}
    return towers.isdisjoint(frozen_parameters(config))


def make_index(
    stage: Stage[Any], config: FinetuneConfig, stop: threading.Event
) -> FrozenIndex:
    """Returns the index that a run searches, which is still to be opened."""
    if not config.is_refreshed:
        return frozen_index(stage, config, stop)
    mode = RefreshMode(config.refresh_mode)
    source = stage.index_source(config.searcher, config.embed)
    if mode is RefreshMode.ROLLING:
        return RollingIndex(stage, source, stop, config.refresh_period)
    return RefreshedIndex(stage, source, stop, mode, config.refresh_period)


def frozen_index(
    stage: StageParts[Any], config: FinetuneConfig, stop: threading.Event
) -> FrozenIndex:
    """Returns the index of a run without a refresh, which is still to be opened."""
    source = stage.index_source(config.searcher, config.embed)
    trained = "shared tower" if _trains_documents(config) else ""
    return FrozenIndex(stage, source, stop, trained)


def make_loss(
    config: FinetuneConfig,
    retriever: Retriever,
    reader: SpanReader,
    layout: DocumentLayout,
    mesh: Mesh,
    packing: PackedLengths | None = None,
) -> FinetuneLoss:
    """Returns the loss of a run, which renews the index if the state holds it."""
    parts = (
        retriever,
        reader,
        AnswerMarginalization(config.marginalization),
        config.microbatches,
        packing,
    )
    if not config.index_in_state:
        return FinetuneLoss(*parts)
    renewal = Renewal(config.refresh_period, False, config.embed.batch_size)
    return RenewingFinetuneLoss(*parts, renewal=renewal, layout=layout, mesh=mesh)


def update_shapes(
    config: FinetuneConfig, retriever: Retriever, corpus: CorpusSize, mesh: Mesh
) -> UpdateShapes:
    """Returns what an update of a run is compiled for; see `UpdateShapes`."""
    lengths, size = config.models.lengths, config.batch_size
    usual = question_specs(lengths.query)
    # A model that only answers has no task.
    specs = {task: corpus.specs.get(task, usual) for task in config.tasks or ("",)}
    features = dict(common_specs(specs))
    query = min(lengths.query, *features["question_ids"].shape)
    features["question_ids"] = jax.ShapeDtypeStruct((query,), np.int32)
    questions = batch_of(QuestionBatch, features, size, mesh)
    sizes = {
        "batch": size,
        "neighbour": config.num_neighbours(corpus.num_blocks),
        "projection": retriever.config.projection_size,
        "candidate": config.blocks_per_update,
        "joined": lengths.joined,
        "span": lengths.joined * config.max_span,
    }
    documents = {}
    if config.num_embedded:
        ids = (size, config.num_embedded, lengths.document)
        documents = dict.fromkeys(_DOCUMENTS, rows_of_batch(ids, "int32", mesh))
    layout = DocumentLayout(lengths.document, lengths.joined, *SOME_PIECES)
    tokens = index = None
    if config.index_in_state:
        index = device_search.table_shapes(
            corpus.num_blocks, retriever.config.projection_size, mesh, Precision.FLOAT32
        )
        tokens = device_tokens.table_shapes(
            corpus.num_blocks, corpus.longest, corpus.id_dtype, layout, mesh
        )
    inputs = shapes_of(
        FinetuneInputs,
        sizes,
        mesh,
        questions=_on_devices(questions),
        **documents,
        tokens=tokens,
    )
    reader = config.make_reader(retriever.config.bert)
    loss = make_loss(config, retriever, reader, layout, mesh)
    return UpdateShapes(reader, loss, frozen_parameters(config), inputs, index)


def _on_devices(questions: QuestionBatch) -> QuestionBatch:
    """Returns questions without their texts, which are compared on the host only."""
    return questions.replace(answer_patterns=None, answer_texts=None)


class QuestionInputs:
    """Searches, reads and labels the questions of a step."""

    def __init__(
        self,
        stage: StageParts[SpanReader],
        config: FinetuneConfig,
        index: FrozenIndex,
    ):
        """Opens the questions, and then the index; see `FrozenIndex.open`."""
        self._stage = stage
        self._config = config
        self._examples = _open_questions(stage, config)
        self._index = index
        index.open()
        self._labels = AnswerLabels(stage.corpus, config.max_span)
        num_neighbours = config.num_neighbours(stage.corpus.num_blocks)
        if stage.details is None:
            require_answers(
                stage,
                index.current.searcher,
                self._examples,
                self._labels,
                num_neighbours,
                config.batch_size,
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
            num_queries=self._config.batch_size,
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
            retrieval_weight=config.retrieval_weight,
            batch_size=config.batch_size,
            mesh=stage.mesh,
        )

    def _questions_at(self, step: int) -> QuestionBatch:
        batch = self._stage.batch(self._examples, step)
        length = self._config.models.lengths.query
        cut = cut_questions(batch["question_ids"], length)
        return QuestionBatch(**{**batch, "question_ids": cut})

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
            documents = dict(zip(_DOCUMENTS, arrays, strict=True))
        return FinetuneInputs(
            questions=_on_devices(questions),
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
    stage: StageParts[Any], config: FinetuneConfig
) -> Examples | Mixture:
    """Opens the questions to train on: of one task, or of several that are mixed."""
    sets = {
        task: stage.open_examples(task, "train", of_corpus=False)
        for task in config.tasks
    }
    return Mixture(sets, config.shares) if len(sets) > 1 else sets[config.task]
