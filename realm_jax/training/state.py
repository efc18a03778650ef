"""What a training run is between two steps."""

import flax.struct
import jax
import optax
from jaxtyping import Int, PyTree

from realm_jax.types import Array


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

    step: Int[Array, ""]
    params: PyTree
    optimizer_state: PyTree
    key: Array


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
