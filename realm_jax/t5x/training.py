"""Model, dataset, trainer and partitioning of a stage, as `t5x.train` takes them."""

from collections.abc import Mapping
from typing import Any

import flax.core
import jax
from clu.data.dataset_iterator import ArraySpec, DatasetIterator
from jaxtyping import PyTree
from t5x import models as t5x_models  # pyright: ignore[reportMissingImports]
from t5x import optimizers as t5x_optimizers  # pyright: ignore[reportMissingImports]
from t5x import trainer as t5x_trainer  # pyright: ignore[reportMissingImports]
from t5x import utils as t5x_utils  # pyright: ignore[reportMissingImports]

from realm_jax import axes, multihost
from realm_jax.errors import BadInputError
from realm_jax.metrics.means import Means
from realm_jax.t5x.run import Batch, T5XStage, to_batch
from realm_jax.training import partitioning
from realm_jax.training.initialization import initial_params
from realm_jax.training.optimizers import (
    learning_rate_schedule,
    make_optimizer,
    stop_gradient,
)
from realm_jax.training.starting import starting_params
from realm_jax.types import Array


class Model(t5x_models.BaseModel):
    """The models of a stage with its loss, for T5X."""

    FEATURE_CONVERTER_CLS = None

    def __init__(self, run: T5XStage):
        """Makes the stage's optimizer for T5X."""
        config = run.config
        optimizer = make_optimizer(
            config.optimizer(total_steps=config.train_steps), run.shapes.frozen
        )
        super().__init__(t5x_optimizers.OptaxWrapper(optimizer))
        self.run = run

    def loss_fn(
        self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
    ) -> tuple[Array, Means]:
        """Returns the stage's loss, with no gradient of frozen parameters."""
        shapes = self.run.shapes
        inputs = jax.tree.unflatten(
            jax.tree.structure(shapes.inputs),
            [batch[name] for name in to_batch(shapes.inputs)],
        )
        trained = stop_gradient(flax.core.unfreeze(params), shapes.frozen)
        return shapes.loss(trained, inputs, dropout_rng)  # pyright: ignore[reportArgumentType]

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, Any],
        input_types: Mapping[str, Any] | None = None,
    ) -> PyTree:
        """Draws the parameters that our own trainer draws with the same SEED."""
        del rng, input_shapes, input_types
        config = self.run.config
        params, params_axes = initial_params(
            self.run.retriever, self.run.reader, config.models.lengths, config.seed
        )
        return {"params": params, "params_axes": params_axes}

    def predict_batch_with_aux(
        self, params: PyTree, batch: Batch, rng: jax.Array | None = None
    ) -> Any:
        """Raises an error: T5X does not search when it infers."""
        raise NotImplementedError("use `realm evaluate` or `realm ask`; docs/t5x.md")

    def score_batch(
        self, params: PyTree, batch: Batch, return_intermediates: bool = False
    ) -> Any:
        """Raises an error, as `predict_batch_with_aux`."""
        raise NotImplementedError("use `realm evaluate` or `realm ask`; docs/t5x.md")


class StateInitializer(t5x_utils.TrainStateInitializer):
    """Starts from WARM_START, where T5X has no checkpoint to restore."""

    def __init__(self, *arguments: Any, init_fn: Any, **options: Any):
        """Takes what T5X gives; `init_fn` is a method of `Model`."""
        super().__init__(*arguments, init_fn=init_fn, **options)
        self._run: T5XStage = init_fn.__self__.run

    def from_scratch(self, init_rng: jax.Array) -> Any:
        """Returns the initial state, with the parameters of the run's sources."""
        state, run = super().from_scratch(init_rng), self._run
        started = starting_params(
            flax.core.unfreeze(multihost.fetch(state.params)),
            run.config,
            run.retriever_config,
            run.corpus,
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        placed = partitioning.place(flax.core.freeze(started), shardings)
        return state.replace_params(placed)


class Dataset(DatasetIterator):
    """The inputs of updates, from the trainer's step on."""

    def __init__(self, run: T5XStage):
        """Makes the inputs of a run."""
        self._run = run
        self._step: int | None = None

    def __next__(self) -> Batch:
        step, batch = self._run.at(self._step)
        self._step = step + 1
        return batch

    @property
    def element_spec(self) -> Mapping[str, ArraySpec]:
        """Shape and type of each array."""
        return {
            name: ArraySpec(leaf.dtype, leaf.shape)
            for name, leaf in to_batch(self._run.shapes.inputs).items()
        }


def get_dataset(
    cfg: Any,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Any,
    *,
    run: T5XStage,
) -> Dataset:
    """Returns the inputs of a run's updates: the `get_dataset_fn` of `t5x.train`.

    T5X's batch size must be that of the run, which says everything else; this process
    makes one part of `num_shards` of each batch. No feature converter is used, for
    examples are prepared.
    """
    del feature_converter_cls
    if cfg.batch_size != run.config.batch_size:
        raise BadInputError(
            f"expected T5X's DatasetConfig.batch_size to be BATCH_SIZE "
            f"({run.config.batch_size}), got {cfg.batch_size}; set BATCH_SIZE alone"
        )
    run.make_part(shard_id, num_shards)
    return Dataset(run)


class Trainer(t5x_trainer.Trainer):
    """T5X's trainer, which hands the retriever over to the dataset of its model."""

    def __init__(self, model: Model, **options: Any):
        """Takes what T5X gives, and has the dataset begin."""
        config = model.run.config
        schedule = learning_rate_schedule(
            config.optimizer(total_steps=config.train_steps)
        )
        # The optimizer has the schedule too: this one is for the summaries.
        super().__init__(
            model=model, learning_rate_fn=schedule, num_microbatches=None, **options
        )
        self._run = model.run
        self._run.begin(int(self.train_state.step), self._retriever())

    def train(
        self, batch_iter: Any, num_steps: int, start_step: int | None = None
    ) -> Any:
        """Trains as T5X does, in parts that end where a refresh is due."""
        step = int(self.train_state.step if start_step is None else start_step)
        end, summary = step + num_steps, None
        while step < end:
            until = int(min(end, self._run.next_hand_over(step)))
            summary = super().train(batch_iter, until - step, start_step=step)
            step = until
            self._run.hand_over(step, self._retriever())
            self.train_metrics_manager.write_scalars(step, self._run.scalars(step))
        return summary

    def close(self) -> None:
        """Ends the run; T5X calls it when all updates are done."""
        self._run.close(is_finished=True)
        super().close()

    def _retriever(self) -> PyTree:
        return self.train_state.params["retriever"]


def logical_axis_rules(
    parameter_partitioning_dims: int = 1,
) -> list[tuple[str, str | None]]:
    """Returns our axis table for T5X's mesh, which has the axes "data" and "model".

    With 2 as in T5X's `standard_logical_axis_rules` parameters are split over "data",
    too.
    """
    of_fsdp = "data" if parameter_partitioning_dims == 2 else None
    places = {"data": "data", "fsdp": of_fsdp, "model": "model"}
    rules = []
    for name, mesh_axes in axes.AXIS_RULES.items():
        first = mesh_axes[0] if isinstance(mesh_axes, tuple) else mesh_axes
        rules.append((name, places.get(first) if first else None))
    return rules
