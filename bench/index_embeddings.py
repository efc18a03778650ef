"""Provides the embeddings on which searchers are measured: files, or invented ones.

The process of every searcher imports this module, so it does not import JAX.
"""

import dataclasses
import pathlib

import numpy as np
from jaxtyping import Float

DIMENSION = 128
# Number of topics of the invented corpus, and of rows generated at once.
_TOPICS = 2000
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class EmbeddingFiles:
    """Embeddings on disk, which many processes can read without a copy each.

    Attributes:
      blocks: .npy, float32 [block, projection].
      queries: .npy, float32 [query, projection]; no row of `blocks`.
      tuning: .npy like `queries`, other ones, on which ScaNN chooses its search; "" for
        a ScaNN that is not tuned.
    """

    blocks: str
    queries: str
    source: str
    tuning: str = ""


def invent(folder: pathlib.Path, num_blocks: int, num_queries: int) -> EmbeddingFiles:
    """Invents embeddings that are clustered like those of text.

    Blocks lie near topics of very unequal size, in fewer dimensions than there are
    (variance falls with the square root of the rank), rotated at random, of equal
    length as a tower's LayerNorm makes them. Queries are drawn like blocks, and as many
    again for tuning.
    """
    generator = np.random.default_rng(0)
    spectrum = np.arange(1, DIMENSION + 1) ** -0.5
    turn, _ = np.linalg.qr(generator.normal(size=(DIMENSION, DIMENSION)))
    axes = (spectrum[:, None] * turn).astype(np.float32)
    topics = generator.standard_normal((_TOPICS, DIMENSION), np.float32)
    sizes = np.arange(1, _TOPICS + 1) ** -0.7

    def draw(count: int) -> Float[np.ndarray, "block projection"]:
        topic = generator.choice(_TOPICS, count, p=sizes / sizes.sum())
        noise = generator.standard_normal((count, DIMENSION), np.float32)
        rows = (topics[topic] + noise) @ axes
        return np.sqrt(DIMENSION) * rows / np.linalg.norm(rows, axis=1, keepdims=True)

    queries, blocks = folder / f"queries_{num_blocks}.npy", folder / f"{num_blocks}.npy"
    np.save(queries, draw(num_queries))
    rows = np.lib.format.open_memmap(
        blocks, "w+", dtype=np.float32, shape=(num_blocks, DIMENSION)
    )
    for start in range(0, num_blocks, _CHUNK):
        rows[start : start + _CHUNK] = draw(min(_CHUNK, num_blocks - start))
    rows.flush()
    tuning = folder / f"tuning_{num_blocks}.npy"
    np.save(tuning, draw(num_queries))
    return EmbeddingFiles(str(blocks), str(queries), "invented", str(tuning))
