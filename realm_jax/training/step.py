"""One training step: gradient, update, new state. The same for every stage.

Each stage has its loss (`pretrain_loss.py` and so on). The order of work around a step
is that of the stage's loop (`pretrain.py` and so on).

`microbatches` is the number of parts of a batch that pass through a model one after
the other, forward and backward. The loss and its gradient are unchanged, also where
examples are compared with each other, in the memory of one part.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import PyTree

from realm_jax.index.device_search import EmbeddingTable
from realm_jax.metrics import means as means_lib
from realm_jax.training import flops
from realm_jax.training.optimizers import stop_gradient
from realm_jax.training.state import TrainState
from realm_jax.types import Array


class Loss(abc.ABC):
    """A loss to minimise: (parameters, a step's inputs, random key) -> a scalar.

    Parameters are one tree with a subtree per model: "retriever" and "reader".
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
        """Returns the scalar, the metrics, and the index of the next state."""
        loss, metrics = self(params, inputs, step_key(state))
        return loss, (metrics, state.index)

    def arguments(
        self, state: TrainState, inputs: Any
    ) -> tuple[PyTree, Any, jax.ShapeDtypeStruct]:
        """Returns the arguments of the loss in an update, of the key only the shape."""
        return state.params, inputs, jax.eval_shape(step_key, state)

    def update_flops(self, state: TrainState, inputs: Any) -> int:
        """Returns the operations that an update needs, without recomputation.

        A backward pass has two products for each one of the forward pass, so that the
        forward pass is counted three times. The arguments are those of `arguments`.
        """
        return 3 * flops.count(self, *self.arguments(state, inputs))


@dataclasses.dataclass(frozen=True)
class FunctionLoss(Loss):
    """A loss that is a plain function, as `Loss.__call__`."""

    function: Callable[[PyTree, Any, jax.Array], tuple[Array, means_lib.Means]]

    def __call__(
        self, params: PyTree, inputs: Any, key: jax.Array
    ) -> tuple[Array, means_lib.Means]:
        """Calls the function."""
        return self.function(params, inputs, key)


Step = Callable[[TrainState, Any], tuple[TrainState, means_lib.Means]]

SKIPPED_UPDATES = "skipped_updates"
"""Metric of `make_step(skip_nonfinite=True)`: share of updates that were skipped."""


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    frozen: tuple[str, ...] = (),
    skip_nonfinite: bool = False,
    separate_gradient_and_update: bool = False,
) -> Step:
    """Returns the jitted step(state, inputs) -> state, metrics.

    The state that is passed in is donated: its buffers become the new state's.

    Args:
      optimizer: from `make_optimizer` with the same `frozen`.
      frozen: parameter paths without gradient, which count as zero in the norms.
      skip_nonfinite: whether an update whose loss or gradient is not finite leaves
        parameters and optimizer state as they are. It is counted as a step, and its
        metrics are left out of the means, but for `SKIPPED_UPDATES`.
      separate_gradient_and_update: whether each is a program of its own. On a CPU
        each call of a program asks for its scratch memory anew, and the kernel zeroes
        what is larger than the allocator keeps (docs/benchmarks.md, "The allocator").
        The step then has no `lower`, and an index in the state is not donated.
    """

    def of_trained(params: PyTree, state: TrainState, inputs: Any):
        return loss.of_update(stop_gradient(params, frozen), state, inputs)

    def differentiate(state: TrainState, inputs: Any) -> tuple[PyTree, Any]:
        return jax.grad(of_trained, has_aux=True)(state.params, state, inputs)

    def update(
        state: TrainState, gradient: PyTree, metrics: means_lib.Means
    ) -> tuple[TrainState, means_lib.Means]:
        updated, metrics = apply_gradient(state, gradient, metrics, optimizer)
        if skip_nonfinite:
            return _unless_nonfinite(updated, metrics, state)
        return updated, metrics

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, means_lib.Means]:
        gradient, (metrics, index) = differentiate(state, inputs)
        updated, metrics = update(state.replace(index=None), gradient, metrics)
        return updated.replace(index=index), metrics

    if not separate_gradient_and_update:
        return jax.jit(step, donate_argnums=0)
    # Rebinds the names, so that `step` calls the jitted versions.
    differentiate, update = jax.jit(differentiate), jax.jit(update, donate_argnums=0)
    return step


def step_key(state: TrainState) -> jax.Array:
    """Returns the random key of the next update, a function of its number."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def apply_gradient(
    state: TrainState,
    gradient: PyTree,
    metrics: means_lib.Means,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, means_lib.Means]:
    """Returns the state after an update, and the metrics with the norms of it.

    `gradient_norm` is that of the whole gradient, before it is clipped, `update_norm`
    that of what is added to the parameters; `..._<model>` are those of one top-level
    subtree.
    """
    updates, optimizer_state = optimizer.update(
        gradient, state.optimizer_state, state.params
    )
    norms = _norms("gradient_norm", gradient) | _norms("update_norm", updates)
    state = state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        optimizer_state=optimizer_state,
    )
    return state, metrics | norms


def _norms(name: str, tree: PyTree) -> means_lib.Means:
    """Returns the norm of a tree with a subtree per model, and that of each model."""
    parts = {f"{name}_{model}": part for model, part in tree.items()}
    return {
        key: means_lib.mean_of(optax.global_norm(part), 1.0)
        for key, part in {name: tree, **parts}.items()
    }


def _unless_nonfinite(
    updated: TrainState, metrics: means_lib.Means, before: TrainState
) -> tuple[TrainState, means_lib.Means]:
    """Returns a state and metrics without the update, if that was not finite.

    `optax.apply_if_finite` keeps its counts in the optimizer's state, so a run that has
    met its first NaN could not be resumed with it.
    """
    watched = [metrics[k].total for k in ("loss", "gradient_norm") if k in metrics]
    finite = jnp.isfinite(jnp.stack(watched)).all()

    def choose(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    metrics = choose(metrics, jax.tree.map(jnp.zeros_like, metrics))
    skipped = means_lib.mean_of(1.0 - finite, 1.0)
    return updated.replace(
        params=choose(updated.params, before.params),
        optimizer_state=choose(updated.optimizer_state, before.optimizer_state),
    ), {**metrics, SKIPPED_UPDATES: skipped}


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """Returns one dropout key per forward pass; None for each without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def run_model(
    model: nn.Module,
    params: PyTree,
    *inputs: Array,
    key: jax.Array | None,
    method: str | None = None,
    microbatches: int = 1,
    **options: Any,
) -> Any:
    """Runs a method of a model on arrays of a batch; no key means no dropout."""

    def run(key: jax.Array | None, *inputs: Array) -> Any:
        return model.apply(
            {"params": params},
            *inputs,
            deterministic=key is None,
            method=method,
            rngs=None if key is None else {"dropout": key},
            **options,
        )

    if microbatches == 1:
        return run(key, *inputs)
    keys = None if key is None else jax.random.split(key, microbatches)
    # The backward pass recomputes each part; only its inputs are kept.
    outputs = jax.lax.map(
        lambda part: jax.checkpoint(run)(*part),
        (keys, *(split_batch(array, microbatches) for array in inputs)),
    )
    return jax.tree.map(join_batch, outputs)


def split_batch(array: Array, parts: int) -> Array:
    """Reshapes [batch, ...] to [part, example, ...].

    Every n-th example goes to the same part, so that each part is spread over the
    devices as the batch is.
    """
    return jnp.swapaxes(array.reshape(-1, parts, *array.shape[1:]), 0, 1)


def join_batch(array: Array) -> Array:
    """Inverts `split_batch`."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])
