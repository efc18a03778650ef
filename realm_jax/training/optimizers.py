"""BERT's optimizer: Adam with decoupled weight decay, warmup and linear decay."""

import dataclasses

import flax.traverse_util
import optax
from jaxtyping import PyTree

from realm_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What the update rule is made of.

    Attributes:
      learning_rate: the peak, reached after the warmup.
      warmup_steps: steps of linear warmup from 0.
      total_steps: the step at which the linear decay reaches `final_fraction`.
      final_fraction: share of the peak that is left at `total_steps`.
      weight_decay: decoupled; not applied to biases and normalisation.
      epsilon: Adam's.
      clip_norm: bound on the global norm of the gradient.
    """

    learning_rate: float = 3e-5
    warmup_steps: int = 0
    total_steps: int = 1
    final_fraction: float = 0.0
    weight_decay: float = 0.01
    epsilon: float = 1e-6
    clip_norm: float = 1.0

    def __post_init__(self):
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise BadInputError(
                f"warmup_steps must lie in 0..{self.total_steps} (total_steps), got "
                f"{self.warmup_steps}; shorten the warmup or train longer"
            )


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns step -> learning rate: linear up to the peak, then linear down."""
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps),
            optax.linear_schedule(
                config.learning_rate,
                config.learning_rate * config.final_fraction,
                max(config.total_steps - config.warmup_steps, 1),
            ),
        ],
        [config.warmup_steps],
    )


def make_optimizer(
    config: OptimizerConfig, frozen: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Builds the update rule.

    Args:
      config: rates and bounds.
      frozen: parameter paths, such as "retriever/document_tower"; parameters at and
        below them get no update, no moments and no share in the gradient norm.
    """
    adam = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_decayed,
        ),
    )
    if not frozen:
        return adam
    return optax.multi_transform(
        {"trained": adam, "frozen": optax.set_to_zero()},
        lambda params: _label(params, frozen),
    )


def _is_decayed(params: PyTree) -> PyTree:
    """True for matrices and embeddings, False for biases and normalisation."""
    return _map_paths(params, lambda path: path[-1] in ("kernel", "embedding"))


def _label(params: PyTree, frozen: tuple[str, ...]) -> PyTree:
    labels = _map_paths(
        params,
        lambda path: (
            "frozen"
            if any(f"{'/'.join(path)}/".startswith(f"{prefix}/") for prefix in frozen)
            else "trained"
        ),
    )
    found = set(flax.traverse_util.flatten_dict(labels).values())
    if "frozen" not in found:
        raise BadInputError(
            f"expected parameters under {', '.join(frozen)} to freeze, found none"
        )
    return labels


def _map_paths(params: PyTree, function) -> PyTree:
    flat = flax.traverse_util.flatten_dict(params)
    return flax.traverse_util.unflatten_dict({path: function(path) for path in flat})
