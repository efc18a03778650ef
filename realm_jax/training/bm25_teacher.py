"""The teacher of a query tower: the retriever as it was, and BM25, on pieces of text.

BM25 finds the words that an encoder of general text has never seen, and an encoder
finds paraphrases. The query tower learns the sum of their scores from pseudo-queries.
The document tower and its embeddings of the corpus stay as they are. docs/adapt.md says
what that gains.

Pseudo-queries stand for the queries of people where there are none
(`data/pseudo_queries.py`).
"""

import dataclasses
import threading
from typing import Any

import jax
import numpy as np
import scipy.special
from jaxtyping import Float, PyTree

from realm_jax import multihost
from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.examples import Examples
from realm_jax.data.features import query_rows
from realm_jax.data.pseudo_queries import (
    NUM_DRAWS,
    PSEUDO_QUERY_LENGTH,
    pseudo_query,
)
from realm_jax.errors import BadInputError
from realm_jax.index.embed import EmbedConfig, query_embedder
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER, tie_towers
from realm_jax.placement import local_rows, place_batch
from realm_jax.training.stage import Stage
from realm_jax.training.step_timing import Part
from realm_jax.training.warm_start_loss import TaughtQueries

TAUGHT_BLOCKS = 256
"""Blocks of a query over which the tower learns the teacher's distribution."""

MAX_BLOCKS = 500_000
"""Blocks of a corpus, whose words and embeddings are all in memory."""


class BM25Teacher:
    """Makes the inputs of distillation: pseudo-queries, and what they are to find.

    A pseudo-query x is drawn from the block of each pair of a batch. It is to find the
    blocks z that are best by f(x, z) + weight * BM25(x, z), but not its own or a copy
    of it, where f is that of the towers as the run began. Both are divided by their
    standard deviations over all blocks, and the scores of the tower that learns by that
    of f, so that the temperature of the retriever and the length of a query do not
    matter.
    """

    def __init__(
        self,
        stage: Stage[Any],
        pairs: Examples,
        weight: float,
        embed: EmbedConfig,
        stop: threading.Event,
    ):
        """Counts the words of the corpus and opens its index, which may be made first.

        Raises:
          StoppedError: stopped while the corpus was being embedded.
        """
        self._stage = stage
        self._pairs = pairs
        self._weight = weight
        if stage.corpus.num_blocks > MAX_BLOCKS:
            raise BadInputError(
                f"expected at most {MAX_BLOCKS:,} blocks in {stage.corpus.directory} "
                f"with BM25_WEIGHT, got {stage.corpus.num_blocks:,}, whose words would "
                "all be held in memory; give less text, or set BM25_WEIGHT=0"
            )
        _require_alike(stage)
        self._embed_queries = query_embedder(stage.retriever_config, stage.mesh)
        hashes = stage.corpus.content_hashes
        # The number of a block's content, which its copies share.
        self._contents = np.unique(hashes, axis=0, return_inverse=True)[1].reshape(-1)
        others = len(hashes) - int(np.bincount(self._contents).max())
        if not others:
            raise BadInputError(
                f"expected blocks of different texts in {stage.corpus.directory} with "
                "BM25_WEIGHT, got copies of one; give more text, or set BM25_WEIGHT=0"
            )
        self._num_candidates = min(TAUGHT_BLOCKS, others)
        source = stage.index_source("device", embed)
        index = dataclasses.replace(source, keeps_rows=True).open_first(
            self._retriever(), stop, resumes=stage.details is not None
        )
        assert index.rows is not None
        self._rows = np.asarray(index.rows)
        self._bm25 = BM25Index(stage.corpus)

    def at(self, step: int) -> TaughtQueries:
        """Returns the inputs of an update."""
        stage, config = self._stage, self._stage.config
        own = np.asarray(stage.batch(self._pairs, step)["block_ids"])
        drawn = uniform(
            Stream.PSEUDO_QUERIES, config.seed, step, config.batch_size, NUM_DRAWS
        )[local_rows(stage.mesh, config.batch_size)]
        blocks = stage.corpus.texts(own)
        texts = [*map(pseudo_query, blocks, drawn)]
        length = min(config.models.lengths.query, PSEUDO_QUERY_LENGTH)
        ids = query_rows(texts, length, stage.corpus.vocabulary)
        queries = self._embed_queries(self._retriever(), place_batch(stage.mesh, ids))
        stage.stopwatch.wait_for(queries)
        with stage.stopwatch.part(Part.SEARCH):
            dense = multihost.local_rows(queries) @ self._rows.T
            by_words = self._bm25.scores(texts)
            by_words[np.isinf(by_words)] = 0.0
            spread = _spread(dense)
            scores = dense / spread + self._weight * by_words / _spread(by_words)
            scores[self._contents == self._contents[own][:, None]] = -np.inf
            # The best of each query, in any order.
            count = self._num_candidates
            found = np.argpartition(-scores, count - 1, axis=1)[:, :count]
            teacher = scipy.special.softmax(np.take_along_axis(scores, found, 1), 1)
            return TaughtQueries(
                query_ids=ids,
                block_embeddings=self._rows[found] / spread[..., None],
                teacher=teacher.astype(np.float32),
            )

    def _retriever(self) -> PyTree:
        """Returns the retriever as it began: of towers alike one does not train."""
        return tie_towers(self._stage.state.params["retriever"])


def _require_alike(stage: Stage[Any]) -> None:
    if stage.details is not None:
        return
    retriever = multihost.fetch(stage.state.params["retriever"])
    same = jax.tree.map(
        np.array_equal, retriever[QUERY_TOWER], retriever[DOCUMENT_TOWER]
    )
    if not all(jax.tree.leaves(same)):
        raise BadInputError(
            "expected two towers that start alike with BM25_WEIGHT, got others; the "
            "document tower, which does not train, is the teacher of the query tower: "
            'give published weights as WARM_START, with PROJECTION="lda" if they are '
            "projected, or set BM25_WEIGHT=0"
        )


def _spread(
    scores: Float[np.ndarray, "batch block"],
) -> Float[np.ndarray, "batch 1"]:
    """Returns standard deviations, 1 where all scores are the same."""
    spread = scores.std(axis=1, keepdims=True)
    return np.where(spread > 0, spread, 1.0)
