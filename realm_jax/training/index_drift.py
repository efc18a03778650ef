"""Measures how far a stale index is from a fresh one, on a few queries and blocks.

The sample is the same for the whole run, so that the values form a curve. They are
measured when an index is about to be replaced, which is when it is most stale.
"""

import time
from collections.abc import Mapping

import jax
import numpy as np
import scipy.special
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.index.embed import document_embedder, query_embedder
from realm_jax.index.searchers import Searcher, sampled_blocks
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.types import NULL_BLOCK, Neighbours

NUM_QUERIES = 32
NEIGHBOURS = 8


class Probe:
    """A sample of blocks, and of masked sentences: the first `NUM_QUERIES` of them."""

    def __init__(
        self,
        corpus: BlockStore,
        config: RetrieverConfig,
        query_ids: Int[np.ndarray, "sample query"],
        document_length: int,
    ):
        self._corpus = corpus
        self._embed_queries = query_embedder(config)
        self._embed_documents = document_embedder(config)
        self._query_ids = query_ids[:NUM_QUERIES]
        self._document_length = document_length
        self._block_ids = sampled_blocks(corpus.num_blocks)

    def of_index(self, params: PyTree, searcher: Searcher) -> Mapping[str, float]:
        """Compares an index with the embeddings that current parameters would give.

        Returns `index_drift`: mean distance of a block's embedding from a fresh one, as
        a share of its length; `retrieval_kl`: mean KL divergence, in nats, of p(z|x) by
        the index from p(z|x) by live embeddings, over the blocks it finds;
        `index_search_seconds`: of searching the sample.
        """
        stale = searcher.sample()
        fresh = self._documents(params, self._block_ids)
        distance = np.linalg.norm(stale - fresh, axis=-1)
        length = np.maximum(np.linalg.norm(fresh, axis=-1), 1e-9)
        queries = self._queries(params)
        self._search(searcher, queries)  # Compiles; the next call is measured.
        began = time.perf_counter()
        found = self._search(searcher, queries)
        seconds = time.perf_counter() - began
        documents = self._documents(params, np.asarray(found.ids))
        live = np.einsum("qp,qkp->qk", queries, documents)
        return {
            "index_drift": float((distance / length).mean()),
            "retrieval_kl": mean_kl(found.scores, live, found.ids != NULL_BLOCK),
            "index_search_seconds": seconds,
        }

    def of_refresh(
        self, params: PyTree, old: Searcher, new: Searcher
    ) -> Mapping[str, float]:
        """Compares two indexes on the queries' `NEIGHBOURS` best blocks.

        `same_neighbours` is the share of queries that find the same set by both,
        `kept_neighbours` the share of blocks that both find.
        """
        queries = self._queries(params)
        stale, fresh = (
            np.sort(self._search(searcher, queries).ids, axis=1)
            for searcher in (old, new)
        )
        kept = [np.isin(a, b).mean() for a, b in zip(stale, fresh, strict=True)]
        return {
            "same_neighbours": float((stale == fresh).all(axis=1).mean()),
            "kept_neighbours": float(np.mean(kept)),
        }

    def _search(self, searcher: Searcher, queries) -> Neighbours:
        return jax.device_get(searcher.search(queries, NEIGHBOURS))

    def _documents(
        self, params: PyTree, block_ids: Int[np.ndarray, "*dims"]
    ) -> Float[np.ndarray, "*dims projection"]:
        ids, segments = self._corpus.document_ids(block_ids, self._document_length)
        return self._whole(self._embed_documents(params, ids, segments))

    def _queries(self, params: PyTree) -> Float[np.ndarray, "sample projection"]:
        return self._whole(self._embed_queries(params, self._query_ids))

    def _whole(self, embeddings: jax.Array) -> np.ndarray:
        return multihost.fetch(embeddings).astype(np.float32)


def mean_kl(stale, live, valid) -> float:
    """Returns the mean over rows of KL(softmax(stale) || softmax(live)), in nats."""
    log_p, log_q = (
        scipy.special.log_softmax(np.where(valid, scores, -np.inf), axis=-1)
        for scores in (stale, live)
    )
    # A slot without a block has probability 0 in both, and -inf minus -inf is NaN.
    log_p, log_q = (np.where(valid, values, 0.0) for values in (log_p, log_q))
    terms = np.where(valid, np.exp(log_p), 0.0) * (log_p - log_q)
    return float(terms.sum(axis=-1).mean())
