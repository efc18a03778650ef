"""Provides the programs of a run over shapes: nothing is allocated or run.

They are made of the parts that the stages themselves run (`training/`), so that the
plan describes what will be computed. A mesh may be of devices that are not available.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from realm_jax import axes, stages
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.index import device_search, embed
from realm_jax.index.candidates import num_neighbours
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.index.device_tokens import DocumentLayout, TokenTable
from realm_jax.index.searchers import DeviceConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.models.span_reader import MAX_SPAN
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.stages import StageSpec
from realm_jax.training import (
    finetune,
    initialization,
    partitioning,
    pretrain,
    warm_start,
)
from realm_jax.training.candidate_search import RetrievingInputs, RetrievingLoss
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.finetune_loss import FinetuneInputs, FinetuneLoss
from realm_jax.training.initialization import Reader
from realm_jax.training.optimizers import make_optimizer
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.pretrain_loss import PretrainInputs
from realm_jax.training.stage_config import StageConfig
from realm_jax.training.state import TrainState, create_state, state_shardings
from realm_jax.training.step import Loss, make_step
from realm_jax.training.unmasked_targets import UnmaskedTargets
from realm_jax.training.warm_start import WarmStartConfig
from realm_jax.training.warm_start_loss import (
    ReaderInputs,
    WarmStartInputs,
    WarmStartLoss,
)
from realm_jax.types import (
    Candidates,
    InverseClozeBatch,
    PretrainBatch,
    QuestionBatch,
)

# The defaults of `prepare.PrepareConfig.max_masks` and of the questions' answers.
_MASKS = 10
_ANSWERS = (10, 20)
# Arbitrary: they are only written into documents.
_CLS, _SEP = 101, 102


@dataclasses.dataclass(frozen=True)
class Training:
    """The update of a stage.

    Attributes:
      mesh: the devices.
      loss: the loss that is minimised.
      step: (state, inputs) -> state and metrics, jitted.
      state: shapes with shardings.
      inputs: shapes with shardings.
    """

    mesh: Mesh
    loss: Loss
    step: Callable[..., Any]
    state: TrainState
    inputs: Any

    def loss_arguments(self) -> tuple[PyTree, Any, jax.ShapeDtypeStruct]:
        """Returns the arguments of the loss, as shapes."""
        return self.loss.arguments(self.state, self.inputs)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of an update that differ between stages.

    Attributes:
      reader: the reader of the stage.
      loss: the loss that is minimised.
      inputs: shapes with shardings.
      frozen: parameter paths that are not trained.
      index: the index in the state, if it has one.
    """

    reader: Reader
    loss: Loss
    inputs: Any
    frozen: tuple[str, ...]
    index: EmbeddingTable | None = None


