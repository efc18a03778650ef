"""Measures what a stage has ended with, beside what has not been trained.

The baselines are chance and BM25: a retriever that is no better than these has learned
nothing, or nothing that counting words does not give. All are judged by the same
recall, over the same blocks and questions. Of pre-training, some masked sentences are
chosen as examples for the report.
"""

import dataclasses
import logging
import textwrap
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import Question
from realm_jax.evaluation.comparisons import BM25, RANDOM_BLOCKS, recall_name
from realm_jax.evaluation.loading import FinishedRun
from realm_jax.evaluation.report_data import ExampleDocument, MaskedExample
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import Searcher
from realm_jax.index.source import IndexSource
from realm_jax.metrics.retrieval import recall_at_k, relevant_blocks
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training.index_metrics import HeldOutQuestions
from realm_jax.training.masked_spans import MaskedSpans
from realm_jax.types import NULL_BLOCK

Values = dict[str, np.ndarray]
"""One value per question for each metric."""

# Times that the patterns of a question are matched in a block: 15 microseconds each.
_MOST_MATCHED = 4_000_000
_SNIPPET = 240

_log = logging.getLogger(__name__)


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

    def index(self, model: FinishedRun) -> Searcher:
        """Returns the index of a stage, which is made if it is missing."""
        index = self._source(model).load_or_build(
            model.step, model.tree["retriever"], self.stop
        )
        self.tick()
        return index.searcher

    def of_stage(self, model: FinishedRun) -> Values:
        """Returns the recall of a stage, cached by the retriever's checksum.

        Where the reader alone is trained, several stages end with the same retriever.
        """
        params = model.tree["retriever"]
        checksum = self._source(model).retriever(model.step, params).params_crc32c()
        if checksum not in self._measured:
            self._measured[checksum] = self.measure(model, self.index(model))
        else:
            self.tick()
        return self._measured[checksum]

    def measure(self, model: FinishedRun, searcher: Searcher) -> Values:
        """Returns the recall of a stage's retriever by its index."""
        recalls = self.questions.recalls(
            self.retriever, model.tree["retriever"], searcher, self.recall_at
        )
        return {recall_name(k): values for k, values in recalls.items()}

    def _source(self, model: FinishedRun) -> IndexSource:
        return IndexSource(
            open_store(model.model_dir),
            self.corpus,
            self.retriever,
            self.embed,
            self.searcher,
            donors=self.donors,
        )


def baseline_recalls(
    corpus: BlockStore,
    questions: Sequence[Question],
    *,
    recall_at: Sequence[int],
    max_blocks: int,
    bm25: Callable[[], Int[np.ndarray, "question neighbour"]],
) -> dict[str, dict[str, Float[np.ndarray, " question"]]]:
    """Returns the recall of random blocks and of BM25, by label and metric.

    Where answers are patterns and matching all of them in all blocks would take more
    than a minute or so, random blocks are those of a sample; their label says so. A
    corpus of more than `max_blocks` is not measured, because all of it would have to be
    read: by chance, how many blocks answer a question decides, and BM25 takes every
    word into memory. `bm25` returns what `BM25Index.search` finds.
    """
    num_blocks = corpus.num_blocks
    if num_blocks > max_blocks:
        _log.log(
            logging.WARNING if max_blocks else logging.DEBUG,
            "random blocks and BM25 are left out: the corpus has %s blocks and "
            "MAX_BM25_BLOCKS is %s",
            f"{num_blocks:,}",
            f"{max_blocks:,}",
        )
        return {}
    with_patterns = np.array([q.answers_are_patterns for q in questions], bool)
    sample = _sample(num_blocks, int(with_patterns.sum()), max(recall_at))
    relevant = relevant_blocks(corpus, questions, patterns_in=sample)
    ids = bm25()
    label, judged, found = RANDOM_BLOCKS, np.full(len(questions), num_blocks), relevant
    if sample is not None:
        label = f"{RANDOM_BLOCKS} (estimated)"
        judged = np.where(with_patterns, len(sample), num_blocks)
        found = relevant_blocks(corpus, questions, ids)
    return {
        label: {recall_name(k): random_recall(relevant, judged, k) for k in recall_at},
        BM25: {recall_name(k): recall_at_k(ids, found, k) for k in recall_at},
    }


