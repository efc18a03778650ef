"""Maximum inner product search over the block embeddings, behind one interface.

`device` is exact and runs on the accelerator; `scann` is approximate above a few
thousand blocks and runs on the threads of the host. Both answer with the same
`Neighbours`, so nothing downstream knows which one ran.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import tempfile
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from realm_jax.errors import BadInputError
from realm_jax.types import Neighbours

SEARCHERS = ("device", "scann")

# Rows scored at once: the scores of a batch then stay in the cache of a CPU core, and
# no more than [batch, CHUNK_ROWS] of them exist on any backend.
CHUNK_ROWS = 8192
# Rows that share one maximum. Ranking maxima first and ranking only the rows of the
# best groups is exact, and nearly twice as fast as ranking every row.
GROUP_ROWS = 32

_ABOUT = "searcher.json"


class Searcher(Protocol):
    """Finds the blocks whose embeddings have the largest inner product with a query.

    Attributes:
      step: training step of the retriever that embedded the blocks.
      num_blocks: blocks that can be found; ids are 0 to num_blocks - 1.
    """

    step: int
    num_blocks: int

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """Returns the k best blocks of each query, best first.

        Where fewer than k are found, ids are -1 and scores -inf.

        Raises:
          BadInputError: the queries have another width than the blocks, or k < 1.
        """
        ...


def make_searcher(
    name: str, embeddings: Float[Any, "block projection"], step: int = 0
) -> Searcher:
    """Returns the searcher called `name` over these embeddings.

    Args:
      name: `device` or `scann`.
      embeddings: row i embeds block i.
      step: training step of the retriever that embedded them.

    Raises:
      BadInputError: the name is unknown, or the embeddings are not a non-empty matrix.
    """
    if name == "device":
        return ExactSearcher(embeddings, step)
    if name == "scann":
        return ScannSearcher(np.asarray(embeddings, np.float32), step)
    raise BadInputError(
        f"unknown searcher {name!r}; expected one of: {', '.join(SEARCHERS)}. "
        "Set SEARCHER to one of them."
    )


class ExactSearcher:
    """Exact search on the accelerator, streamed over the rows.

    Equal scores are ordered by block id, so that the answer is a function of its
    input on every backend.
    """

    def __init__(self, embeddings: Float[Any, "block projection"], step: int = 0):
        """Places the embeddings on the device, in the precision they come in.

        Raises:
          BadInputError: the embeddings are not a non-empty matrix.
        """
        _check_embeddings(embeddings)
        self.step = step
        self.num_blocks, self._dimension = embeddings.shape
        chunk_rows = min(CHUNK_ROWS, _round_up(self.num_blocks, GROUP_ROWS))
        padding = _round_up(self.num_blocks, chunk_rows) - self.num_blocks
        padded = np.pad(np.asarray(embeddings), ((0, padding), (0, 0)))
        # [chunk, rows of a chunk, projection]
        self._chunks = jnp.asarray(padded.reshape(-1, chunk_rows, self._dimension))

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """See `Searcher.search`."""
        _check_query(query_embeddings.shape, self._dimension, k)
        queries = jnp.asarray(query_embeddings)
        return exact_neighbours(queries, self._chunks, self.num_blocks, k)


@functools.partial(jax.jit, static_argnames=("k",))
def exact_neighbours(
    query_embeddings: Float[Array, "batch projection"],
    chunks: Float[Array, "chunk row projection"],
    num_blocks: Int[Any, ""],
    k: int,
) -> Neighbours:
    """Returns the k best blocks of each query, equal scores ordered by id.

    Args:
      query_embeddings: one row a query.
      chunks: block embeddings in order, cut into chunks of a multiple of `GROUP_ROWS`
        rows; rows from `num_blocks` on are padding.
      num_blocks: blocks in `chunks`. An array, so that a grown corpus of the same
        padded size is searched without compiling anew.
      k: neighbours wanted.
    """
    batch_size, chunk_rows = query_embeddings.shape[0], chunks.shape[1]
    queries = query_embeddings.astype(chunks.dtype)

    def merge_chunk(best, numbered_chunk):
        first_id, chunk = numbered_chunk
        scores = jnp.einsum(
            "bp,rp->br",
            queries,
            chunk,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        ids = first_id + jnp.arange(chunk_rows, dtype=jnp.int32)
        scores = jnp.where(ids < num_blocks, scores, -jnp.inf)
        chunk_scores, rows = _top_k_by_groups(scores, k)
        # The earlier chunks stand first: top_k prefers the lower position, which is
        # then the lower id.
        merged_scores = jnp.concatenate([best[0], chunk_scores], axis=1)
        merged_ids = jnp.concatenate([best[1], first_id + rows], axis=1)
        top_scores, positions = jax.lax.top_k(merged_scores, k)
        top_ids = jnp.take_along_axis(merged_ids, positions, axis=1)
        return (top_scores, top_ids), None

    nothing = (
        jnp.full((batch_size, k), -jnp.inf, jnp.float32),
        jnp.full((batch_size, k), -1, jnp.int32),
    )
    first_ids = chunk_rows * jnp.arange(chunks.shape[0], dtype=jnp.int32)
    (scores, ids), _ = jax.lax.scan(merge_chunk, nothing, (first_ids, chunks))
    return Neighbours(ids=jnp.where(scores > -jnp.inf, ids, -1), scores=scores)


def _top_k_by_groups(
    scores: Float[Array, "batch row"], k: int
) -> tuple[Float[Array, "batch best"], Int[Array, "batch best"]]:
    """Returns scores and positions of the min(k, rows) best, ties by position.

    The k best elements lie in the k groups with the best maxima: an element outside
    of them is preceded by k maxima.
    """
    batch_size, num_rows = scores.shape
    num_groups = num_rows // GROUP_ROWS
    if k >= num_groups:
        return jax.lax.top_k(scores, min(k, num_rows))
    grouped = scores.reshape(batch_size, num_groups, GROUP_ROWS)
    _, groups = jax.lax.top_k(grouped.max(axis=-1), k)
    # In the order of their positions, so that ties still fall to the lowest.
    groups = jnp.sort(groups, axis=1)
    kept = jnp.take_along_axis(grouped, groups[:, :, None], axis=1)
    positions = groups[:, :, None] * GROUP_ROWS + jnp.arange(GROUP_ROWS)
    best, chosen = jax.lax.top_k(kept.reshape(batch_size, -1), k)
    positions = positions.reshape(batch_size, -1)
    return best, jnp.take_along_axis(positions, chosen, axis=1)


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """How ScaNN searches; the defaults follow the tuning guide in its documentation.

    Attributes:
      brute_force_below: with fewer blocks every block is scored, exactly: a tree only
        pays above.
      searched_share: share of the tree's leaves that is searched.
      reordered: quantized candidates that are scored again exactly, at least.
    """

    brute_force_below: int = 20_000
    searched_share: float = 0.2
    reordered: int = 200


class ScannSearcher:
    """Search on the threads of the host: exhaustive when small, else a tree."""

    def __init__(
        self,
        embeddings: Float[np.ndarray, "block projection"],
        step: int = 0,
        config: ScannConfig = ScannConfig(),
    ):
        """Trains the tree and the quantizer where there are enough blocks.

        Raises:
          BadInputError: the embeddings are not a non-empty matrix.
        """
        _check_embeddings(embeddings)
        self.step = step
        self.config = config
        self.num_blocks, self._dimension = embeddings.shape
        self._scann = _train_scann(embeddings, config)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes what was trained to a new directory, which appears when complete.

        Raises:
          BadInputError: the directory exists.
        """
        directory = pathlib.Path(directory)
        if directory.exists():
            raise BadInputError(
                f"expected to make {directory}, but it exists; choose another place."
            )
        about = {
            "step": self.step,
            "num_blocks": self.num_blocks,
            "dimension": self._dimension,
            "config": dataclasses.asdict(self.config),
        }
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = pathlib.Path(scratch) / "searcher"
            unfinished.mkdir()
            self._scann.serialize(str(unfinished), relative_path=True)
            (unfinished / _ABOUT).write_text(json.dumps(about))
            os.replace(unfinished, directory)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "ScannSearcher":
        """Loads what `save` wrote, without training anew.

        Raises:
          BadInputError: the directory does not hold a whole searcher.
        """
        directory = pathlib.Path(directory)
        try:
            about = json.loads((directory / _ABOUT).read_text())
            trained = _import_scann_pybind().load_searcher(str(directory))
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInputError(
                f"expected a saved ScaNN searcher in {directory}, got {error!r}; "
                "build it again from the embeddings."
            ) from error
        searcher = cls.__new__(cls)
        searcher.step = about["step"]
        searcher.num_blocks = about["num_blocks"]
        searcher.config = ScannConfig(**about["config"])
        searcher._dimension = about["dimension"]
        searcher._scann = trained
        return searcher

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """See `Searcher.search`."""
        _check_query(query_embeddings.shape, self._dimension, k)
        ids, scores = self._scann.search_batched_parallel(
            np.ascontiguousarray(query_embeddings, np.float32),
            final_num_neighbors=k,
            pre_reorder_num_neighbors=max(k, self.config.reordered),
        )
        # ScaNN fills what it did not find with row 0 and a score of nan.
        found = ~np.isnan(scores)
        return Neighbours(
            ids=np.where(found, ids.astype(np.int32), np.int32(-1)),
            scores=np.where(found, scores, np.float32(-np.inf)),
        )


