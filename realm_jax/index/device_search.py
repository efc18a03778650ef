"""Implements maximum inner product search on the training devices, in a jitted step.

Rows are sharded over all devices of the mesh. Each device streams over its own rows and
keeps its k best, which are combined by a small all-gather. The full score matrix is
never materialised: a device holds the scores of one chunk of rows.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Int8

from realm_jax import axes
from realm_jax.types import Array, Neighbours

# Rows scored at once, so that the scores of a batch fit in the cache of a CPU core.
CHUNK_ROWS = 8192
# Scores of a chunk on an accelerator, where a chunk costs the start of its kernels: 29
# microseconds on an H100, whatever it holds.
ACCELERATOR_SCORES = 1 << 24
# Rows that share one maximum. Ranking maxima first and ranking only the rows of the
# best groups is exact, and nearly twice as fast as ranking every row.
GROUP_ROWS = 32
# With int8, this multiple of k is rescored: enough for a recall of 0.99 in
# `test_device_search.py`.
_RESCORED = 4
# Recall of approximate search, for the k best of a chunk.
_RECALL_TARGET = 0.99

ReadRows = Callable[[int, int], np.ndarray]
"""Returns rows [start, stop) of an array that may exceed this host's memory."""


class Precision(enum.Enum):
    """Precision of embeddings on the devices.

    INT8 streams over a quarter of the bytes of FLOAT32, and rescores its results with
    bfloat16 rows, which are kept in addition.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


@flax.struct.dataclass
class EmbeddingTable:
    """Embeddings on the devices: row i is block i, padded from `num_blocks` on.

    `codes` are the rows quantized to 8 bits, with a scale each, only for INT8. The
    number of blocks is an array, so that a larger corpus of the same padded size is
    searched without recompilation.
    """

    rows: Float[Array, "row projection"]
    codes: Int8[Array, "row projection"] | None
    scales: Float[Array, " row"] | None
    num_blocks: Int[Array, ""]


def single_device_mesh() -> Mesh:
    """Returns a mesh of one device, for processes that only search."""
    return jax.make_mesh(
        (1, 1, 1),
        axes.MESH_AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.local_devices()[:1],
    )


def place_rows(
    read: ReadRows,
    num_rows: int,
    row_shape: tuple[int, ...],
    dtype: Any,
    mesh: Mesh,
) -> jax.Array:
    """Shards rows over all devices, padded with zeros; each process reads its own."""
    like = rows_shape(num_rows, row_shape, dtype, mesh)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        rows = slice(None) if index is None else index[0]
        start, stop, _ = rows.indices(like.shape[0])
        placed = np.zeros((stop - start, *row_shape), dtype)
        there = max(0, min(stop, num_rows) - start)
        if there:
            placed[:there] = read(start, start + there)
        return placed

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def rows_shape(
    num_rows: int, row_shape: tuple[int, ...], dtype: Any, mesh: Mesh
) -> Any:
    """Returns what `place_rows` returns, as a `jax.ShapeDtypeStruct`."""
    padded = rows_per_device(num_rows, mesh) * mesh.size
    return jax.ShapeDtypeStruct(
        (padded, *row_shape), dtype, sharding=row_sharding(mesh)
    )


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an index's rows, over every axis of the mesh."""
    return NamedSharding(mesh, axes.partition_spec("block"))


