"""Provides maximum inner product search over block embeddings, behind one interface.

`device` runs on the accelerators, by default exactly; `scann` runs on the threads of
the host, and is approximate above `ScannConfig.brute_force_below` blocks. Both return
`Neighbours`, so downstream code is independent of the searcher.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from realm_jax.errors import BadInputError
from realm_jax.extras import require_extra
from realm_jax.index import device_search
from realm_jax.index.device_search import (
    EmbeddingTable,
    Precision,
    place_embeddings,
    single_device_mesh,
)
from realm_jax.types import Neighbours

SEARCHERS = ("device", "scann")
SCANN_PURPOSE = "the searcher 'scann'"
"""For `require_extra`."""

_ABOUT = "searcher.json"
_SAMPLE = "sample.npy"
_SAMPLED_BLOCKS = 64


class Searcher(Protocol):
    """Finds the blocks with the largest inner products with a query.

    Attributes:
      step: training step of the retriever that embedded the blocks.
      num_blocks: number of blocks; ids are 0 to num_blocks - 1.
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

    def sample(self) -> Float[np.ndarray, "sample projection"]:
        """Returns the embeddings of `sampled_blocks(num_blocks)`."""
        ...


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Configuration of search on the devices.

    Attributes:
      precision: "float32" (exact), "bfloat16", or "int8" with bfloat16 rescoring.
      approximate: whether chunks are ranked by `approx_max_k`, for TPUs.
    """

    precision: str = "float32"
    approximate: bool = False

    def __post_init__(self):
        known = [precision.value for precision in Precision]
        if self.precision not in known:
            raise BadInputError(
                f"expected a precision out of {', '.join(known)}, got "
                f"{self.precision!r}; set DeviceConfig.precision to one of them."
            )


def sampled_blocks(num_blocks: int) -> Int[np.ndarray, " sample"]:
    """Returns ids of a few blocks, spread over a corpus of `num_blocks`."""
    spread = np.linspace(0, num_blocks - 1, min(_SAMPLED_BLOCKS, num_blocks))
    return np.unique(spread.astype(np.int64))


def make_searcher(
    name: str,
    embeddings: Float[Any, "block projection"],
    step: int = 0,
    *,
    mesh: Mesh | None = None,
    device: DeviceConfig = DeviceConfig(),
) -> Searcher:
    """Returns the searcher called `name` over these embeddings.

    Args:
      name: `device` or `scann`.
      embeddings: row i embeds block i; any object with a shape and slicing.
      step: training step of the retriever that embedded them.
      mesh: mesh of `device` over which embeddings are sharded; None is one device.
      device: configuration of `device`.

    Raises:
      BadInputError: the name is unknown, or the embeddings are not a non-empty matrix.
    """
    if name == "device":
        return DeviceSearcher(embeddings, step, mesh=mesh, config=device)
    if name == "scann":
        return ScannSearcher(np.asarray(embeddings[:], np.float32), step)
    raise BadInputError(
        f"unknown searcher {name!r}; expected one of: {', '.join(SEARCHERS)}. "
        "Set SEARCHER to one of them."
    )


class DeviceSearcher:
    """Searches on the accelerators, over rows that are sharded over a mesh.

    In float32 it is exact, and ties are ordered by block id, so that the result is
    deterministic on every backend.

    Attributes:
      table: the embeddings, for steps that include the search.
      mesh: the devices.
      config: precision and ranking.
    """

    def __init__(
        self,
        embeddings: Float[Any, "block projection"],
        step: int = 0,
        *,
        mesh: Mesh | None = None,
        config: DeviceConfig = DeviceConfig(),
    ):
        """Places the embeddings on the devices.

        Args:
          embeddings: row i embeds block i.
          step: training step of the retriever that embedded them.
          mesh: the devices; None is one device.
          config: precision and ranking.

        Raises:
          BadInputError: the embeddings are not a non-empty matrix.
        """
        _check_embeddings(embeddings)
        mesh = mesh or single_device_mesh()
        num_blocks, dimension = embeddings.shape
        table = place_embeddings(
            lambda start, stop: np.asarray(embeddings[start:stop]),
            num_blocks,
            dimension,
            mesh,
            Precision(config.precision),
        )
        self._search_in(table, num_blocks, step, mesh, config)

    @classmethod
    def over(
        cls,
        table: EmbeddingTable,
        num_blocks: int,
        step: int,
        mesh: Mesh,
        config: DeviceConfig,
    ) -> "DeviceSearcher":
        """Returns a searcher over embeddings that are already on the devices."""
        searcher = cls.__new__(cls)
        searcher._search_in(table, num_blocks, step, mesh, config)
        return searcher

    def _search_in(
        self,
        table: EmbeddingTable,
        num_blocks: int,
        step: int,
        mesh: Mesh,
        config: DeviceConfig,
    ) -> None:
        self.table = table
        self.num_blocks = num_blocks
        self.step = step
        self.mesh = mesh
        self.config = config
        self._dimension = table.rows.shape[1]

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """See `Searcher.search`."""
        _check_query(query_embeddings.shape, self._dimension, k)
        if not isinstance(query_embeddings, jax.Array):
            # All processes have the same values. A NumPy array can be replicated over
            # their devices; a JAX array would be local to one process.
            query_embeddings = np.asarray(query_embeddings)
        return device_search.search(
            self.table,
            query_embeddings,  # pyright: ignore[reportArgumentType]
            k,
            mesh=self.mesh,
            approximate=self.config.approximate,
        )

    def sample(self) -> Float[np.ndarray, "sample projection"]:
        """See `Searcher.sample`."""
        ids = sampled_blocks(self.num_blocks).astype(np.int32)
        return np.asarray(_gather_rows(self.table.rows, ids, self.mesh))


_gather_rows = jax.jit(device_search.gather_rows, static_argnames="mesh")


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Configuration of ScaNN, with the defaults of its documentation's tuning guide.

    An exception is the share of the leaves: questions are distributed differently from
    the blocks that the tree is trained on, and a share of 0.2 gives too low a recall
    for them (docs/benchmarks.md).

    Attributes:
      brute_force_below: number of blocks below which every block is scored exactly,
        because a tree is not faster.
      searched_share: share of the tree's leaves that are searched.
      reordered: minimum number of quantized candidates that are rescored exactly.
    """

    brute_force_below: int = 20_000
    searched_share: float = 0.3
    reordered: int = 200


