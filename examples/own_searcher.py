"""Answers with a searcher of one's own, which searches a few clusters of blocks.

    python examples/own_searcher.py runs/quickstart/finetune runs/quickstart/corpus \
        "Who commissioned the Taj Mahal?"

Prints which share of the exact searcher's five best blocks it finds, and the answer
from the blocks that it found.
"""

import math
import sys

import numpy as np

import realm_jax
from realm_jax.index.embedding_cache import index_series
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.searchers import sampled_blocks
from realm_jax.storage import open_store
from realm_jax.types import Neighbours


class ClusteredSearcher:
    """Searches the third of the clusters nearest to a query; see `Searcher`."""

    def __init__(self, embeddings: np.ndarray, step: int):
        """Assigns each block to the best of sqrt(blocks) blocks, drawn at random."""
        self.step, self.num_blocks = step, len(embeddings)
        self._embeddings = embeddings.astype(np.float32)
        drawn = np.random.default_rng(0).permutation(self.num_blocks)
        self._centres = self._embeddings[drawn[: math.isqrt(self.num_blocks)]]
        self._cluster = (self._embeddings @ self._centres.T).argmax(axis=1)

    def search(self, query_embeddings: np.ndarray, k: int) -> Neighbours:
        """Returns the k best of each query; -1 and -inf where there are fewer."""
        queries = np.asarray(query_embeddings, np.float32)
        num_searched = math.ceil(len(self._centres) / 3)
        nearest = np.argsort(-(queries @ self._centres.T))[:, :num_searched]
        searched = (self._cluster[None, :, None] == nearest[:, None, :]).any(axis=-1)
        scores = np.where(searched, queries @ self._embeddings.T, -np.inf)
        scores = np.pad(scores, ((0, 0), (0, k)), constant_values=-np.inf)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(scores, ids, axis=1)
        found = np.where(np.isfinite(best), ids, -1).astype(np.int32)
        return Neighbours(found, best.astype(np.float32))

    def sample(self) -> np.ndarray:
        """Returns the rows that drift is measured on, [sample, projection]."""
        return self._embeddings[sampled_blocks(self.num_blocks)]


def main(model_dir: str, corpus: str, question: str) -> None:
    """Runs the example."""
    model = realm_jax.load(model_dir, corpus)
    series = index_series(open_store(model_dir), model.corpus.fingerprint)
    manifest = series.read_manifest(series.steps()[-1])
    searcher = ClusteredSearcher(series.read_array(manifest, EMBEDDINGS), manifest.step)
    found = searcher.search(model.embed([question]), 5)
    exact = {document.block_id for document in model.search(question, 5)}
    print(f"{len(exact & set(found.ids[0].tolist()))} of 5 blocks found")
    answer = model.with_searcher(searcher).answer(question)
    print(f"{answer.text or '(no answer)'}  p = {answer.probability:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