def _train_scann(
    embeddings: Float[np.ndarray, "block projection"], config: ScannConfig
) -> Any:
    num_blocks = len(embeddings)
    builder = _import_scann_pybind().builder(
        np.ascontiguousarray(embeddings, np.float32), 1, "dot_product"
    )
    if num_blocks < config.brute_force_below:
        return builder.score_brute_force().build()
    num_leaves = math.isqrt(num_blocks)
    num_searched = max(1, round(num_leaves * config.searched_share))
    return (
        builder.tree(num_leaves, num_searched, training_sample_size=250_000)
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(config.reordered)
        .build()
    )


def _import_scann_pybind() -> ModuleType:
    """Imports ScaNN without TensorFlow, which it imports where it finds it.

    That import takes seconds and serves ScaNN's TensorFlow ops, which nobody uses
    here. An entry of None in `sys.modules` makes it fail, which ScaNN provides for.
    """
    hidden = "tensorflow" not in sys.modules
    if hidden:
        sys.modules["tensorflow"] = None  # pyright: ignore[reportArgumentType]
    try:
        from scann.scann_ops.py import scann_ops_pybind
    finally:
        if hidden:
            del sys.modules["tensorflow"]
    return scann_ops_pybind


def _check_embeddings(embeddings: Any) -> None:
    shape = np.shape(embeddings)
    if len(shape) != 2 or 0 in shape:
        raise BadInputError(
            "expected embeddings of shape [blocks, projection] with at least one "
            f"block, got {list(shape)}; build the index again."
        )


def _check_query(shape: tuple[int, ...], dimension: int, k: int) -> None:
    if len(shape) != 2 or shape[1] != dimension:
        raise BadInputError(
            f"expected query embeddings of shape [batch, {dimension}] as the index "
            f"has, got {list(shape)}; search with the retriever that built the index."
        )
    if k < 1:
        raise BadInputError(f"expected k of at least 1 neighbour, got {k}; raise it.")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
