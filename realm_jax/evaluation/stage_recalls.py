"""Measures the recall of the retriever that a stage has ended with."""

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.evaluation.comparisons import recall_name
from realm_jax.evaluation.loading import FinishedRun
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import Searcher
from realm_jax.index.source import IndexSource
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training.zero_shot_recall import HeldOutQuestions

Values = dict[str, np.ndarray]
"""One value per question for each metric."""


@dataclasses.dataclass(frozen=True)
class StageRecalls:
    """Recall of the same questions by the retrievers of several stages.

    Attributes:
      donors: model directories whose indexes may be copied from.
      tick: called when an index is there; may raise `StoppedError`.
    """

    corpus: BlockStore
    retriever: RetrieverConfig
    questions: HeldOutQuestions
    recall_at: Sequence[int]
    embed: EmbedConfig
    searcher: str
    donors: Sequence[str]
    tick: Callable[[], None]
    stop: threading.Event
    _measured: dict[int, Values] = dataclasses.field(default_factory=dict, init=False)

    def index(self, model_dir: str, model: FinishedRun) -> Searcher:
        """Returns the index of a stage, which is made if it is missing."""
        index = self._source(model_dir).load_or_build(
            model.step, model.tree["retriever"], self.stop
        )
        self.tick()
        return index.searcher

    def of_stage(self, model_dir: str, model: FinishedRun) -> Values:
        """Returns the recall of a stage, cached by the retriever's checksum.

        Where the reader alone is trained, several stages end with the same retriever.
        """
        params = model.tree["retriever"]
        checksum = self._source(model_dir).retriever(model.step, params).params_crc32c()
        if checksum not in self._measured:
            searcher = self.index(model_dir, model)
            self._measured[checksum] = self.measure(model.tree, searcher)
        else:
            self.tick()
        return self._measured[checksum]

    def measure(self, params: PyTree, searcher: Searcher) -> Values:
        """Returns the recall of a retriever, {"retriever": ..., ...}, by its index."""
        recalls = self.questions.recalls(
            self.retriever, params["retriever"], searcher, self.recall_at
        )
        return {recall_name(k): values for k, values in recalls.items()}

    def _source(self, model_dir: str) -> IndexSource:
        return IndexSource(
            open_store(model_dir),
            self.corpus,
            self.retriever,
            self.embed,
            self.searcher,
            donors=self.donors,
        )
