"""Measures what the warm start made of an encoder, and then REALM.

Two measures, of the encoder as it was and after each, beside BM25 and the encoder at
its own width, without a projection:

- sentences: a masked sentence of a held-out article finds the blocks of the article
  around its own. Its own block, and copies of it, are not ranked.
- queries: with judgements, which nothing is trained on. A document is ranked by the
  best of its blocks.

An encoder that is trained at its own width, normalised, is its own baseline.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax.answering.hybrid import DEPTH, BM25Index, fuse
from realm_jax.answering.search import embed_questions
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import query_rows
from realm_jax.data.judgements import JudgedQuery
from realm_jax.errors import StoppedError
from realm_jax.evaluation.comparisons import (
    BM25,
    ENCODER,
    QUERIES,
    SENTENCES,
    Comparison,
    compare_with_first,
    fused_name,
    recall_name,
)
from realm_jax.evaluation.searching import PretrainedRetriever
from realm_jax.index.builder import OnProgress
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.metrics import retrieval
from realm_jax.models.retriever import DOCUMENT_TOWER, RetrieverConfig
from realm_jax.training.projection import document_features, unprojected
from realm_jax.training.stage import open_examples
from realm_jax.types import NULL_BLOCK

_SENTENCE_RECALLS = (1, 5, 20)
_QUERY_RECALLS = (1, 5, 20, 100)
_MAX_SENTENCES = 1000
# Blocks on either side of a sentence's own; a whole book would always be found.
_AROUND = 4
_BATCH = 64

Scores = Float[np.ndarray, "query block"]
Search = Callable[["Probe", range], Scores]
"""Scores all blocks for some texts of a probe."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Texts to search with, and the judgement of what they find.

    Attributes:
      texts: the texts, as words for BM25.
      ids: int32 [query, length], `[CLS] x [SEP]`.
      judge: maps the scores of all blocks for some of the texts, and their numbers, to
        metrics with one value for each.
      groups: article of each text, by number, where several are of one; or None.
    """

    name: str
    texts: Sequence[str]
    ids: Int[np.ndarray, "query length"]
    judge: Callable[[Scores, range], Mapping[str, np.ndarray]]
    groups: Int[np.ndarray, " query"] | None = None


def sentences_probe(corpus: BlockStore, task: str) -> Probe | None:
    """Returns the held-out sentences whose article has other blocks, if any."""
    examples = open_examples(corpus, task, "validation", verify=True)
    starts = examples.sentence_starts
    rows = np.arange(len(examples)) if starts is None else np.asarray(starts[:-1])
    rows = _spread(rows, 2 * _MAX_SENTENCES)
    own = examples.batch(rows)["source_block"]
    around = [_around(corpus, int(block)) for block in own]
    kept = _spread(np.flatnonzero(list(map(bool, around))), _MAX_SENTENCES)
    if not len(kept):
        return None
    ids = examples.batch(rows[kept])["query_ids"]
    relevant = [around[i] for i in kept]
    copies = [_copies(corpus, int(own[i])) for i in kept]

    def judge(scores: Scores, of: range) -> dict[str, np.ndarray]:
        ranks = retrieval.rank_of_best(
            scores, relevant[of.start : of.stop], copies[of.start : of.stop]
        )
        return {
            recall_name(k): (ranks <= k).astype(np.float64) for k in _SENTENCE_RECALLS
        }

    vocabulary = corpus.vocabulary
    marks = (0, vocabulary.cls, vocabulary.sep, vocabulary.mask)
    texts = [vocabulary.decode(row[~np.isin(row, marks)]) for row in ids]
    articles = retrieval.articles_of(corpus, own[kept])
    return Probe(SENTENCES, texts, ids, judge, articles)


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns so many of the rows at most, evenly spread."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return rows[places.astype(int)]


def _around(corpus: BlockStore, own: int) -> list[int]:
    """Returns the blocks of the same article next to one, without copies of it."""
    first, last = max(0, own - _AROUND), min(corpus.num_blocks, own + _AROUND + 1)
    near = np.arange(first, last)
    sources = [text.source_id for text in corpus.texts(near)]
    hashes = corpus.content_hashes
    return [
        int(block)
        for block, source in zip(near, sources, strict=True)
        if source == sources[own - first]
        and not np.array_equal(hashes[block], hashes[own])
    ]


def _copies(corpus: BlockStore, own: int) -> list[int]:
    """Returns a block and those with the same title and text."""
    same = (corpus.content_hashes == corpus.content_hashes[own]).all(axis=1)
    return np.flatnonzero(same).tolist()


def queries_probe(
    corpus: BlockStore, queries: Sequence[JudgedQuery], query_length: int
) -> Probe:
    """Returns queries that are judged by the documents of the blocks they find.

    Each query has a relevant document; what is beyond `query_length` wordpieces is cut.
    """
    numbers: dict[str, int] = {}
    document_of = np.empty(corpus.num_blocks, np.int64)
    for block, text in enumerate(corpus.iter_texts()):
        document_of[block] = numbers.setdefault(text.source_id, len(numbers))
    # A document without text has no block, and is never found.
    for query in queries:
        for document in query.grades:
            numbers.setdefault(document, len(numbers))
    judged = [
        {numbers[document]: grade for document, grade in query.grades.items()}
        for query in queries
    ]

    def judge(scores: Scores, of: range) -> dict[str, np.ndarray]:
        documents = retrieval.best_of_groups(scores, document_of)
        found = retrieval.best_first(documents, max(_QUERY_RECALLS))
        some = judged[of.start : of.stop]
        return {
            "nDCG@10": retrieval.ndcg(found, some, 10),
            "MRR@10": retrieval.reciprocal_rank(found, some, 10),
            **{
                recall_name(k): retrieval.graded_recall(found, some, k)
                for k in _QUERY_RECALLS
            },
        }

    vocabulary = corpus.vocabulary
    texts = [query.text for query in queries]
    ids = query_rows(texts, query_length, vocabulary)
    return Probe(QUERIES, texts, ids, judge)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A retriever with the embeddings of all blocks."""

    config: RetrieverConfig
    params: PyTree
    blocks: Float[np.ndarray, "block projection"]

    def __call__(self, probe: Probe, rows: range) -> Scores:
        """Returns the scores of all blocks for some texts."""
        ids = probe.ids[rows.start : rows.stop]
        queries = embed_questions(self.config, self.params, ids, batch_size=_BATCH)
        return queries @ self.blocks.T


