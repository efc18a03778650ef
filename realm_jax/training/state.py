"""Provides the state of a training run between two steps."""

from typing import Any

import flax.struct
import flax.traverse_util
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import Int, PyTree

from realm_jax.index.device_search import EmbeddingTable
from realm_jax.training import partitioning
from realm_jax.types import Array


@flax.struct.dataclass
class TrainState:
    """Everything a step reads and replaces.

    Attributes:
      params: float32 parameters, one subtree per model ("retriever", "reader").
      key: the run's random key. A step folds its number into it, so that a resumed
        run draws the same numbers as an uninterrupted one.
      index: the embeddings that are searched, if steps renew them
        (`rolling_refresh.py`); None if they come from snapshots.
    """

    step: Int[jax.Array, ""]
    params: PyTree
    optimizer_state: PyTree
    key: jax.Array
    index: EmbeddingTable | None = None


def create_state(
    params: PyTree, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(
        step=jax.numpy.zeros((), "int32"),
        params=params,
        optimizer_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(seed)),
    )


def place_state(state: TrainState, shardings: PyTree, mesh: Mesh) -> TrainState:
    """Places a state that every process holds in full; see `state_shardings`."""
    return partitioning.place(state, state_shardings(state, shardings, mesh))


def state_shardings(state: TrainState, shardings: PyTree, mesh: Mesh) -> TrainState:
    """Returns the sharding of each array; moments follow their parameters."""
    replicated = NamedSharding(mesh, PartitionSpec())
    places_by_path: dict[Any, Any] = flax.traverse_util.flatten_dict(shardings)

    def place(path: tuple[Any, ...], leaf: Array) -> NamedSharding:
        # Moments are trees like the parameters', nested in the optimizer's state.
        # `optax.tree.map_params` does not support `multi_transform`.
        keys = tuple(part.key for part in path if isinstance(part, DictKey))
        ends = (keys[start:] for start in range(len(keys)))
        return next(
            (places_by_path[end] for end in ends if end in places_by_path), replicated
        )

    # The same tree with a sharding for every array.
    return state.replace(
        step=replicated,
        params=shardings,
        optimizer_state=jax.tree_util.tree_map_with_path(place, state.optimizer_state),
        key=replicated,
    )


def count_parameters(tree: PyTree) -> int:
    """Returns the number of parameters in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
