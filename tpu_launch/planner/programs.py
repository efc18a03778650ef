"""Provides the programs of a run over shapes: nothing is allocated or run.

They are made of the parts that the stages themselves run (`training/`), so that the
plan describes what will be computed. A mesh may be of devices that are not available.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
_MASKS, _ANSWERS, _ANSWER_PIECES = 10, 10, 20
# Arbitrary: they are only written into documents.
_CLS, _SEP = 101, 102
_DTYPES = ("int32", "float32", "bool")


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


class _Parts(NamedTuple):
    """The parts of an update that differ between stages; an index in the state."""

    reader: Reader
    loss: Loss
    inputs: Any
    frozen: tuple[str, ...]
    index: EmbeddingTable | None = None


def training(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> Training:
    """Returns the update of a training stage over a corpus, on a mesh."""
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

    The mesh is of the devices of a host; the batch size is over all of them.
    """
    retriever = Retriever(towers)
    everywhere = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((1, document_length), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(retriever.init, key, *(ids, ids, ids))
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

    Of the candidates, the null document is one.
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
    exact = jnp.float32 if precision is Precision.FLOAT32 else jnp.bfloat16
    has_codes = precision is Precision.INT8
    return EmbeddingTable(
        _rows(num_blocks, (dimension,), exact, mesh),
        _rows(num_blocks, (dimension,), jnp.int8, mesh) if has_codes else None,
        _rows(num_blocks, (), jnp.float32, mesh) if has_codes else None,
        _shape((), jnp.int32, NamedSharding(mesh, PartitionSpec())),
    )


def _pretrain(
    config: PretrainConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    reader = config.models.knowledge_encoder(retriever.config.bert)
    frozen = pretrain.frozen_parameters(config)
    loss = pretrain.make_loss(config, retriever, reader)
    sizes = _sizes(config, config.batch_size)
    batch = _batch_of(PretrainBatch, sizes, mesh)
    if config.searcher != "device":
        candidates = _candidates(sizes, config.num_candidates, mesh)
        return _Parts(reader, loss, PretrainInputs(batch, candidates), frozen)
    lengths = config.models.lengths
    layout = DocumentLayout(lengths.document, lengths.joined, _CLS, _SEP)
    retrieving = RetrievingLoss(
        *(loss, config.num_candidates, layout, mesh),
        config.device.approximate,
        config.embeddings_from_index,
    )
    table = embedding_table(
        corpus.num_blocks,
        retriever.config.projection_size,
        Precision(config.device.precision),
        mesh,
    )
    # Title and body of the longest block, without [CLS] and two [SEP].
    ids = _rows(corpus.num_blocks, (lengths.document - 3,), corpus.id_dtype, mesh)
    count = _rows(corpus.num_blocks, (), jnp.uint16, mesh)
    inputs = RetrievingInputs(
        batch,
        None if config.index_in_state else table,
        TokenTable(ids, count, count),
        _candidates(sizes, 1, mesh) if config.own_block else None,
    )
    kept = table if config.index_in_state else None
    return _Parts(reader, pretrain.renewing(config, retrieving), inputs, frozen, kept)


def _warm_start(
    config: WarmStartConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    del corpus
    reader = config.models.knowledge_encoder(retriever.config.bert)
    loss = WarmStartLoss(retriever, reader, config.microbatches)
    pairs = reading = None
    if config.pairs_task:
        sizes = _sizes(config, config.batch_size)
        pairs = _batch_of(InverseClozeBatch, sizes, mesh)
    if config.task:
        sizes = _sizes(config, config.reader_batch_size)
        spans = (sizes["batch"], sizes["joined"] * MAX_SPAN)
        reading = _batch_of(
            ReaderInputs,
            sizes,
            mesh,
            batch=_batch_of(PretrainBatch, sizes, mesh),
            span_is_answer=_batch(spans, jnp.bool_, mesh)
            if config.models.span_scorer
            else None,
            unmasked=_batch_of(UnmaskedTargets, sizes, mesh)
            if config.score_unmasked
            else None,
        )
    inputs = WarmStartInputs(pairs, reading)
    return _Parts(reader, loss, inputs, warm_start.frozen_parameters(config))


def _finetune(
    config: FinetuneConfig, corpus: CorpusSize, retriever: Retriever, mesh: Mesh
) -> _Parts:
    reader = config.make_reader(retriever.config.bert)
    marginalization = AnswerMarginalization(config.marginalization)
    loss = FinetuneLoss(retriever, reader, marginalization, config.microbatches)
    size, length = config.batch_size, config.models.lengths.joined
    retrieved = max(config.num_read, min(config.num_retrieved, corpus.num_blocks))
    blocks = _batch((size, retrieved), jnp.bool_, mesh)
    joined = _batch((size, config.num_read, length), jnp.int32, mesh)
    spans = (size, config.num_read, length * config.max_span)
    embeddings = (size, retrieved, retriever.config.projection_size)
    inputs = FinetuneInputs(
        questions=_batch_of(QuestionBatch, _sizes(config, size), mesh),
        block_embeddings=_batch(embeddings, jnp.float32, mesh),
        block_valid=blocks,
        block_has_answer=blocks,
        joined_ids=joined,
        joined_segment_ids=joined,
        span_is_answer=_batch(spans, jnp.bool_, mesh),
    )
    return _Parts(reader, loss, inputs, finetune.frozen_parameters(config))


_PARTS: Mapping[StageSpec, Callable[..., _Parts]] = {
    stages.PRETRAIN: _pretrain,
    stages.WARM_START: _warm_start,
    stages.FINETUNE: _finetune,
}


def _sizes(config: StageConfig, batch_size: int) -> dict[str, int]:
    """Returns the sizes of the dimensions that `realm_jax.types` names."""
    return {
        "batch": batch_size,
        **dataclasses.asdict(config.models.lengths),
        "mask": _MASKS,
        "target": _MASKS,
        "answer": _ANSWERS,
        "piece": _ANSWER_PIECES,
    }


def _candidates(sizes: Mapping[str, int], count: int, mesh: Mesh) -> Candidates:
    valid = _batch((sizes["batch"], count), jnp.bool_, mesh)
    return _batch_of(Candidates, {**sizes, "candidate": count}, mesh, valid=valid)


def _batch_of(kind: Any, sizes: Mapping[str, int], mesh: Mesh, **given: Any) -> Any:
    """Returns a batch of some type, as shapes: those by which its fields are annotated.

    Fields with a default keep it, and `given` ones are what is given.
    """
    annotations = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in given or field.default is not dataclasses.MISSING:
            continue
        # Each is the union of an array of JAX and one of NumPy.
        annotation, _ = typing.get_args(annotations[field.name])
        shape = tuple(sizes[name] for name in annotation.dim_str.split())
        dtype = next(dtype for dtype in _DTYPES if dtype in annotation.dtypes)
        given[field.name] = _batch(shape, dtype, mesh)
    return kind(**given)


def _rows(num_blocks: int, shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    """Returns an array with a row for each block, split over all devices."""
    rows = device_search.rows_per_device(num_blocks, mesh) * mesh.size
    place = NamedSharding(mesh, axes.partition_spec("block"))
    return _shape((rows, *shape), dtype, place)


def _batch(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    return _shape(shape, dtype, NamedSharding(mesh, axes.partition_spec("batch")))


def _shape(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
