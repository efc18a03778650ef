"""Provides maximum inner product search over block embeddings, behind one interface.

`device` runs on the accelerators, by default exactly; `scann` runs on the threads of
the host, and is approximate from `ScannConfig.brute_force_below` blocks on. Both return
`Neighbours`, so downstream code is independent of the searcher.
"""

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from realm_jax.errors import BadInputError
from realm_jax.index import device_search
from realm_jax.index.device_search import (
    EmbeddingTable,
    Precision,
    place_embeddings,
    single_device_mesh,
)
from realm_jax.index.scann_searcher import SCANN_PURPOSE as SCANN_PURPOSE
from realm_jax.index.scann_searcher import ScannConfig as ScannConfig
from realm_jax.index.scann_searcher import ScannSearcher as ScannSearcher
from realm_jax.index.search_inputs import check_embeddings, check_query, sampled_blocks
from realm_jax.ranges import require_ranges
from realm_jax.types import Neighbours

SEARCHERS = ("device", "scann")


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

        Where fewer than k are found, ids are -1 and scores -inf. Queries of another
        width than the blocks, and k < 1, are a `BadInputError`.
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
        require_ranges(self)
        known = [precision.value for precision in Precision]
        if self.precision not in known:
            raise BadInputError(
                f"expected a precision out of {', '.join(known)}, got "
                f"{self.precision!r}; set DeviceConfig.precision to one of them."
            )


def make_searcher(
    name: str,
    embeddings: Float[Any, "block projection"],
    step: int = 0,
    *,
    mesh: Mesh | None = None,
    device: DeviceConfig = DeviceConfig(),
) -> Searcher:
    """Returns the searcher called `name`, `device` or `scann`, over these embeddings.

    Row i embeds block i, by the retriever of step `step`; any object with a shape and
    slicing will do. `device` shards them over the mesh; None is one device.
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
    """Searches on the accelerators, over a `table` of rows that is sharded over a mesh.

    In float32 it is exact, and ties are ordered by block id, so that the result is
    deterministic on every backend. Without a mesh it is on one device.
    """

    def __init__(
        self,
        embeddings: Float[Any, "block projection"],
        step: int = 0,
        *,
        mesh: Mesh | None = None,
        config: DeviceConfig = DeviceConfig(),
    ):
        check_embeddings(embeddings)
        self.step, self.mesh, self.config = step, mesh or single_device_mesh(), config
        self.num_blocks, dimension = embeddings.shape
        self.table = place_embeddings(
            lambda start, stop: np.asarray(embeddings[start:stop]),
            self.num_blocks,
            dimension,
            self.mesh,
            Precision(config.precision),
        )

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
        searcher.table, searcher.num_blocks, searcher.step = table, num_blocks, step
        searcher.mesh, searcher.config = mesh, config
        return searcher

    def search(
        self, query_embeddings: Float[Any, "batch projection"], k: int
    ) -> Neighbours:
        """See `Searcher.search`."""
        check_query(query_embeddings.shape, self.table.rows.shape[1], k)
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
