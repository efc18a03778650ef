"""Holds what all searchers share: the checks of their inputs, and the sample."""

from typing import Any

import numpy as np
from jaxtyping import Int

from realm_jax.errors import BadInputError

_SAMPLED_BLOCKS = 64


def sampled_blocks(num_blocks: int) -> Int[np.ndarray, " sample"]:
    """Returns ids of a few blocks, spread over a corpus of `num_blocks`."""
    spread = np.linspace(0, num_blocks - 1, min(_SAMPLED_BLOCKS, num_blocks))
    return np.unique(spread.astype(np.int64))


def check_embeddings(embeddings: Any) -> None:
    """Requires embeddings of an index that are a non-empty matrix."""
    shape = np.shape(embeddings)
    if len(shape) != 2 or 0 in shape:
        raise BadInputError(
            "expected embeddings of shape [blocks, projection] with at least one "
            f"block, got {list(shape)}; build the index again."
        )


def check_query(shape: tuple[int, ...], dimension: int, k: int) -> None:
    """Requires queries of the width of the blocks, and k >= 1."""
    if len(shape) != 2 or shape[1] != dimension:
        raise BadInputError(
            f"expected query embeddings of shape [batch, {dimension}] as the index "
            f"has, got {list(shape)}; search with the retriever that built the index."
        )
    if k < 1:
        raise BadInputError(f"expected k of at least 1 neighbour, got {k}; raise it.")
