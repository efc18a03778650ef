"""One training step: gradient, update, new state. The same for every stage.

What is optimised stands in `losses.py`; the order of things around the step in
`loop.py`; `jit` is the last line here.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import optax
from jaxtyping import PyTree

from realm_jax.metrics import means as means_lib
from realm_jax.training.optimizers import stop_gradient
from realm_jax.training.state import TrainState
from realm_jax.types import Array


class Loss(Protocol):
    """(parameters, a step's inputs, random key) -> the loss and its metrics."""

    def __call__(
        self, params: PyTree, inputs: Any, key: jax.Array
    ) -> tuple[Array, means_lib.Means]:
        """Returns a differentiable scalar and the metrics of the step."""
        ...


Step = Callable[[TrainState, Any], tuple[TrainState, means_lib.Means]]
MakeStep = Callable[[Any, optax.GradientTransformation], Step]
"""(loss, optimizer) -> the jitted step, such as `make_step`."""


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    frozen: tuple[str, ...] = (),
) -> Step:
    """Returns the jitted step(state, inputs) -> state, metrics.

    The state that is passed in is donated: its buffers become the new state's.

    Args:
      loss: what is optimised.
      optimizer: from `make_optimizer` with the same `frozen`.
      frozen: parameter paths whose gradient is not computed, and zero in the norms.
    """

    def of_trained(params: PyTree, inputs: Any, key: jax.Array):
        return loss(stop_gradient(params, frozen), inputs, key)

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, means_lib.Means]:
        key = step_key(state)
        gradient, metrics = jax.grad(of_trained, has_aux=True)(
            state.params, inputs, key
        )
        return apply_gradient(state, gradient, metrics, optimizer)

    return jax.jit(step, donate_argnums=0)


def step_key(state: TrainState) -> jax.Array:
    """Returns the random key of the next update: a function of its number."""
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