class ScannSearcher:
    """Searches on the threads of the host, exhaustively or with a tree."""

    def __init__(
        self,
        embeddings: Float[np.ndarray, "block projection"],
        step: int = 0,
        config: ScannConfig = ScannConfig(),
    ):
        """Trains the tree and the quantizer if there are enough blocks for them.

        Raises:
          BadInputError: the embeddings are not a non-empty matrix.
        """
        _check_embeddings(embeddings)
        self.step = step
        self.config = config
        self.num_blocks, self._dimension = embeddings.shape
        # Copied, because ScaNN does not return embeddings.
        self._sample = np.array(embeddings[sampled_blocks(self.num_blocks)])
        self._scann = _train_scann(embeddings, config)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the trained searcher atomically to a new directory.

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
            np.save(unfinished / _SAMPLE, self._sample)
            (unfinished / _ABOUT).write_text(json.dumps(about))
            os.replace(unfinished, directory)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "ScannSearcher":
        """Loads a searcher written by `save`, without training.

        Raises:
          BadInputError: the directory does not contain a complete searcher.
        """
        directory = pathlib.Path(directory)
        try:
            about = json.loads((directory / _ABOUT).read_text())
            sample = np.load(directory / _SAMPLE)
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
        searcher._sample = sample
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
        # ScaNN fills missing results with row 0 and a score of NaN.
        found = ~np.isnan(scores)
        return Neighbours(
            ids=np.where(found, ids.astype(np.int32), np.int32(-1)),
            scores=np.where(found, scores, np.float32(-np.inf)),
        )

    def sample(self) -> Float[np.ndarray, "sample projection"]:
        """See `Searcher.sample`."""
        return self._sample


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
    """Imports ScaNN without TensorFlow, which it would import if available.

    That import takes seconds, and is only needed for ScaNN's TensorFlow ops, which are
    not used here. An entry of None in `sys.modules` makes it fail, which ScaNN handles.
    """
    require_extra("scann", SCANN_PURPOSE)
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
