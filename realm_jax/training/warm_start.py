"""The warm start: of the retriever, and of the reader by a masked LM with documents.

REALM, section 3.4: without it the retriever finds nothing useful, the reader learns to
ignore documents, and then no gradient reaches the retriever (the cold-start problem).
A retriever starts by ICT. One that retrieves already learns about its corpus from BM25
instead (`bm25_teacher.py`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from realm_jax import ranges
from realm_jax.data.answer_spans import answer_spans
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.data.examples import Examples
from realm_jax.data.inverse_cloze import inverse_cloze_specs
from realm_jax.data.masking import pretrain_specs
from realm_jax.data.pseudo_queries import PSEUDO_QUERY_LENGTH
from realm_jax.data.words import continues_word
from realm_jax.errors import BadInputError
from realm_jax.index.embed import EmbedConfig, query_embedder
from realm_jax.index.searchers import SEARCHERS
from realm_jax.index.source import LoadedIndex
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import MAX_SPAN
from realm_jax.placement import local_rows, place_batch
from realm_jax.run_record import Attempt
from realm_jax.stages import WARM_START, StageSpec
from realm_jax.training.bm25_teacher import TAUGHT_BLOCKS, BM25Teacher
from realm_jax.training.loop import train_loop
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.reader_documents import (
    KINDS,
    DocumentKind,
    choose_retrieved,
    draw_kinds,
    masked_answers,
)
from realm_jax.training.search_ahead import start_search
from realm_jax.training.stage import Report, Stage
from realm_jax.training.stage_config import (
    IndexUse,
    StageConfig,
    UpdateShapes,
    batch_of,
    require_one_of,
    rows_of_batch,
    shapes_of,
)
from realm_jax.training.state import TrainState
from realm_jax.training.step_timing import Part
from realm_jax.training.warm_start_loss import (
    ReaderInputs,
    TaughtQueries,
    UnmaskedTargets,
    WarmStartInputs,
    WarmStartLoss,
    draw_unmasked,
)
from realm_jax.types import NULL_BLOCK, InverseClozeBatch, PretrainBatch

_SUM_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class ReaderMixture:
    """The documents with which the reader's warm start joins masked sentences.

    Attributes:
      own: probability of the block that a sentence was taken from.
      null: probability of the null document.
      retrieved: probability of a retrieved block: the best one that contains the answer
        and is not trivial by the rule of `index/candidates.py`.
      num_retrieved: number of neighbours among which that block is chosen.
      without_answer: what is read if none of them contains the answer: "retrieved" (the
        best one that is not trivial; most documents that REALM retrieves do not help
        either), "own" or "null". If all neighbours are trivial, "retrieved" gives the
        null document.
    """

    own: float = 1.0
    null: float = 0.0
    retrieved: float = 0.0
    num_retrieved: int = 20
    without_answer: str = DocumentKind.RETRIEVED.value

    def __post_init__(self):
        ranges.require_ranges(
            self,
            own=ranges.SHARE,
            null=ranges.SHARE,
            retrieved=ranges.SHARE,
            num_retrieved=ranges.whole(1),
        )
        if abs(sum(self.shares) - 1) > _SUM_TOLERANCE:
            raise BadInputError(
                "expected probabilities of own, null and retrieved documents that "
                f"sum to 1, got {self.own}, {self.null} and "
                f"{self.retrieved}; change OWN, NULL and RETRIEVED"
            )
        require_one_of("without_answer", self.without_answer, DocumentKind)

    @property
    def shares(self) -> tuple[float, ...]:
        """The probability of each of `KINDS`."""
        return (self.own, self.null, self.retrieved)

    @property
    def reads_own(self) -> bool:
        """True if a sentence may be joined with the block it was taken from."""
        falls_back = self.without_answer == DocumentKind.OWN.value
        return self.own > 0 or (self.retrieved > 0 and falls_back)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig(StageConfig):
    """A warm start; see `StageConfig` for the shared attributes.

    A model without a task is not trained: its parameters stay bit-identical. With
    `train_steps` of 0 neither is trained: the sources of both are combined in a
    checkpoint, from which any stage can start.

    Attributes:
      task: masked sentences, for the reader; "" trains only the retriever.
      batch_size: sentence-block pairs per update; more make the choice harder.
      pairs_task: sentence-block pairs, for the retriever; "" trains only the reader.
      bm25_weight: above 0, the query tower learns from BM25 instead of ICT, on
        pseudo-queries from the blocks of the pairs; see `BM25Teacher`.
      reader_batch_size: masked sentences per update.
      mixture: the documents with which masked sentences are joined.
      score_unmasked: whether the reader also predicts wordpieces that are not masked,
        as BERT does; see `warm_start_loss.py`.
      searcher: "device" (exact) or "scann", of retrieved documents.
      embed: how the corpus is embedded, once, for retrieved documents and BM25.
    """

    stage: ClassVar[StageSpec] = WARM_START
    starts_from_nothing: ClassVar[bool] = True

    pairs_task: str = ""
    bm25_weight: float = 0.0
    reader_batch_size: int = 512
    mixture: ReaderMixture = dataclasses.field(default_factory=ReaderMixture)
    score_unmasked: bool = False
    searcher: str = "device"
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)

    def __post_init__(self):
        super().__post_init__()
        ranges.require_ranges(
            self, reader_batch_size=ranges.whole(1), bm25_weight=ranges.NOT_NEGATIVE
        )
        require_one_of("SEARCHER", self.searcher, SEARCHERS)
        if not self.task and not self.pairs_task:
            raise BadInputError(
                'expected TASK (masked sentences, such as "my_salient"), PAIRS_TASK '
                '(sentence-block pairs, such as "my_ict") or both, got neither; name '
                "the examples of each model that is to be trained"
            )
        if self.bm25_weight and not self.pairs_task:
            raise BadInputError(
                "expected PAIRS_TASK, from whose blocks queries are drawn, with "
                f"BM25_WEIGHT={self.bm25_weight}, got none; give both or neither"
            )
        if self.bm25_weight and self.models.retriever_config(vocab_size=1).shared:
            raise BadInputError(
                "expected two towers (SHARED_TOWERS=False) with "
                f"BM25_WEIGHT={self.bm25_weight}, got one: the query tower learns, and "
                "the embeddings of documents stay; change one of them"
            )

    @property
    def batch_sizes(self) -> Mapping[str, int]:
        """See `StageConfig`; a model that is not trained has none."""
        sizes = dict(super().batch_sizes) if self.pairs_task else {}
        if self.task:
            sizes["READER_BATCH_SIZE"] = self.reader_batch_size
        return sizes

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks whose examples are read."""
        return [name for name in (self.task, self.pairs_task) if name]

    @property
    def reads_retrieved(self) -> bool:
        """True if the reader is shown retrieved documents."""
        return bool(self.task) and self.mixture.retrieved > 0

    @property
    def trains_documents(self) -> bool:
        """True if embeddings of documents change."""
        return bool(self.pairs_task) and not self.bm25_weight

    @property
    def index_use(self) -> IndexUse | None:
        """An index that is built once at the start, if reader or teacher use one."""
        if not self.reads_retrieved and not self.bm25_weight:
            return None
        embed = self.embed.at_length(self.models.lengths.document)
        return IndexUse(self.searcher if self.reads_retrieved else "device", embed)

    def one_microbatch(self) -> Self:
        """Returns a configuration in which both batches are one microbatch of these."""
        size = self.reader_batch_size // self.microbatches
        part = super().one_microbatch()
        return dataclasses.replace(part, reader_batch_size=size)

    @property
    def examples_per_update(self) -> int:
        """Pairs, or masked sentences if only the reader is trained."""
        return self.batch_size if self.pairs_task else self.reader_batch_size

    def data_order(self) -> dict[str, Any]:
        """Returns what fixes the examples of each update, for both models."""
        mixture = self.mixture
        return {
            **super().data_order(),
            "pairs_task": self.pairs_task,
            # None, as of runs that are older than this setting.
            "bm25_weight": self.bm25_weight or None,
            "reader_batch_size": self.reader_batch_size,
            "span_scorer": self.models.span_scorer,
            "score_unmasked": self.score_unmasked,
            # A mixture of own blocks alone is not recorded, as in older checkpoints.
            "mixture": dataclasses.asdict(mixture)
            if mixture.null > 0 or mixture.retrieved > 0
            else None,
        }


