"""What a training run is between two steps."""

import flax.struct
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree


@flax.struct.dataclass
class TrainState:
    """Everything a step reads and replaces.

    Attributes:
      step: number of updates done.
      params: float32 parameters, one subtree a model ("retriever", "reader").
      optimizer_state: moments and counts of the optimizer.
      key: the run's random key. A step folds its number into it, so that a resumed
        run draws what the uninterrupted one would have drawn.
    """

    step: Int[jax.Array, ""]
    params: PyTree
    optimizer_state: PyTree
    key: jax.Array


def create_state(
    params: PyTree, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jax.numpy.zeros((), "int32"),
        params=params,
        optimizer_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(seed)),
    )


def place_state(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    shardings: PyTree,
    mesh: Mesh,
) -> TrainState:
    """Moves a state to the mesh; moments lie with the parameters they belong to."""
    replicated = NamedSharding(mesh, PartitionSpec())
    # The same tree with a place for every array.
    places = state.replace(
        step=replicated,
        params=shardings,
        optimizer_state=optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            state.optimizer_state,
            shardings,
            transform_non_params=lambda _: replicated,
        ),
        key=replicated,
    )
    return jax.device_put(state, places)