def measure(
    retrievers: Mapping[str, PretrainedRetriever],
    corpus: BlockStore,
    probes: Sequence[Probe],
    stop: threading.Event,
    note: Callable[[str], None] = lambda text: None,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Comparison]:
    """Measures retrievers, the first of which is the encoder that others began with.

    `note` is called with a sentence before it begins, and `show` with how much is done
    of how much, and of what: blocks embedded, or texts of a probe scored. Returns the
    results of each probe by its name: a row for each label with its differences to the
    first, and baselines: BM25, the first without a projection, and each of them fused
    with BM25.
    """
    if not probes:
        return {}
    note(f"measuring {' and '.join(f'{len(p.texts):,} {p.name}' for p in probes)}")
    searches: dict[str, Search] = {}
    first, *_, last = retrievers.values()
    numerics = index_numerics(list(retrievers.values()), corpus)
    config = first.models.retriever_config(corpus.vocabulary.size)
    # Else the retriever begins with the order that the cosine gives.
    if config.projected or not config.normalize:
        searches[ENCODER] = without_projection(first, corpus, numerics)
    for label, model in retrievers.items():
        searches[label] = dense(
            model,
            corpus,
            stop,
            numerics,
            donors=[last.model_dir],
            on_progress=lambda done, total: show(done, total, "blocks embedded"),
        )
    bm25 = BM25Index(corpus)
    found = {probe.name: judged(probe, searches, bm25, stop, show) for probe in probes}
    fused = [fused_name(label) for label in retrievers]
    baselines = [BM25, *(label for label in searches if label == ENCODER), *fused]
    return {
        probe.name: compare_with_first(
            {label: found[probe.name][label] for label in retrievers},
            {label: found[probe.name][label] for label in baselines},
            probe.groups,
        )
        for probe in probes
    }