def run(
    config: WarmStartConfig,
    report: Report,
    stop: threading.Event,
    attempt: Attempt | None = None,
) -> bool:
    """Trains from the latest checkpoint; returns whether all updates are done.

    Retrieved documents come from an index of the retriever that the run starts with. It
    is built once, in the model directory, and not refreshed; the queries of the reader
    are embedded with the live query tower.
    """
    stage = Stage(
        config,
        config.models.knowledge_encoder,
        frozen=frozen_parameters(config),
        report=report,
        attempt=attempt,
    )
    with contextlib.closing(stage):
        if stage.is_done:
            if stage.details is None:
                stage.save()
            return True
        pairs = sentences = None
        if config.pairs_task:
            pairs = stage.open_examples(config.pairs_task, "train")
        if config.task:
            sentences = _open_sentences(stage, config)
        teacher = None
        if pairs is not None and config.bm25_weight:
            weight, embed = config.bm25_weight, config.embed
            teacher = BM25Teacher(stage, pairs, weight, embed, stop)
        reading = None
        if sentences is not None:
            reading = _Reading(stage, config, sentences, stop)
        queries = pairs if sentences is None else sentences
        assert queries is not None
        packing = stage.packed_lengths(
            queries.features["query_ids"],
            num_documents=config.batch_size if config.trains_documents else 0,
            num_joined=0 if reading is None else config.reader_batch_size,
        )
        loss = make_loss(config, stage.retriever, stage.reader, packing)
        with train_loop(stage, loss, stop) as loop:
            for done in loop:
                of_retriever = of_reader = None
                if teacher is not None:
                    of_retriever = teacher.at(done)
                elif pairs is not None:
                    of_retriever = InverseClozeBatch(**stage.batch(pairs, done))
                if reading is not None:
                    of_reader = reading.at(done, stage.state)
                loop.update(WarmStartInputs(of_retriever, of_reader))
                loop.log()
                loop.save_if_due()
        return stage.is_done


