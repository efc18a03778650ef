"""Floating-point operations, counted from the shapes in a program.

The compiler's own figure counts the body of a loop once; this counts it as often as it
is run. Only products of matrices are counted (two operations for each multiply-add), as
is the custom for utilisation (PaLM, appendix B): all else is a few percent of a
transformer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree


def count(function: Callable[..., Any], *arguments: PyTree) -> int:
    """Returns the operations of one call, over all devices.

    What a backward pass computes again is counted again: trace a gradient and this is
    what the devices do, trace the loss and three times this is what the model needs
    (`Loss.update_flops`).

    Args:
      function: of arrays; jitted or not. It is traced, never run.
      arguments: arrays or shapes.

    Raises:
      ValueError: it has a loop with matrix products whose length is not in its shapes.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_product(equation)
    inner = [_count(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
    match name:
        case "scan":
            return params["length"] * sum(inner)
        case "cond":
            return max(inner)
        case "while" if any(inner):
            raise ValueError(
                "expected loops whose length is in their shapes (scan), got a while "
                "loop with matrix products"
            )
        case "shard_map":
            # Written for one device: every device does this.
            return params["mesh"].size * sum(inner)
    return sum(inner)


def _count_product(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * depth * math.prod(equation.outvars[0].aval.shape)
