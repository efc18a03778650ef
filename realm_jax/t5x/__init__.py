"""Trains with T5X: the parts that gin/t5x/*.gin give to stock `t5x.train`.

Loss, modules, initial parameters, optimizer and the order of examples are those of
`realm_jax.training`. T5X partitions, loops, writes checkpoints and summaries.
docs/t5x.md has the commands, and what differs from our own trainer.

No other package imports T5X, and none imports this one.
"""

from realm_jax.t5x.model_directory import make_model_directory
from realm_jax.t5x.run import T5XStage, to_batch
from realm_jax.t5x.training import (
    Model,
    StateInitializer,
    Trainer,
    get_dataset,
    logical_axis_rules,
)

__all__ = [
    "Model",
    "StateInitializer",
    "T5XStage",
    "Trainer",
    "get_dataset",
    "logical_axis_rules",
    "make_model_directory",
    "to_batch",
]