def frozen_parameters(config: WarmStartConfig) -> tuple[str, ...]:
    """Returns the model without a task, if there is one, and what BM25 leaves alone."""
    tasks = {"retriever": config.pairs_task, "reader": config.task}
    frozen = tuple(model for model, task in tasks.items() if not task)
    return (*frozen, "retriever/document_tower") if config.bm25_weight else frozen


def make_loss(
    config: WarmStartConfig,
    retriever: Retriever,
    reader: KnowledgeEncoder,
    packing: PackedLengths | None = None,
) -> WarmStartLoss:
    """Returns the loss that a run minimises."""
    return WarmStartLoss(retriever, reader, config.microbatches, packing)


def update_shapes(
    config: WarmStartConfig, retriever: Retriever, corpus: CorpusSize, mesh: Mesh
) -> UpdateShapes:
    """Returns what an update of a run is compiled for; see `UpdateShapes`."""
    lengths, size = config.models.lengths, config.reader_batch_size
    pairs = reading = None
    if config.pairs_task:
        specs = corpus.specs.get(
            config.pairs_task, inverse_cloze_specs(lengths.query, lengths.document)
        )
        pairs = batch_of(InverseClozeBatch, specs, config.batch_size, mesh)
        if config.bm25_weight:
            sizes = {
                "batch": config.batch_size,
                "query": min(lengths.query, PSEUDO_QUERY_LENGTH),
                "candidate": min(TAUGHT_BLOCKS, corpus.num_blocks - 1),
                "projection": retriever.config.projection_size,
            }
            pairs = shapes_of(TaughtQueries, sizes, mesh)
    if config.task:
        specs = corpus.specs.get(config.task, pretrain_specs(lengths.query))
        sizes = {"batch": size, "joined": lengths.joined}
        sizes["target"] = specs["mask_ids"].shape[0]
        spans = (size, lengths.joined * MAX_SPAN)
        reading = shapes_of(
            ReaderInputs,
            sizes,
            mesh,
            batch=batch_of(PretrainBatch, specs, size, mesh),
            span_is_answer=rows_of_batch(spans, np.bool_, mesh)
            if config.models.span_scorer
            else None,
            unmasked=shapes_of(UnmaskedTargets, sizes, mesh)
            if config.score_unmasked
            else None,
        )
    reader = config.models.knowledge_encoder(retriever.config.bert)
    loss = make_loss(config, retriever, reader)
    inputs = WarmStartInputs(pairs, reading)
    return UpdateShapes(reader, loss, frozen_parameters(config), inputs)


