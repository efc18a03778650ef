"""A plain function as a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

from realm_jax.training.step import Loss


@dataclasses.dataclass(frozen=True)
class FunctionLoss(Loss):
    """Calls it."""

    function: Callable[..., Any]

    def __call__(self, params, inputs, key):
        return self.function(params, inputs, key)
