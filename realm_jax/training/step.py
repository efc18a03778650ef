"""One training step: gradient, update, new state. The same for every stage.

What is optimised stands in `losses.py`; the order of things around the step in
`loop.py`; `jit` is the last line here.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import optax
from jaxtyping import PyTree

from realm_jax.training import metrics as metrics_lib
from realm_jax.training.state import TrainState
from realm_jax.types import Array


class Loss(Protocol):
    """(parameters, a step's inputs, random key) -> the loss and its metrics."""

    def __call__(
        self, params: PyTree, inputs: Any, key: jax.Array
    ) -> tuple[Array, metrics_lib.Means]:
        """Returns a differentiable scalar and the metrics of the step."""
        ...


Step = Callable[[TrainState, Any], tuple[TrainState, metrics_lib.Means]]


def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> Step:
    """Returns the jitted step(state, inputs) -> state, metrics.

    The state that is passed in is donated: its buffers become the new state's.
    """

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, metrics_lib.Means]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, inputs, key)
        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.params
        )
        metrics["gradient_norm"] = metrics_lib.mean_of(optax.global_norm(gradient), 1.0)
        state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            optimizer_state=optimizer_state,
        )
        return state, metrics

    return jax.jit(step, donate_argnums=0)