def judged(
    probe: Probe,
    searches: Mapping[str, Search],
    bm25: BM25Index,
    stop: threading.Event,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, dict[str, np.ndarray]]:
    """Returns metrics with a value for each text: of BM25, and of each search.

    Those of a search that is fused with BM25 are under its `fused_name`. `show` is as
    in `measure`.
    """
    parts: dict[str, list[Mapping[str, np.ndarray]]] = collections.defaultdict(list)
    for start in range(0, len(probe.texts), _BATCH):
        if stop.is_set():
            raise StoppedError("stopped; what was measured is measured again")
        show(start, len(probe.texts), f"{probe.name} scored")
        rows = range(start, min(start + _BATCH, len(probe.texts)))
        by_words = bm25.scores(probe.texts[rows.start : rows.stop])
        scores = {label: search(probe, rows) for label, search in searches.items()}
        fused = {
            fused_name(label): _fused(of, by_words) for label, of in scores.items()
        }
        for label, of in {BM25: by_words, **scores, **fused}.items():
            parts[label].append(probe.judge(of, rows))
    show(len(probe.texts), len(probe.texts), f"{probe.name} scored")
    return {
        label: {name: np.concatenate([p[name] for p in of]) for name in of[0]}
        for label, of in parts.items()
    }


def _fused(retrieved: Scores, by_words: Scores) -> Scores:
    """Returns what the blocks score if both rankings are fused, -inf beyond them."""
    depth = min(DEPTH, retrieved.shape[1])
    nearest, lexical = (retrieval.best_first(s, depth) for s in (retrieved, by_words))
    found = fuse(nearest, lexical, min(2 * depth, retrieved.shape[1]))
    scores = np.full(retrieved.shape, -np.inf, np.float32)
    for row, ids, of_ids in zip(scores, found.ids, found.scores, strict=True):
        row[ids[ids != NULL_BLOCK]] = of_ids[ids != NULL_BLOCK]
    return scores


def index_numerics(
    models: Sequence[PretrainedRetriever], corpus: BlockStore
) -> dict[str, str]:
    """Returns how the index of the last that has one was computed, as all are to be.

    A difference between float32 and bfloat16 would be taken for one of training, and
    rows of this index would not be those of another.
    """
    for model in reversed(models):
        series = model.source(corpus).series
        if model.index_step in series.steps():
            manifest = series.read_manifest(model.index_step)
            bert = manifest.metadata["retriever"]["bert"]
            return {name: bert[name] for name in ("dtype", "products")}
    return {}


def _computed(config: RetrieverConfig, numerics: Mapping[str, str]) -> RetrieverConfig:
    return dataclasses.replace(
        config, bert=dataclasses.replace(config.bert, **numerics)
    )


def dense(
    model: PretrainedRetriever,
    corpus: BlockStore,
    stop: threading.Event,
    numerics: Mapping[str, str] | None = None,
    donors: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> Dense:
    """Returns a retriever with the index of its run, which is made if it is missing.

    Args:
      numerics: settings of `BertConfig` to embed with instead of those of the run.
      donors: model directories whose indexes may be copied from.
    """
    source = model.source(corpus)
    source = dataclasses.replace(
        source,
        config=_computed(source.config, numerics or {}),
        donors=donors,
        on_progress=on_progress,
    )
    params = model.run.tree["retriever"]
    manifest = source.load_or_build(model.index_step, params, stop).manifest
    rows = np.asarray(source.series.read_array(manifest, EMBEDDINGS), np.float32)
    return Dense(source.config, params, rows)


def without_projection(
    model: PretrainedRetriever, corpus: BlockStore, numerics: Mapping[str, str]
) -> Dense:
    """Returns the encoder as it was published, searched by the cosine."""
    config = _computed(model.models.retriever_config(corpus.vocabulary.size), numerics)
    tower = model.run.tree["retriever"]["tower" if config.shared else DOCUMENT_TOWER]
    embed = EmbedConfig().at_length(model.models.lengths.document)
    blocks = np.arange(corpus.num_blocks)
    rows = document_features(tower, config, corpus, blocks, embed)
    config, params = unprojected(tower, config)
    # The length of a query does not change the order of what it finds.
    return Dense(config, params, rows / np.linalg.norm(rows, axis=1, keepdims=True))
