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

from realm_jax import stages
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.index import device_search, embed
from realm_jax.index.candidates import num_neighbours
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.index.searchers import DeviceConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.stages import StageSpec
from realm_jax.training import (
    finetune,
    initialization,
    partitioning,
    pretrain,
    warm_start,
)
from realm_jax.training.optimizers import make_optimizer
from realm_jax.training.stage_config import StageConfig, UpdateShapes, rows_of_batch
from realm_jax.training.state import TrainState, create_state, state_shardings
from realm_jax.training.step import Loss, make_step


@dataclasses.dataclass(frozen=True)
class Training:
    """The update of a stage; state and inputs are shapes with shardings."""

    mesh: Mesh
    loss: Loss
    step: Callable[..., Any]
    state: TrainState
    inputs: Any


def training(config: StageConfig, corpus: CorpusSize, mesh: Mesh) -> Training:
    """Returns the update of a training stage over a corpus, on a mesh."""
    retriever = Retriever(config.models.retriever_config(corpus.vocab_size))
    partitioning.require_models_split(mesh, retriever.config.bert)
    update = _UPDATE_SHAPES[config.stage](config, retriever, corpus, mesh)
    optimizer = make_optimizer(
        config.optimizer(total_steps=config.train_steps), update.frozen
    )

    def initial() -> tuple[TrainState, PyTree]:
        params, names = initialization.initial_params(
            retriever, update.reader, config.models.lengths, 0
        )
        return create_state(params, optimizer, 0), names

    state, names = jax.eval_shape(initial)
    places = state_shardings(state, partitioning.parameter_shardings(mesh, names), mesh)
    state = jax.tree.map(
        lambda leaf, place: _shape(leaf.shape, leaf.dtype, place), state, places
    )
    step = make_step(update.loss, optimizer, update.frozen)
    state = state.replace(index=update.index)
    return Training(mesh, update.loss, step, state, update.inputs)


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
    variables = jax.eval_shape(retriever.init, key, ids, ids, ids)
    params = jax.tree.map(
        lambda leaf: _shape(leaf.shape, leaf.dtype, everywhere), variables["params"]
    )
    rows = -(-batch_size // mesh.size) * mesh.size
    batch = rows_of_batch((rows, document_length), jnp.int32, mesh)
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

    precision = Precision(device.precision)
    table = device_search.table_shapes(num_blocks, dimension, mesh, precision)
    queries = rows_of_batch((batch_size, dimension), jnp.float32, mesh)
    return jax.jit(run), (table, queries)


_UPDATE_SHAPES: Mapping[StageSpec, Callable[..., UpdateShapes]] = {
    stages.PRETRAIN: pretrain.update_shapes,
    stages.WARM_START: warm_start.update_shapes,
    stages.FINETUNE: finetune.update_shapes,
}


def _shape(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
