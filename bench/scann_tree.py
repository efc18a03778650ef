"""Measures which tree of ScaNN finds most neighbours for the leaves that it visits.

    python -m bench.scann_tree --page docs/benchmarks.md

Trees of several shapes over the same invented blocks: how many leaves, on how many
blocks k-means is trained for each, and how small a cluster may be to be kept.
"""

import math
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from bench.command import command_line, make_parser, publish
from bench.index_embeddings import invent
from bench.index_search import exact_neighbours
from bench.machine import machine, today
from bench.tables import table
from realm_jax.index.scann_searcher import _import_scann_pybind, share_found

_SHARES = (0.05, 0.1, 0.15, 0.2)
_RESCORED, _K = 100, 8
# Leaves as a multiple of the square root of the blocks, blocks that k-means is trained
# on for each, and the smallest cluster that is kept (ScaNN's default is 50).
_SHAPES = (
    (2, 60, 50),
    (2, 120, 50),
    (2, 60, 10),
    (2, 120, 10),
    (1, 120, 10),
    (4, 60, 10),
)


def recalls(
    blocks: Float[np.ndarray, "block projection"],
    queries: Float[np.ndarray, "query projection"],
    exact: Int[np.ndarray, "query k"],
    shape: tuple[int, int, int],
) -> Iterator[float]:
    """Yields recall@8 with each of the shares of the leaves."""
    factor, trained_on, smallest = shape
    leaves = factor * math.isqrt(len(blocks))
    builder = _import_scann_pybind().builder(blocks, 1, "dot_product")
    searcher = (
        builder.tree(
            leaves,
            1,
            training_sample_size=min(len(blocks), trained_on * leaves),
            min_partition_size=smallest,
        )
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(_RESCORED)
        .build()
    )
    for share in _SHARES:
        found, _ = searcher.search_batched_parallel(
            queries,
            final_num_neighbors=_K,
            pre_reorder_num_neighbors=_RESCORED,
            leaves_to_search=round(leaves * share),
        )
        yield share_found(found, exact)


def main() -> None:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1024)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = invent(pathlib.Path(folder), flags.blocks, flags.queries)
        blocks, queries = np.load(files.blocks), np.load(files.queries)
    exact = exact_neighbours(blocks, queries)
    rows = [
        [
            *(f"{shape[0] * math.isqrt(len(blocks)):,}", *map(str, shape[1:])),
            *(f"{recall:.3f}" for recall in recalls(blocks, queries, exact, shape)),
        ]
        for shape in _SHAPES
    ]
    heads = ["leaves", "trained on, per leaf", "smallest leaf"]
    heads += [f"{share:.0%}" for share in _SHARES]
    text = (
        f"    {command_line('scann_tree')}\n\n"
        f"{machine()}, {today()}; {len(blocks):,} blocks, {len(queries):,} queries, "
        f"recall@8.\n\n{table(heads, rows)}\n"
    )
    publish("scann_tree", text, None, flags)


if __name__ == "__main__":
    main()
