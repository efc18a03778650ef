"""Measures an index when it is replaced or renewed, for the metrics file.

`Probe` measures how far the index has drifted from a fresh one, on a few queries and
blocks, when it is about to be replaced, which is when it is most stale.
`HeldOutQuestions` measures the recall of questions that the retriever never trains on
(zero-shot recall, REALM, section 4.3). Both samples are the same for the whole run, so
that the values form a curve.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import scipy.special
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.answering.search import search_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import VALIDATION
from realm_jax.data.examples import Examples
from realm_jax.data.questions import (
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    question_examples,
    read_questions,
)
from realm_jax.index.embed import document_embedder, query_embedder
from realm_jax.index.searchers import Searcher, sampled_blocks
from realm_jax.metrics.curves import Level, health, read_curves
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.checkpoint_manifests import HELD_OUT_UTILITY
from realm_jax.training.masked_spans import HeldOutSpans
from realm_jax.training.stage import Stage
from realm_jax.types import NULL_BLOCK, Neighbours

PROBE_QUERIES = 32
PROBE_NEIGHBOURS = 8


class Probe:
    """A sample of blocks and of masked sentences, the first `PROBE_QUERIES` of them."""

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
        self._query_ids = query_ids[:PROBE_QUERIES]
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
        """Compares two indexes on the queries' `PROBE_NEIGHBOURS` best blocks.

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
        return jax.device_get(searcher.search(queries, PROBE_NEIGHBOURS))

    def _documents(
        self, params: PyTree, block_ids: Int[np.ndarray, "*dims"]
    ) -> Float[np.ndarray, "*dims projection"]:
        ids, segments = self._corpus.document_ids(block_ids, self._document_length)
        return self._whole(self._embed_documents(params, ids, segments))

    def _queries(self, params: PyTree) -> Float[np.ndarray, "sample projection"]:
        return self._whole(self._embed_queries(params, self._query_ids))

    def _whole(self, embeddings: jax.Array) -> np.ndarray:
        return multihost.fetch(embeddings).astype(np.float32)


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

    def recalls(
        self,
        config: RetrieverConfig,
        params: PyTree,
        searcher: Searcher,
        recall_at: Sequence[int],
    ) -> dict[int, Float[np.ndarray, " question"]]:
        """Returns by k 1.0 for questions with a relevant block in k, else 0.0."""
        found = search_questions(config, params, searcher, self.ids, max(recall_at))
        ids = np.asarray(found.ids)
        relevant = relevant_blocks(self._corpus, self.questions, among=ids)
        return {k: recall_at_k(ids, relevant, k) for k in recall_at}


class IndexMetrics:
    """Measures indexes, always with the current towers.

    Measurements are `pending` until they are written. A line of metrics `is_due` while
    there are any, so that every index gets its line. The metrics of the run so far show
    whether it is collapsing.
    """

    def __init__(
        self,
        stage: Stage[KnowledgeEncoder],
        examples: Examples,
        *,
        questions: str,
        questions_split: str,
        num_candidates: int,
        max_spans: int,
        require_spans: bool,
    ):
        """Prepares to measure the indexes of a stage; see `held_out_spans`.

        The probe's queries are the first of `examples`, which are trained on.
        `max_spans` of 0 measures no masked sentences; `require_spans` refuses a task
        without any.
        """
        corpus, lengths = stage.corpus, stage.config.models.lengths
        rows = np.arange(min(PROBE_QUERIES, len(examples)))
        queries = examples.batch(rows)["query_ids"]
        self._model_dir = stage.config.model_dir
        self._config = stage.retriever_config
        self._probe = Probe(corpus, self._config, queries, lengths.document)
        self._questions = self._spans = None
        if questions:
            self._questions = HeldOutQuestions(
                corpus, questions, questions_split, lengths.query
            )
        if max_spans:
            self._spans = held_out_spans(
                stage, num_candidates, max_spans, require_spans
            )
        self._measured: dict[str, float] = {}

    @property
    def is_due(self) -> bool:
        """True if there are measurements that are not yet written."""
        return bool(self._measured)

    @property
    def pending(self) -> Mapping[str, float]:
        """The measurements that are not yet written."""
        return dict(self._measured)

    def resume(self, pending: Mapping[str, float]) -> None:
        """Restores measurements from a checkpoint that were not written before it."""
        self._measured = dict(pending)

    def take(self) -> Mapping[str, float]:
        """Returns the measurements since the last call."""
        measured, self._measured = self._measured, {}
        return measured

    def add(self, name: str, value: float) -> None:
        """Adds a value that was measured elsewhere."""
        self._measured[name] = value

    def record_swap(
        self, step: int, params: PyTree, old: Searcher, new: Searcher
    ) -> None:
        """Measures the old index when it is most stale, and the new one."""
        began = time.perf_counter()
        self._measured |= self._probe.of_index(params, old)
        self._measured |= self._probe.of_refresh(params, old, new)
        self.record_recall(step, params, new)
        self._measured["index_measuring_seconds"] = time.perf_counter() - began

    def record_renewal(self, step: int, params: PyTree, searcher: Searcher) -> None:
        """Measures an index that was renewed row by row."""
        self._measured |= self._probe.of_index(params, searcher)
        self.record_recall(step, params, searcher)

    def of_spans(self, params: PyTree, searcher: Searcher) -> float | None:
        """Returns the mean utility of held-out spans, in nats; None without any."""
        if self._spans is None:
            return None
        began = time.perf_counter()
        means = self._spans.fill_in(params, searcher).means()
        self._measured |= means
        self._measured["held_out_seconds"] = time.perf_counter() - began
        return means[HELD_OUT_UTILITY]

    def record_recall(self, step: int, params: PyTree, searcher: Searcher) -> None:
        """Measures the recall of held-out questions, if there are any."""
        if self._questions is None:
            return
        recalls = self._questions.recalls(self._config, params, searcher, [5])
        self._measured["recall_at_5"] = float(recalls[5].mean())
        # Warns of a collapse early; the report would show it only after the run.
        for finding in health(read_curves([self._model_dir])):
            if finding.level is Level.ALARM and multihost.is_first():
                logging.warning("step %d: %s %s", step, finding.text, finding.advice)


def held_out_spans(
    stage: Stage[KnowledgeEncoder],
    num_candidates: int,
    max_spans: int,
    is_required: bool,
) -> HeldOutSpans | None:
    """Returns held-out sentences; None without such a split, unless it is required.

    `num_candidates` includes the null document.
    """
    config = stage.config
    split = stage.corpus.directory / "examples" / config.task / VALIDATION
    if not is_required and not split.exists():
        if multihost.is_first():
            logging.info(
                "task %r has no validation split: nothing is measured on held-out "
                "sentences, and no checkpoint is the best",
                config.task,
            )
        return None
    return HeldOutSpans(
        stage.retriever,
        stage.reader,
        corpus=stage.corpus,
        examples=stage.open_examples(config.task, VALIDATION),
        num_candidates=num_candidates,
        lengths=config.models.lengths,
        max_examples=max_spans,
        mesh=stage.mesh,
    )


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
