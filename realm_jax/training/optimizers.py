"""BERT's optimizer: Adam with decoupled weight decay, warmup and linear decay.

The parameters of a run are those of two models, one top-level subtree each ("retriever"
and "reader"). The gradient may be clipped over both at once or per model, and the
retriever may have its own learning rate.
"""

import dataclasses
import difflib
from typing import Any

import flax.traverse_util
import jax
import optax
from jaxtyping import PyTree

from realm_jax import ranges
from realm_jax.errors import BadInputError

CLIPS = ("joint", "per_model")

_RETRIEVER_RATE = ranges.POSITIVE._replace(
    advice="to train the reader alone, set FROZEN = ['retriever']"
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the update rule.

    Attributes:
      learning_rate: the peak, reached after the warmup.
      warmup_steps: steps of linear warmup from 0; None for `warmup_fraction`.
      total_steps: the step at which the linear decay reaches `final_fraction`.
      final_fraction: share of the peak that remains at `total_steps`.
      weight_decay: decoupled; not applied to biases and normalisation.
      epsilon: epsilon of Adam.
      clip_norm: bound on the norm of the gradient, before Adam.
      clip: the norm that `clip_norm` bounds. "joint": of all parameters together, as in
        the authors' code through BERT's optimizer. "per_model": of each model by
        itself, so that a large gradient of one does not scale down the other's.
      retriever_rate: factor on the retriever's learning rate, its weight decay
        included; the reader's factor is always 1.
      warmup_fraction: the warmup as a share of `total_steps`, where `warmup_steps` is
        None.
    """

    learning_rate: float = 3e-5
    warmup_steps: int | None = None
    total_steps: int = 1
    final_fraction: float = 0.0
    weight_decay: float = 0.01
    epsilon: float = 1e-6
    clip_norm: float = 1.0
    clip: str = "joint"
    retriever_rate: float = 1.0
    warmup_fraction: float = 0.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            learning_rate=ranges.POSITIVE,
            warmup_steps=ranges.whole(0).or_none(),
            total_steps=ranges.whole(0),
            final_fraction=ranges.SHARE,
            weight_decay=ranges.NOT_NEGATIVE,
            epsilon=ranges.POSITIVE,
            clip_norm=ranges.POSITIVE,
            retriever_rate=_RETRIEVER_RATE,
            warmup_fraction=ranges.SHARE,
        )
        # Without updates there is no schedule, whatever the warmup.
        if self.total_steps and self.warmup > self.total_steps:
            raise BadInputError(
                f"warmup_steps must lie in 0..{self.total_steps} (total_steps), got "
                f"{self.warmup}; shorten the warmup or train longer"
            )
        if self.clip not in CLIPS:
            raise BadInputError(
                f"expected OptimizerConfig.clip to be one of {', '.join(CLIPS)}, got "
                f"{self.clip!r}"
            )

    @property
    def warmup(self) -> int:
        """Number of steps of the warmup."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return round(self.warmup_fraction * self.total_steps)


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns step -> learning rate: linear up to the peak, then linear down."""
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, config.warmup),
            optax.linear_schedule(
                config.learning_rate,
                config.learning_rate * config.final_fraction,
                max(config.total_steps - config.warmup, 1),
            ),
        ],
        [config.warmup],
    )


def make_optimizer(
    config: OptimizerConfig, frozen: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Builds the update rule for parameters with one top-level subtree per model.

    Parameters at and below `frozen` paths, such as "retriever/document_tower", get no
    update, no moments and no share in the clipped norm. The tree structure of the state
    does not depend on `clip` and `retriever_rate`, so a checkpoint can be restored
    under any of them.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    if config.clip == "per_model":
        clip = _for_each_model(clip)
    adam = optax.chain(
        clip,
        optax.adamw(
            learning_rate_schedule(config),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_decayed,
        ),
    )
    if config.retriever_rate != 1.0:
        adam = _scale_retriever(adam, config.retriever_rate)
    if not frozen:
        return adam
    return optax.multi_transform(
        {"trained": adam, "frozen": optax.set_to_zero()},
        lambda params: _label(params, frozen),
    )


def _for_each_model(
    stateless: optax.GradientTransformation,
) -> optax.GradientTransformation:
    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        models: dict[str, Any] = updates  # pyright: ignore[reportAssignmentType]
        clipped = {
            name: stateless.update(model, optax.EmptyState())[0]
            for name, model in models.items()
        }
        return type(models)(clipped)

    return optax.stateless(update)


def _scale_retriever(
    inner: optax.GradientTransformation, share: float
) -> optax.GradientTransformation:
    """Scales the retriever's updates from `inner`, and leaves its state unchanged.

    A further link in the chain would change the tree structure of the state, and
    checkpoints of a run without it could not be restored.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = inner.update(updates, state, params)
        models: dict[str, Any] = updates  # pyright: ignore[reportAssignmentType]
        scaled = jax.tree.map(lambda leaf: share * leaf, models["retriever"])
        return type(models)({**models, "retriever": scaled}), state

    return optax.GradientTransformation(inner.init, update)


def _is_decayed(params: PyTree) -> PyTree:
    """Returns True for matrices and embeddings, False for biases and normalisation."""
    return _map_paths(params, lambda path: path[-1] in ("kernel", "embedding"))


def stop_gradient(params: PyTree, frozen: tuple[str, ...]) -> PyTree:
    """Returns the same parameters, without gradient at and below frozen paths."""
    if not frozen:
        return params
    return jax.tree.map(
        lambda leaf, label: jax.lax.stop_gradient(leaf) if label == "frozen" else leaf,
        params,
        _label(params, frozen),
    )


def _label(params: PyTree, frozen: tuple[str, ...]) -> PyTree:
    """Returns "frozen" for parameters at and below frozen paths, else "trained"."""
    _require_paths(params, frozen)
    return _map_paths(
        params,
        lambda path: "trained" if _paths_above(path).isdisjoint(frozen) else "frozen",
    )


def _require_paths(params: PyTree, frozen: tuple[str, ...]) -> None:
    known = set().union(*map(_paths_above, flax.traverse_util.flatten_dict(params)))
    for path in frozen:
        if path not in known:
            alike = difflib.get_close_matches(path, sorted(known)) or sorted(params)
            raise BadInputError(
                f"expected parameters at or below {path!r} to freeze, found none; "
                f"the closest are {', '.join(alike)}: correct FROZEN"
            )


def _paths_above(path: tuple[str, ...]) -> set[str]:
    """Returns the path of a parameter, and those of all that contain it."""
    return {"/".join(path[:length]) for length in range(1, len(path) + 1)}


def _map_paths(params: PyTree, function) -> PyTree:
    # T5X freezes dictionaries, and labels must be in a tree of the same kind.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: function(tuple(part.key for part in path)), params
    )
