"""Measures an index when it is replaced or renewed, for the metrics file."""

import logging
import time
from collections.abc import Mapping

import numpy as np
from jaxtyping import PyTree

from realm_jax import multihost
from realm_jax.data.examples import Examples
from realm_jax.data.splits import VALIDATION
from realm_jax.index.searchers import Searcher
from realm_jax.metrics.curves import Level, health, read_curves
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.checkpoint_manifests import HELD_OUT_UTILITY
from realm_jax.training.index_drift import NUM_QUERIES, Probe
from realm_jax.training.masked_spans import HeldOutSpans
from realm_jax.training.stage import Stage
from realm_jax.training.zero_shot_recall import HeldOutQuestions


class IndexMetrics:
    """Measures indexes, always with the current towers.

    Measurements are `pending` until they are written. A line of metrics `is_due` while
    there are any, so that every index gets its line. The metrics of the run in
    `model_dir` show whether it is collapsing.
    """

    def __init__(
        self,
        model_dir: str,
        config: RetrieverConfig,
        probe: Probe,
        questions: HeldOutQuestions | None,
        spans: HeldOutSpans | None,
    ):
        self._model_dir = model_dir
        self._config = config
        self._probe = probe
        self._questions = questions
        self._spans = spans
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
        recall = self._questions.recall(self._config, params, searcher, k=5)
        self._measured["recall_at_5"] = float(recall.mean())
        # Warns of a collapse early; the report would show it only after the run.
        for finding in health(read_curves([self._model_dir])):
            if finding.level is Level.ALARM and multihost.is_first():
                logging.warning("step %d: %s %s", step, finding.text, finding.advice)


def make_index_metrics(
    stage: Stage[KnowledgeEncoder],
    examples: Examples,
    *,
    questions: str,
    questions_split: str,
    num_candidates: int,
    max_spans: int,
    require_spans: bool,
) -> IndexMetrics:
    """Prepares to measure the indexes of a stage; see `held_out_spans`.

    The probe's queries are the first of `examples`, which are trained on. `max_spans`
    of 0 measures no masked sentences; `require_spans` refuses a task without any.
    """
    config, lengths = stage.config, stage.config.models.lengths
    rows = np.arange(min(NUM_QUERIES, len(examples)))
    queries = examples.batch(rows)["query_ids"]
    return IndexMetrics(
        config.model_dir,
        stage.retriever_config,
        Probe(stage.corpus, stage.retriever_config, queries, lengths.document),
        HeldOutQuestions(stage.corpus, questions, questions_split, lengths.query)
        if questions
        else None,
        held_out_spans(stage, num_candidates, max_spans, require_spans)
        if max_spans
        else None,
    )


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
