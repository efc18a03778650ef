"""Measures the recall of a fixed set of questions at every refresh.

The retriever never trains on them, and the set never changes, so the values of one run
can be compared with each other and with those of another (zero-shot recall, REALM,
section 4.3).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, PyTree

from realm_jax.answering.search import search_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import (
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    question_examples,
    read_questions,
)
from realm_jax.index.searchers import Searcher
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks
from realm_jax.models.retriever import RetrieverConfig


class HeldOutQuestions:
    """Questions of one split; `ids` are int32 [question, query]."""

    def __init__(self, corpus: BlockStore, path: str, split: str, query_length: int):
        """Reads the questions; no block is read before one is retrieved."""
        self._corpus = corpus
        self.questions = read_questions(path, split)
        self.ids = question_examples(
            self.questions,
            corpus.vocabulary,
            query_length=query_length,
            max_answers=MAX_ANSWERS,
            max_answer_length=MAX_ANSWER_LENGTH,
        )["question_ids"]

    def recall(
        self, config: RetrieverConfig, params: PyTree, searcher: Searcher, k: int
    ) -> Float[np.ndarray, " question"]:
        """Returns 1.0 for questions with a relevant block in the first k, else 0.0."""
        return self.recalls(config, params, searcher, [k])[k]

    def recalls(
        self,
        config: RetrieverConfig,
        params: PyTree,
        searcher: Searcher,
        recall_at: Sequence[int],
    ) -> dict[int, Float[np.ndarray, " question"]]:
        """Returns `recall` for each of several k, of one search."""
        found = search_questions(config, params, searcher, self.ids, max(recall_at))
        ids = np.asarray(found.ids)
        relevant = relevant_blocks(self._corpus, self.questions, among=ids)
        return {k: recall_at_k(ids, relevant, k) for k in recall_at}
