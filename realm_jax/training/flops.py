"""Counts floating-point operations from the shapes in a program.

The compiler's own figure counts the body of a loop once; this counts every iteration.
Only matrix products are counted (two operations per multiply-add), as is customary for
utilisation (PaLM, appendix B): everything else is a few percent of a transformer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree


def count(function: Callable[..., Any], *arguments: PyTree) -> int:
    """Returns the operations of one call, over all devices.

    Operations that a backward pass recomputes are counted again: the count of a
    gradient is what the devices do, and three times the count of a loss is what the
    model needs (`Loss.update_flops`).

    The function, jitted or not, is traced on arrays or shapes and never run. A loop
    with matrix products whose length its shapes do not give is a ValueError.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


# Products of a fused kernel as large as that of queries and keys; the scores, which it
# does not keep, are computed again for its gradient.
_ATTENTION_BY_CUDNN = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_product(equation)
    if name in _ATTENTION_BY_CUDNN:
        return _ATTENTION_BY_CUDNN[name] * _count_scores(equation)
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
            # The body is written for one device, and every device runs it.
            return params["mesh"].size * sum(inner)
    return sum(inner)


def _count_product(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * depth * math.prod(equation.outvars[0].aval.shape)


def _count_scores(equation: core.JaxprEqn) -> int:
    """Returns the operations of the product of all queries and keys."""
    query, key = (operand.aval.shape for operand in equation.invars[:2])
    batch, queries, heads, head_dim = query
    return 2 * batch * queries * key[1] * heads * head_dim
