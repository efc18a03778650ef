"""Embeds the blocks of a corpus with the document tower.

Each process embeds on its own devices, with batches sharded over all of them. Documents
are independent, so hosts need not wait for each other.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from realm_jax import axes, ranges
from realm_jax.data.blocks import BlockStore
from realm_jax.models.retriever import Retriever, RetrieverConfig

EmbedFn = Callable[[Any, Any, Any], Float[Array, "batch projection"]]
"""Maps (parameters, document ids, segment ids) to embeddings."""

# Batches in flight: while the device computes one, the host prepares the next.
_IN_FLIGHT = 2
# Static lengths grow by about this factor, which limits both padding and the number of
# shapes that are compiled.
_BUCKET_GROWTH = 1.3
_BUCKET_MULTIPLE = 8
_SHORTEST_BUCKET = 24


@dataclasses.dataclass(frozen=True)
class EmbedConfig:
    """Configuration of embedding.

    Attributes:
      document_length: wordpieces of the longest input; longer documents are truncated.
      batch_size: documents per call, over all devices of a process. The default suits a
        CPU, where larger batches overflow the caches (a quarter of the speed at 256).
      shard_blocks: blocks per shard, the unit that is written and resumed.
    """

    document_length: int = 288
    batch_size: int = 32
    shard_blocks: int = 2048

    def at_length(self, document_length: int) -> "EmbedConfig":
        """Returns this configuration with another document length."""
        return dataclasses.replace(self, document_length=document_length)

    def __post_init__(self):
        at_least_1 = ranges.whole(1)
        ranges.require_ranges(
            self,
            document_length=at_least_1,
            batch_size=at_least_1,
            shard_blocks=at_least_1,
        )


@functools.cache
def document_embedder(config: RetrieverConfig) -> EmbedFn:
    """Returns the document tower, jitted, without dropout.

    It is cached, so that a refresh does not recompile it.
    """
    retriever = Retriever(config.rolled())

    @jax.jit
    def embed(params, ids, segment_ids):
        return retriever.apply(
            {"params": params}, ids, segment_ids, method=Retriever.embed_documents
        )

    return embed


@functools.cache
def query_embedder(
    config: RetrieverConfig, mesh: Mesh | None = None
) -> Callable[[Any, Any], jax.Array]:
    """Returns the query tower, jitted, without dropout.

    Embeddings are split over the mesh; without one JAX chooses.
    """
    retriever = Retriever(config.rolled())
    by_row = mesh and NamedSharding(mesh, axes.partition_spec("batch"))

    @functools.partial(jax.jit, out_shardings=by_row)
    def embed(params, ids):
        return retriever.apply({"params": params}, ids, method=Retriever.embed_queries)

    return embed


@functools.cache
def local_mesh() -> Mesh:
    """Returns a mesh of this process's devices that shards batches only."""
    devices = jax.local_devices()
    return jax.make_mesh(
        (len(devices), 1, 1),
        axes.MESH_AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=devices,
    )


def place_locally(params: PyTree) -> PyTree:
    """Copies parameters from the host to every device of this process."""
    return jax.device_put(params, NamedSharding(local_mesh(), PartitionSpec()))


def shard_ranges(num_blocks: int, shard_blocks: int) -> list[range]:
    """Returns the row ranges of the shards, in order; the last may be shorter."""
    starts = range(0, num_blocks, shard_blocks)
    return [range(start, min(start + shard_blocks, num_blocks)) for start in starts]


def embed_shards(
    embed: EmbedFn,
    params: Any,
    store: BlockStore,
    shards: Iterable[range],
    config: EmbedConfig,
) -> Iterator[tuple[int, Float[np.ndarray, "block projection"]]]:
    """Yields the first row and the embeddings of each shard, rows in order.

    The bits of a shard depend on the parameters and the shard alone. With other shard
    boundaries a row may share its batch with longer ones; its embedding then agrees to
    about 1e-5.
    """
    for shard in shards:
        yield shard.start, embed_blocks(embed, params, store, np.array(shard), config)


def embed_blocks(
    embed: EmbedFn,
    params: Any,
    store: BlockStore,
    block_ids: Int[np.ndarray, " block"],
    config: EmbedConfig,
) -> Float[np.ndarray, "block projection"]:
    """Returns the float32 embeddings of blocks, in the given order.

    There is at least one; -1 is the null document. `embed` is from `document_embedder`,
    its parameters from `place_locally`.
    """
    rows: list[np.ndarray] = []
    embeddings: list[np.ndarray] = []
    in_flight: deque[tuple[np.ndarray, jax.Array]] = deque()

    def collect() -> None:
        batch_rows, batch_embeddings = in_flight.popleft()
        rows.append(batch_rows)
        embeddings.append(np.asarray(batch_embeddings)[: len(batch_rows)])

    mesh = local_mesh()
    by_row = NamedSharding(mesh, axes.partition_spec("batch"))
    with jax.set_mesh(mesh):
        for batch_rows, *inputs in _batches(store, block_ids, config, mesh.size):
            in_flight.append(
                (batch_rows, embed(params, *jax.device_put(inputs, by_row)))
            )
            if len(in_flight) > _IN_FLIGHT:
                collect()
        while in_flight:
            collect()
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(embeddings)[order]


def _batches(
    store: BlockStore, block_ids: np.ndarray, config: EmbedConfig, num_devices: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields rows of `block_ids` of similar length, with their ids and segment ids.

    Every batch has `batch_size` rows, rounded up to a multiple of the devices; the last
    one is padded with null documents. Lengths are those of buckets, so that few shapes
    are compiled.
    """
    batch_size = -(-config.batch_size // num_devices) * num_devices
    lengths = 3 + store.title_lengths(block_ids) + store.body_lengths(block_ids)
    lengths = np.minimum(lengths, config.document_length)
    buckets = np.array(length_buckets(config.document_length))
    # Longest first, so that a lack of memory shows at once.
    by_length = np.argsort(-lengths, kind="stable")
    for start in range(0, len(by_length), batch_size):
        rows = by_length[start : start + batch_size]
        length = int(buckets[np.searchsorted(buckets, lengths[rows[0]])])
        filled = np.full(batch_size, -1, np.int64)
        filled[: len(rows)] = block_ids[rows]
        yield rows, *store.document_ids(filled, length)


def length_buckets(document_length: int) -> list[int]:
    """Returns the static lengths that documents are padded to, the longest last."""
    buckets = []
    length = _SHORTEST_BUCKET
    while length < document_length:
        buckets.append(length)
        grown = int(length * _BUCKET_GROWTH)
        length = grown + -grown % _BUCKET_MULTIPLE
    return [*buckets, document_length]