def _sample(num_blocks: int, num_questions: int, k: int) -> frozenset[int] | None:
    """Returns the blocks, at least k, in which patterns are matched; None for all."""
    size = max(k, _MOST_MATCHED // max(1, num_questions))
    if size >= num_blocks:
        return None
    _log.warning(
        "the recall of random blocks is estimated from %s of %s blocks for the %s "
        "questions whose answers are patterns; all would take long",
        f"{size:,}",
        f"{num_blocks:,}",
        f"{num_questions:,}",
    )
    drawn = np.random.default_rng(0).choice(num_blocks, size, replace=False)
    return frozenset(drawn.tolist())


def random_recall(
    relevant: Sequence[Collection[int]],
    num_blocks: int | Int[np.ndarray, " question"],
    k: int,
) -> Float[np.ndarray, " question"]:
    """Returns the probability that k blocks drawn at random hold a relevant one.

    Different blocks are drawn, all if there are no more than k. `num_blocks` is one
    number for all questions, or one each. Of relevant blocks in a random sample it is
    an estimate without bias, for k blocks of the sample are k blocks of all.
    """
    counts = np.asarray([len(blocks) for blocks in relevant], np.int64)
    drawn = np.minimum(k, num_blocks)
    return 1.0 - stats.hypergeom.pmf(0, num_blocks, counts, drawn)


def masked_examples(
    spans: MaskedSpans, corpus: BlockStore, count: int
) -> list[MaskedExample]:
    """Returns example sentences in the style of REALM's table 3.

    Two thirds of `count` are those that retrieval helped most, the rest those it helped
    least, so that the selection is not only flattering.
    """
    order = np.argsort(-spans.utility, kind="stable")
    count = min(count, len(order))
    least = count // 3
    rows = np.concatenate([order[: count - least], order[len(order) - least :]])
    return [_masked_example(spans, corpus, row) for row in rows]


def _masked_example(spans: MaskedSpans, corpus: BlockStore, row: int) -> MaskedExample:
    documents = []
    for column in np.argsort(-spans.log_retrieval[row]):
        block = int(spans.block_ids[row, column])
        if not np.isfinite(spans.log_retrieval[row, column]):
            continue
        text = corpus.text(block) if block != NULL_BLOCK else None
        documents.append(
            ExampleDocument(
                block_id=block,
                title=text.title if text else "",
                snippet=textwrap.shorten(text.body, _SNIPPET) if text else "",
                retrieval_probability=float(np.exp(spans.log_retrieval[row, column])),
                answer_probability=float(np.exp(spans.log_candidates[row, column])),
            )
        )
    before, answer, after = _around_the_mask(spans, corpus, row)
    return MaskedExample(
        before=before,
        answer=answer,
        after=after,
        documents=documents,
        marginal=float(np.exp(spans.log_marginal[row])),
    )


def _around_the_mask(
    spans: MaskedSpans, corpus: BlockStore, row: int
) -> tuple[str, str, str]:
    """Returns a sentence in three parts, which joined give the sentence unmasked.

    Whether a space stands between two wordpieces depends on both of them, so a part
    decoded by itself would lack the space beside the mask.
    """
    decode = corpus.vocabulary.decode
    query = spans.batch.query_ids[row]
    # [CLS] x [SEP] without its special pieces; the masks are contiguous.
    pieces = query[query != 0][1:-1]
    masked = np.flatnonzero(pieces == corpus.vocabulary.mask)
    scored = spans.batch.mask_weights[row] > 0
    answer = spans.batch.mask_ids[row][scored]
    filled = [*pieces[: masked[0]], *answer, *pieces[masked[-1] + 1 :]]
    before, through, whole = (
        decode(filled[:end]) for end in (masked[0], masked[0] + len(answer), None)
    )
    shown = through.removeprefix(before).lstrip()
    return through.removesuffix(shown), shown, whole.removeprefix(through)