def rows_per_device(num_rows: int, mesh: Mesh) -> int:
    """Returns the number of rows per device, a multiple of the chunk size."""
    least = -(-num_rows // mesh.size)
    chunk_rows = min(CHUNK_ROWS, _round_up(least, GROUP_ROWS))
    return _round_up(least, chunk_rows)


def place_embeddings(
    read: ReadRows,
    num_blocks: int,
    dimension: int,
    mesh: Mesh,
    precision: Precision = Precision.FLOAT32,
) -> EmbeddingTable:
    """Places embeddings on the devices; see `place_rows`."""
    rows = place_rows(read, num_blocks, (dimension,), _exact(precision), mesh)
    codes = scales = None
    if precision is Precision.INT8:
        codes, scales = _quantize_shards(rows)
    count = jax.make_array_from_callback(
        (), NamedSharding(mesh, PartitionSpec()), lambda _: np.int32(num_blocks)
    )
    return EmbeddingTable(rows, codes, scales, count)


def table_shapes(
    num_blocks: int, dimension: int, mesh: Mesh, precision: Precision
) -> EmbeddingTable:
    """Returns what `place_embeddings` returns, as shapes."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    codes = scales = None
    if precision is Precision.INT8:
        codes = rows_shape(num_blocks, (dimension,), jnp.int8, mesh)
        scales = rows_shape(num_blocks, (), jnp.float32, mesh)
    return EmbeddingTable(
        rows_shape(num_blocks, (dimension,), _exact(precision), mesh),
        codes,
        scales,
        count,
    )


def _exact(precision: Precision) -> Any:
    """Returns the dtype of the rows that give exact scores."""
    return jnp.float32 if precision is Precision.FLOAT32 else jnp.bfloat16


def empty_table(
    num_blocks: int, dimension: int, mesh: Mesh, precision: Precision
) -> EmbeddingTable:
    """Returns a table of zeros, to be replaced by restored or computed embeddings."""

    def zeros(start: int, stop: int) -> np.ndarray:
        return np.zeros((stop - start, dimension), np.float32)

    return place_embeddings(zeros, num_blocks, dimension, mesh, precision)


def _quantize_shards(rows: jax.Array) -> list[jax.Array]:
    """Quantizes the rows of each local device separately.

    A thread must not run a program over the devices of all processes, because all
    processes would have to run it in the same order relative to other programs.
    """
    parts = [_quantize(shard.data) for shard in rows.addressable_shards]
    return [
        jax.make_array_from_single_device_arrays(
            (rows.shape[0], *arrays[0].shape[1:]), rows.sharding, list(arrays)
        )
        for arrays in zip(*parts, strict=True)
    ]


def quantize(
    rows: Float[Array, "*row projection"],
) -> tuple[Int8[Array, "*row projection"], Float[Array, "*row"]]:
    """Quantizes rows to 8 bits with one float32 scale each: rows ~ codes * scale."""
    rows = rows.astype(jnp.float32)
    scales = jnp.abs(rows).max(axis=-1) / 127.0
    codes = jnp.round(rows / jnp.where(scales > 0, scales, 1.0)[..., None])
    return codes.astype(jnp.int8), scales


_quantize = jax.jit(quantize)


def gather_rows(table: Any, block_ids: Int[Array, "*dims"], mesh: Mesh) -> Any:
    """Gathers the rows of blocks, [*dims, ...], from all devices; zeros for id -1.

    Row i of the table, arrays sharded over the mesh, is block i. The result is int32,
    or float32 where the table has floats.
    """

    def on_each_device(table: Any, block_ids: Array) -> Any:
        def rows(array: Array) -> Array:
            num_rows = array.shape[0]
            places = block_ids - jax.lax.axis_index(axes.MESH_AXES) * num_rows
            mine = (places >= 0) & (places < num_rows) & (block_ids >= 0)
            found = array[jnp.clip(places, 0, num_rows - 1)]
            wide = jnp.issubdtype(found.dtype, jnp.integer)
            found = found.astype(jnp.int32 if wide else jnp.float32)
            mine = mine.reshape(*mine.shape, *([1] * (found.ndim - mine.ndim)))
            # Exactly one device has the row; the others contribute zeros.
            return jax.lax.psum(jnp.where(mine, found, 0), axes.MESH_AXES)

        return jax.tree.map(rows, table)

    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(axes.partition_spec("block"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(table, block_ids)


@functools.partial(jax.jit, static_argnames=("k", "mesh", "approximate"))
def search(
    table: EmbeddingTable,
    queries: Float[Array, "batch projection"],
    k: int,
    *,
    mesh: Mesh,
    approximate: bool = False,
) -> Neighbours:
    """Returns the k best blocks of each query; ties are ordered by id.

    May be called inside a jitted function. The queries may have any sharding; the
    result is the same on every device, with ids -1 and scores -inf where there are
    fewer than k blocks. `approximate` ranks a chunk by `approx_max_k`, which TPUs
    accelerate, with a recall of 0.99; on other devices it is exact, but slower.
    """

    def on_each_device(table: EmbeddingTable, queries: Array) -> tuple[Array, Array]:
        first_id = jax.lax.axis_index(axes.MESH_AXES) * table.rows.shape[0]
        score_rows = _rows_at_once(mesh, len(queries), table.rows.shape[0])
        scores, ids = _best_rows(table, queries, first_id, k, score_rows, approximate)
        # Gathered in device order, hence in id order: top_k prefers lower positions.
        scores, ids = (
            jax.lax.all_gather(part, axes.MESH_AXES, axis=1, tiled=True)
            for part in (scores, ids)
        )
        return _take_best(scores, ids, k)

    by_row, everywhere = axes.partition_spec("block"), PartitionSpec()
    specs = jax.tree.map(lambda _: by_row, table).replace(num_blocks=everywhere)
    scores, ids = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(specs, everywhere),
        out_specs=(everywhere, everywhere),
        # The check cannot infer that the top k are the same on all devices.
        check_vma=False,
    )(table, queries)
    return Neighbours(ids=jnp.where(scores > -jnp.inf, ids, -1), scores=scores)


def _best_rows(
    table: EmbeddingTable,
    queries: Array,
    first_id: Array,
    k: int,
    chunk_rows: int,
    approximate: bool,
) -> tuple[Array, Array]:
    """Returns scores and ids of the k best rows of this device, ties by id."""
    stream = functools.partial(
        _stream,
        num_blocks=table.num_blocks,
        first_id=first_id,
        batch_size=len(queries),
        chunk_rows=chunk_rows,
        approximate=approximate,
    )
    if table.codes is None or table.scales is None:
        queries = queries.astype(table.rows.dtype)
        return stream(functools.partial(_inner_products, queries), (table.rows,), k)
    query_codes, query_scales = quantize(queries)

    def score_codes(codes: Array, scales: Array) -> Array:
        products = jnp.einsum(
            "bp,rp->br", query_codes, codes, preferred_element_type=jnp.int32
        )
        return products * scales * query_scales[:, None]

    rough, ids = stream(score_codes, (table.codes, table.scales), _RESCORED * k)
    # Sorted by id, so that ties are again ordered by id.
    ids = jnp.sort(jnp.where(rough > -jnp.inf, ids, jnp.iinfo(jnp.int32).max), axis=1)
    places = jnp.clip(ids - first_id, 0, table.rows.shape[0] - 1)
    exact = jnp.einsum(
        "bp,brp->br",
        queries.astype(table.rows.dtype),
        table.rows[places],
        preferred_element_type=jnp.float32,
    )
    exact = jnp.where(ids < jnp.iinfo(jnp.int32).max, exact, -jnp.inf)
    return _take_best(exact, ids, k)


def _inner_products(queries: Array, rows: Array) -> Array:
    return jnp.einsum(
        "bp,rp->br",
        queries,
        rows,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _stream(
    score: Callable[..., Array],
    arrays: tuple[Array, ...],
    k: int,
    *,
    num_blocks: Array,
    first_id: Array,
    batch_size: int,
    chunk_rows: int,
    approximate: bool,
) -> tuple[Array, Array]:
    """Scores this device's rows chunk by chunk and keeps the k best."""
    num_rows = arrays[0].shape[0]

    def merge_chunk(best, begin):
        # The last chunk may begin earlier, and leaves out what was scored before.
        start = jnp.minimum(begin, num_rows - chunk_rows)
        chunk = [jax.lax.dynamic_slice_in_dim(a, start, chunk_rows) for a in arrays]
        rows = start + jnp.arange(chunk_rows, dtype=jnp.int32)
        new = (rows >= begin) & (first_id + rows < num_blocks)
        scores = jnp.where(new, score(*chunk), -jnp.inf)
        if approximate:
            chunk_scores, places = jax.lax.approx_max_k(
                scores, min(k, chunk_rows), recall_target=_RECALL_TARGET
            )
        else:
            chunk_scores, places = top_k_by_groups(scores, k)
        # Earlier chunks come first: top_k prefers lower positions, which are then lower
        # ids.
        merged_scores = jnp.concatenate([best[0], chunk_scores], axis=1)
        merged_ids = jnp.concatenate([best[1], first_id + start + places], axis=1)
        return _take_best(merged_scores, merged_ids, k), None

    nothing = (
        jnp.full((batch_size, k), -jnp.inf, jnp.float32),
        jnp.full((batch_size, k), -1, jnp.int32),
    )
    begins = jnp.arange(0, num_rows, chunk_rows, dtype=jnp.int32)
    best, _ = jax.lax.scan(merge_chunk, nothing, begins)
    return best


def _rows_at_once(mesh: Mesh, batch_size: int, num_rows: int) -> int:
    """Returns the rows of a chunk, a multiple of the rows of a group."""
    # An abstract mesh stands for accelerators that a run is planned for.
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    rows = CHUNK_ROWS
    if not on_cpu:
        rows = max(rows, ACCELERATOR_SCORES // batch_size // rows * rows)
    return min(rows, num_rows)


def _take_best(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    best, positions = jax.lax.top_k(scores, k)
    return best, jnp.take_along_axis(ids, positions, axis=1)


def top_k_by_groups(
    scores: Float[Array, "batch row"], k: int
) -> tuple[Float[Array, "batch best"], Int[Array, "batch best"]]:
    """Returns scores and positions of the min(k, rows) best, ties by position.

    The k best elements are in the k groups with the best maxima, because any element
    outside of them is exceeded by k maxima.
    """
    batch_size, num_rows = scores.shape
    num_groups = num_rows // GROUP_ROWS
    if k >= num_groups:
        return jax.lax.top_k(scores, min(k, num_rows))
    grouped = scores.reshape(batch_size, num_groups, GROUP_ROWS)
    _, groups = jax.lax.top_k(grouped.max(axis=-1), k)
    # Sorted by position, so that ties are still resolved to the lowest.
    groups = jnp.sort(groups, axis=1)
    kept = jnp.take_along_axis(grouped, groups[:, :, None], axis=1)
    positions = groups[:, :, None] * GROUP_ROWS + jnp.arange(GROUP_ROWS)
    best, chosen = jax.lax.top_k(kept.reshape(batch_size, -1), k)
    positions = positions.reshape(batch_size, -1)
    return best, jnp.take_along_axis(positions, chosen, axis=1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
