"""One training step: gradient, update, new state. The same for every stage.

The losses are in `losses.py`, the order of work around the step is in `loop.py`.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from realm_jax.index.device_search import EmbeddingTable
from realm_jax.metrics import means as means_lib
from realm_jax.training import flops
from realm_jax.training.optimizers import stop_gradient
from realm_jax.training.state import TrainState
from realm_jax.types import Array


class Loss(abc.ABC):
    """A loss to minimise: (parameters, a step's inputs, random key) -> a scalar.

    A loss that updates further state overrides `of_update` and `arguments`
    (`rolling_refresh.py`); other losses depend only on the inputs of the step.
    """

    @abc.abstractmethod
    def __call__(
        self, params: PyTree, inputs: Any, key: jax.Array
    ) -> tuple[Array, means_lib.Means]:
        """Returns a differentiable scalar and the metrics of the step."""

    def of_update(
        self, params: PyTree, state: TrainState, inputs: Any
    ) -> tuple[Array, tuple[means_lib.Means, EmbeddingTable | None]]:
        """Returns the scalar, the metrics, and the index of the next state.

        Args:
          params: those of the state; the scalar is differentiated with respect to them.
          state: the state before the update.
          inputs: the inputs of the step.
        """
        loss, metrics = self(params, inputs, step_key(state))
        return loss, (metrics, state.index)

    def arguments(
        self, state: TrainState, inputs: Any
    ) -> tuple[PyTree, Any, jax.ShapeDtypeStruct]:
        """Returns the arguments of the loss in an update; of the key only the shape.

        Args:
          state: arrays or shapes.
          inputs: inputs of the step, likewise.
        """
        return state.params, inputs, jax.eval_shape(step_key, state)

    def update_flops(self, state: TrainState, inputs: Any) -> int:
        """Returns the operations that an update needs, without recomputation.

        A backward pass has two products for each one of the forward pass, so that the
        forward pass is counted three times. The arguments are those of `arguments`.
        """
        return 3 * flops.count(self, *self.arguments(state, inputs))


@dataclasses.dataclass(frozen=True)
class FunctionLoss(Loss):
    """A loss that is a plain function.

    Attributes:
      function: as `Loss.__call__`.
    """

    function: Callable[[PyTree, Any, jax.Array], tuple[Array, means_lib.Means]]

    def __call__(
        self, params: PyTree, inputs: Any, key: jax.Array
    ) -> tuple[Array, means_lib.Means]:
        """Calls the function."""
        return self.function(params, inputs, key)


Step = Callable[[TrainState, Any], tuple[TrainState, means_lib.Means]]


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    frozen: tuple[str, ...] = (),
) -> Step:
    """Returns the jitted step(state, inputs) -> state, metrics.

    The state that is passed in is donated: its buffers become the new state's.

    Args:
      loss: the loss to minimise.
      optimizer: from `make_optimizer` with the same `frozen`.
      frozen: parameter paths without gradient, which count as zero in the norms.
    """

    def of_trained(params: PyTree, state: TrainState, inputs: Any):
        return loss.of_update(stop_gradient(params, frozen), state, inputs)

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, means_lib.Means]:
        gradient, (metrics, index) = jax.grad(of_trained, has_aux=True)(
            state.params, state, inputs
        )
        state, metrics = apply_gradient(state, gradient, metrics, optimizer)
        return state.replace(index=index), metrics

    return jax.jit(step, donate_argnums=0)


def step_key(state: TrainState) -> jax.Array:
    """Returns the random key of the next update, a function of its number."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def apply_gradient(
    state: TrainState,
    gradient: PyTree,
    metrics: means_lib.Means,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, means_lib.Means]:
    """Returns the state after an update, and the metrics with the gradient's norms.

    `gradient_norm` is that of the whole gradient, before it is clipped, and
    `gradient_norm_<model>` that of one of its models, a top-level subtree.
    """
    updates, optimizer_state = optimizer.update(
        gradient, state.optimizer_state, state.params
    )
    parts = {f"gradient_norm_{model}": part for model, part in gradient.items()}
    norms = {
        name: means_lib.mean_of(optax.global_norm(part), 1.0)
        for name, part in {"gradient_norm": gradient, **parts}.items()
    }
    state = state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        optimizer_state=optimizer_state,
    )
    return state, metrics | norms
