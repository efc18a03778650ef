"""Finds the candidates of pre-training on the host, before the step.

`candidate_search.py` is the alternative, which searches within the step; for the same
queries both give the same candidates.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from realm_jax.data.blocks import BlockStore
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.index.own_blocks import own_candidates
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.pretrain_loss import PretrainInputs
from realm_jax.training.search_ahead import SearchAhead
from realm_jax.training.step_timing import Stopwatch
from realm_jax.types import Lengths, Neighbours, PretrainBatch

BatchAt = Callable[[int], PretrainBatch]
"""Maps the number of updates done to this process's batch of the next update."""


class HostSearch(SearchAhead[PretrainBatch, PretrainInputs]):
    """Searches before the step and gathers documents from the block store.

    `num_candidates` include the null document and, if it is one (`own_blocks.py`), the
    own block. With `ahead` it searches for the next update while one is running.
    """

    def __init__(
        self,
        retriever: RetrieverConfig,
        corpus: BlockStore,
        lengths: Lengths,
        num_candidates: int,
        mesh: Mesh,
        batch_size: int,
        ahead: bool = True,
        stopwatch: Stopwatch | None = None,
        own_block: bool = False,
    ):
        super().__init__(
            retriever,
            lambda batch: batch.query_ids,
            self._candidates,
            num_neighbours=num_neighbours(num_candidates),
            mesh=mesh,
            batch_size=batch_size,
            ahead=ahead,
            stopwatch=stopwatch or Stopwatch(),
        )
        self._corpus = corpus
        self._lengths = lengths
        self._num_candidates = num_candidates
        self._own_block = own_block

    def _candidates(
        self, batch: PretrainBatch, neighbours: Neighbours
    ) -> PretrainInputs:
        document, joined = self._lengths.document, self._lengths.joined
        candidates = pretrain_candidates(
            self._corpus,
            neighbours,
            batch,
            num_candidates=self._num_candidates - self._own_block,
            document_length=document,
            joined_length=joined,
        )
        if self._own_block:
            own = own_candidates(
                self._corpus, batch, document_length=document, joined_length=joined
            )
            candidates = jax.tree.map(
                lambda *parts: np.concatenate(parts, axis=1), candidates, own
            )
        return PretrainInputs(batch, candidates)