def _open_sentences(stage: Stage[Any], config: WarmStartConfig) -> Examples:
    """Opens the masked sentences; where own blocks are read, they are of the corpus."""
    sentences = stage.open_examples(config.task, "train")
    sources = sentences.features["source_block"][:1]
    if config.mixture.reads_own and (sources < 0).any():
        raise BadInputError(
            f"expected sentences taken from the blocks of {config.corpus}, but "
            f"task {config.task!r} has none; the reader's warm start reads a "
            "sentence together with its own block"
        )
    return sentences


class _Reading:
    """Joins the masked sentences of a step with the documents of the mixture."""

    def __init__(
        self,
        stage: Stage[KnowledgeEncoder],
        config: WarmStartConfig,
        sentences: Examples,
        stop: threading.Event,
    ):
        self._stage = stage
        self._config = config
        self._sentences = sentences
        self._continues_word = continues_word(stage.corpus.vocabulary.pieces)
        self._embed_queries = query_embedder(stage.retriever_config, stage.mesh)
        self._index = None
        if config.reads_retrieved:
            source = stage.index_source(config.searcher, config.embed)
            self._index = source.open_first(
                stage.state.params["retriever"],
                stop,
                resumes=stage.details is not None,
                trained="retriever" if config.trains_documents else "",
            )

    def at(self, step: int, state: TrainState) -> ReaderInputs:
        stage, config = self._stage, self._config
        size = config.reader_batch_size
        batch = PretrainBatch(**stage.batch(self._sentences, step, size))
        rows = local_rows(stage.mesh, size)
        kinds = draw_kinds(config.mixture.shares, config.seed, step, size)[rows]
        block_ids = np.where(
            kinds == KINDS.index(DocumentKind.OWN), batch.source_block, NULL_BLOCK
        )
        has_answer = np.zeros(len(kinds), bool)
        if self._index is not None:
            neighbours = self._search(self._index, batch, state)
            with stage.stopwatch.part(Part.SEARCH):
                some = np.flatnonzero(kinds == KINDS.index(DocumentKind.RETRIEVED))
                chosen = self._choose(neighbours, batch, some)
                block_ids[some], has_answer[some] = chosen
        joined_ids, joined_segment_ids = stage.corpus.joined_ids(
            np.asarray(batch.query_ids),
            block_ids[:, None],
            config.models.lengths.joined,
        )
        span_is_answer = None
        if config.models.span_scorer:
            answers = masked_answers(batch)
            span_is_answer = answer_spans(
                joined_ids, answers, self._continues_word, MAX_SPAN
            )[:, 0]
        unmasked = None
        if config.score_unmasked:
            unmasked = draw_unmasked(
                batch,
                joined_ids[:, 0],
                stage.corpus.vocabulary,
                seed=config.seed,
                step=step,
                rows=rows,
            )
        return ReaderInputs(
            batch=batch,
            joined_ids=joined_ids[:, 0],
            joined_segment_ids=joined_segment_ids[:, 0],
            kind=kinds,
            has_answer=has_answer,
            span_is_answer=span_is_answer,
            unmasked=unmasked,
        )

    def _search(
        self, index: LoadedIndex, batch: PretrainBatch, state: TrainState
    ) -> Int[np.ndarray, "batch neighbour"]:
        """Searches for rows of any kind: processes search together, in one shape."""
        stage = self._stage
        queries = self._embed_queries(
            state.params["retriever"], place_batch(stage.mesh, batch.query_ids)
        )
        # They wait for the update before.
        stage.stopwatch.wait_for(queries)
        with stage.stopwatch.part(Part.SEARCH):
            wanted = self._config.mixture.num_retrieved
            search = start_search(index.searcher, queries, wanted, stage.mesh)
            return np.asarray(search().ids)

    def _choose(
        self,
        neighbours: Int[np.ndarray, "batch neighbour"],
        batch: PretrainBatch,
        rows: Int[np.ndarray, " row"],
    ) -> tuple[Int[np.ndarray, " row"], Bool[np.ndarray, " row"]]:
        """Returns the documents of these rows, and which of them have the answer."""
        if not len(rows):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        some = jax.tree.map(lambda array: array[rows], batch)
        block_ids, found = choose_retrieved(
            self._stage.corpus,
            neighbours[rows],
            some,
            self._config.models.lengths.joined,
            self._continues_word,
        )
        instead = {
            DocumentKind.OWN: np.asarray(some.source_block),
            DocumentKind.NULL: np.full(len(rows), NULL_BLOCK),
            DocumentKind.RETRIEVED: block_ids,
        }[DocumentKind(self._config.mixture.without_answer)]
        return np.where(found, block_ids, instead), found