def training(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> Training:
    """Returns the update of a training stage.

    Args:
      config: configuration of `pretrain`, `warm_start` or `finetune`.
      corpus: size of the corpus it trains on.
      mesh: devices of the stage.

    Raises:
      BadInputError: the mesh does not split the models evenly.
    """
    retriever = Retriever(config.models.retriever_config(corpus.vocab_size))
    partitioning.require_models_split(mesh, retriever.config.bert)
    parts = _PARTS[config.stage](config, corpus, retriever, mesh)
    optimizer = make_optimizer(
        config.optimizer(total_steps=config.train_steps), parts.frozen
    )

    def initial() -> tuple[TrainState, PyTree]:
        params, names = initialization.initial_params(
            retriever, parts.reader, config.models.lengths, 0
        )
        return create_state(params, optimizer, 0), names

    state, names = jax.eval_shape(initial)
    places = state_shardings(state, partitioning.parameter_shardings(mesh, names), mesh)
    state = jax.tree.map(
        lambda leaf, place: _shape(leaf.shape, leaf.dtype, place), state, places
    )
    step = make_step(parts.loss, optimizer, parts.frozen)
    state = state.replace(index=parts.index)
    return Training(mesh, parts.loss, step, state, parts.inputs)


def embedding(
    towers: RetrieverConfig, document_length: int, batch_size: int, mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the embedding job's program, and its arguments as shapes.

    Args:
      towers: configuration of the retriever.
      document_length: maximum length of documents, in wordpieces.
      batch_size: documents per call, over the devices of a host.
      mesh: mesh of those devices.
    """
    retriever = Retriever(towers)
    everywhere = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((1, document_length), jnp.int32)
    variables = jax.eval_shape(
        retriever.init,
        jax.eval_shape(lambda: jax.random.key(0)),
        *(ids, ids, ids),
    )
    params = jax.tree.map(
        lambda leaf: _shape(leaf.shape, leaf.dtype, everywhere), variables["params"]
    )
    rows = -(-batch_size // mesh.size) * mesh.size
    batch = _batch((rows, document_length), jnp.int32, mesh)
    return embed.document_embedder(towers), (params, batch, batch)


def search(
    num_blocks: int,
    dimension: int,
    batch_size: int,
    num_candidates: int,
    device: DeviceConfig,
    mesh: Mesh,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns only the search within a step, and its arguments as shapes.

    Args:
      num_blocks: number of blocks in the corpus.
      dimension: dimension of their embeddings.
      batch_size: number of queries.
      num_candidates: candidates of a step, the null document included.
      device: how it searches.
      mesh: the devices.
    """

    def run(table: EmbeddingTable, queries: jax.Array) -> Any:
        return device_search.search(
            table,
            queries,
            num_neighbours(num_candidates),
            mesh=mesh,
            approximate=device.approximate,
        )

    table = embedding_table(num_blocks, dimension, Precision(device.precision), mesh)
    queries = _batch((batch_size, dimension), jnp.float32, mesh)
    return jax.jit(run), (table, queries)


def embedding_table(
    num_blocks: int, dimension: int, precision: Precision, mesh: Mesh
) -> EmbeddingTable:
    """Returns the embeddings of a corpus on the devices, as shapes."""
    num_rows = _num_rows(num_blocks, mesh)
    exact = jnp.float32 if precision is Precision.FLOAT32 else jnp.bfloat16
    codes = scales = None
    if precision is Precision.INT8:
        codes = _rows((num_rows, dimension), jnp.int8, mesh)
        scales = _rows((num_rows,), jnp.float32, mesh)
    count = _shape((), jnp.int32, NamedSharding(mesh, PartitionSpec()))
    return EmbeddingTable(
        _rows((num_rows, dimension), exact, mesh),
        codes,
        scales,
        count,
    )


def token_table(
    corpus: CorpusSize, lengths: initialization.Lengths, mesh: Mesh
) -> TokenTable:
    """Returns the wordpieces of a corpus on the devices, as shapes."""
    num_rows = _num_rows(corpus.num_blocks, mesh)
    # Title and body of the longest block, without [CLS] and two [SEP].
    ids = _rows((num_rows, lengths.document - 3), corpus.id_dtype, mesh)
    count = _rows((num_rows,), jnp.uint16, mesh)
    return TokenTable(ids, count, count)


def _pretrain(
    config: PretrainConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    reader = config.models.knowledge_encoder(retriever.config.bert)
    frozen = pretrain.frozen_parameters(config)
    loss = pretrain.make_loss(config, retriever, reader)
    lengths = config.models.lengths
    batch = _masked_batch(config.batch_size, lengths, mesh)
    if config.searcher != "device":
        candidates = _candidates(config, config.num_candidates, mesh)
        return _Parts(reader, loss, PretrainInputs(batch, candidates), frozen)
    layout = DocumentLayout(lengths.document, lengths.joined, _CLS, _SEP)
    retrieving = RetrievingLoss(
        *(loss, config.num_candidates, layout, mesh),
        config.device.approximate,
        config.embeddings_from_index,
    )
    dimension = retriever.config.projection_size
    precision = Precision(config.device.precision)
    table = embedding_table(corpus.num_blocks, dimension, precision, mesh)
    inputs = RetrievingInputs(
        batch,
        None if config.index_in_state else table,
        token_table(corpus, lengths, mesh),
        _candidates(config, 1, mesh) if config.own_block else None,
    )
    kept = table if config.index_in_state else None
    return _Parts(reader, pretrain.renewing(config, retrieving), inputs, frozen, kept)


def _masked_batch(
    size: int, lengths: initialization.Lengths, mesh: Mesh
) -> PretrainBatch:
    masks = _batch((size, _MASKS), jnp.int32, mesh)
    return PretrainBatch(
        _batch((size, lengths.query), jnp.int32, mesh),
        masks,
        masks,
        _batch((size, _MASKS), jnp.float32, mesh),
        _batch((size,), jnp.int32, mesh),
    )


def _candidates(config: PretrainConfig, count: int, mesh: Mesh) -> Candidates:
    lengths = config.models.lengths
    rows = (config.batch_size, count)
    documents = _batch((*rows, lengths.document), jnp.int32, mesh)
    joined = _batch((*rows, lengths.joined), jnp.int32, mesh)
    return Candidates(
        block_ids=_batch(rows, jnp.int32, mesh),
        valid=_batch(rows, jnp.bool_, mesh),
        document_ids=documents,
        document_segment_ids=documents,
        joined_ids=joined,
        joined_segment_ids=joined,
    )


def _warm_start(
    config: WarmStartConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    reader = config.models.knowledge_encoder(retriever.config.bert)
    loss = WarmStartLoss(retriever, reader, config.microbatches)
    inputs = _warm_start_inputs(config, mesh)
    return _Parts(reader, loss, inputs, warm_start.frozen_parameters(config))


def _warm_start_inputs(config: WarmStartConfig, mesh: Mesh) -> WarmStartInputs:
    lengths = config.models.lengths
    documents = _batch((config.batch_size, lengths.document), jnp.int32, mesh)
    joined = _batch((config.reader_batch_size, lengths.joined), jnp.int32, mesh)
    pairs = InverseClozeBatch(
        _batch((config.batch_size, lengths.query), jnp.int32, mesh),
        documents,
        documents,
        _batch((config.batch_size,), jnp.int32, mesh),
    )
    masked = _masked_batch(config.reader_batch_size, lengths, mesh)
    reading = ReaderInputs(
        batch=masked,
        joined_ids=joined,
        joined_segment_ids=joined,
        kind=_batch((config.reader_batch_size,), jnp.int32, mesh),
        has_answer=_batch((config.reader_batch_size,), jnp.bool_, mesh),
        span_is_answer=_batch(
            (config.reader_batch_size, lengths.joined * MAX_SPAN), jnp.bool_, mesh
        )
        if config.models.span_scorer
        else None,
        unmasked=UnmaskedTargets(
            masked.mask_weights, masked.mask_positions, masked.mask_ids
        )
        if config.score_unmasked
        else None,
    )
    return WarmStartInputs(
        pairs if config.pairs_task else None, reading if config.task else None
    )


def _finetune(
    config: FinetuneConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    reader = config.make_reader(retriever.config.bert)
    marginalization = AnswerMarginalization(config.marginalization)
    loss = FinetuneLoss(retriever, reader, marginalization, config.microbatches)
    inputs = _finetune_inputs(config, corpus, retriever.config, mesh)
    return _Parts(reader, loss, inputs, finetune.frozen_parameters(config))


def _finetune_inputs(
    config: FinetuneConfig, corpus: CorpusSize, towers: RetrieverConfig, mesh: Mesh
) -> FinetuneInputs:
    lengths, size = config.models.lengths, config.batch_size
    retrieved = max(config.num_read, min(config.num_retrieved, corpus.num_blocks))
    blocks = _batch((size, retrieved), jnp.bool_, mesh)
    joined = _batch((size, config.num_read, lengths.joined), jnp.int32, mesh)
    spans = (size, config.num_read, lengths.joined * config.max_span)
    questions = QuestionBatch(
        question_ids=_batch((size, lengths.query), jnp.int32, mesh),
        answer_ids=_batch((size, *_ANSWERS), jnp.int32, mesh),
        question_index=_batch((size,), jnp.int32, mesh),
        answer_patterns=None,
    )
    return FinetuneInputs(
        questions=questions,
        block_embeddings=_batch(
            (size, retrieved, towers.projection_size), jnp.float32, mesh
        ),
        block_valid=blocks,
        block_has_answer=blocks,
        joined_ids=joined,
        joined_segment_ids=joined,
        span_is_answer=_batch(spans, jnp.bool_, mesh),
    )


_PARTS: Mapping[StageSpec, Callable[..., _Parts]] = {
    stages.PRETRAIN: _pretrain,
    stages.WARM_START: _warm_start,
    stages.FINETUNE: _finetune,
}


def _num_rows(num_blocks: int, mesh: Mesh) -> int:
    per_device = device_search.rows_per_device(num_blocks, mesh)
    return per_device * mesh.size


def _rows(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    return _shape(shape, dtype, NamedSharding(mesh, axes.partition_spec("block")))


def _batch(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    return _shape(shape, dtype, NamedSharding(mesh, axes.partition_spec("batch")))


def _shape(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
