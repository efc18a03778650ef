"""Writes the retriever of a run as sentence-transformers models, for other software.

One tower is one model. Two are two, `query/` and `document/`; so is a single tower that
fine-tuning has changed, since the documents of its index were embedded before, unless
the index was refreshed.

Beside it lies a model card, with corpus, recipe and recalls.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from jaxtyping import PyTree

from realm_jax import __version__
from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import new_folder, require_free
from realm_jax.evaluation import embedding_files
from realm_jax.evaluation.adapt_report import table_rows
from realm_jax.evaluation.loading import FinishedRun, TrainedModel
from realm_jax.evaluation.recorded import Overrides, parent, within
from realm_jax.evaluation.report import JSON_NAME
from realm_jax.evaluation.searching import find_retriever, open_retriever
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.snapshots import SnapshotArray
from realm_jax.manifests import unseal
from realm_jax.metrics.curves import find_curve, measured, read_curves
from realm_jax.metrics.retrieval import Interval
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER, RetrieverConfig
from realm_jax.run_record import newest_record
from realm_jax.stages import EVALUATE, TRAINING
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import score_of
from realm_jax.weights.published_encoder import prompt_text
from realm_jax.weights.sentence_encoder import (
    has_length_1,
    save_sentence_encoder,
    scale_of_export,
)

CARD_NAME = "README.md"

# Key of the parameters of a retriever with one tower.
_TOWER = "tower"
_Folder = Literal[".", "query", "document"]

# Of tasks that are named for the corpus, as `prepare` names them.
_TASKS = ("ict", "salient", "questions")

_HEADER = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- feature-extraction
- realm
---

"""

_ONE_TOWER = """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIR")
queries = model.encode(["a query"])
documents = model.encode([("a title", "its text")])  # or a text without a title
model.similarity(queries, documents)  # inner products
```
"""

_TWO_TOWERS = """\
```python
from sentence_transformers import SentenceTransformer

queries = SentenceTransformer("DIR/query").encode(["a query"])
documents = SentenceTransformer("DIR/document").encode([("a title", "its text")])
queries @ documents.T
```
"""


def export_retriever(
    run: str,
    output: str,
    given: Overrides,
    *,
    checkpoint: str = "last",
    before_training: bool = False,
    embeddings: Sequence[str] = (),
    stop: threading.Event | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Writes the retriever of a run's last stage into a local folder, new or empty.

    The folder appears whole. `run` is as in `searching.open_retriever`, `given` what is
    not to be found, and `checkpoint` "last" or "best" of a run that is not fine-tuned.
    `before_training` is as in `searching.PretrainedRetriever.open`, of a model
    directory. `embeddings` are formats, of `embedding_files.FORMATS`, in which to write
    the blocks' embeddings, too; an index that is missing is made, and `note` told so.
    Returns the folders of the models, relative to `output`: "." or "query" and
    "document".
    """
    target = Path(output).expanduser().absolute()
    require_free(target)
    embedding_files.require_libraries(embeddings)
    recorded, is_chosen = find_retriever(run)
    before_training = before_training or is_chosen
    model, corpus = open_retriever(
        recorded,
        given,
        checkpoint=checkpoint,
        before_training=before_training,
        embeds_documents=True,
    )
    config = model.source(corpus).config
    lengths = model.models.lengths
    towers: dict[_Folder, PyTree] = _towers(model, corpus)
    if before_training:  # They are the same.
        towers = {".": towers["document"]}
    rows = _embeddings(model, corpus, stop, note) if embeddings else None
    with new_folder(target, "the models") as partial:
        for name, tower in towers.items():
            folder = partial / name
            folder.mkdir(exist_ok=True)
            length = lengths.query if name == "query" else lengths.document
            save_sentence_encoder(
                folder,
                tower,
                config,
                corpus.vocabulary,
                max_length=length,
                reads=None if name == "." else name,
            )
        card = model_card(
            model.run,
            config,
            corpus,
            two_towers=len(towers) > 1,
            before_training=before_training,
        )
        (partial / CARD_NAME).write_text(card)
        if rows is not None:
            scale = scale_of_export(config)
            embedding_files.write_embeddings(partial, embeddings, rows, corpus, scale)
    return list(towers)


def _towers(model: TrainedModel, corpus: BlockStore) -> dict[_Folder, PyTree]:
    """Returns the parameters of each tower by its folder."""
    queries = model.run.tree["retriever"]
    documents = model.document_encoder(corpus)
    if not model.source(corpus).config.shared:
        return {"query": queries[QUERY_TOWER], "document": documents[DOCUMENT_TOWER]}
    if documents is queries:
        return {".": queries[_TOWER]}
    return {"query": queries[_TOWER], "document": documents[_TOWER]}


def _embeddings(
    model: TrainedModel,
    corpus: BlockStore,
    stop: threading.Event | None,
    note: Callable[[str], None],
) -> SnapshotArray:
    if not model.has_index(corpus):
        note(f"making the index of {corpus.directory}")
    series = model.source(corpus).series
    return series.array(model.index(corpus, stop).manifest, EMBEDDINGS)


def model_card(
    run: FinishedRun,
    config: RetrieverConfig,
    corpus: BlockStore,
    *,
    two_towers: bool,
    before_training: bool = False,
) -> str:
    """Returns the card as Markdown.

    `run` is at the checkpoint that is exported; with `two_towers` queries and documents
    have a model each, and with `before_training` it is the encoder that the run began
    with.
    """
    name = _corpus_name(run.trained.data_order["task"], corpus)
    parts = [
        f"{_HEADER}# Retriever of {name}",
        f"Made with realm_jax (exported by version {__version__}). Scores are inner "
        "products of the embeddings, which are "
        f"{'' if has_length_1(config) else 'not '}normalised to length 1.",
        _usage(config, two_towers),
        "## Corpus and recipe",
        _table(("", ""), _facts(name, run, config, corpus, before_training)),
    ]
    rows = [
        *table_rows(parent(run.model_dir), corpus.fingerprint),
        *_report_rows(run.model_dir, corpus),
        *_training_rows(run),
    ]
    if rows:
        parts += ["## Measured", _table(("questions", "retriever", "result"), rows)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _usage(config: RetrieverConfig, two_towers: bool) -> str:
    """Returns the program for a reader of the card."""
    if two_towers:
        return _TWO_TOWERS
    if not (config.query_prefix or config.document_prefix):
        return _ONE_TOWER
    queries = _ONE_TOWER.replace('encode(["', 'encode_query(["')
    return queries.replace('encode([("', 'encode_document([("')


def _facts(
    name: str,
    run: FinishedRun,
    config: RetrieverConfig,
    corpus: BlockStore,
    before_training: bool,
) -> Iterator[tuple[str, str]]:
    trained, bert = run.trained, config.bert
    documents = corpus.info.get("num_documents")
    counted = f"{documents:,} documents, " if documents else ""
    yield "corpus", f"{name}: {counted}{corpus.num_blocks:,} blocks"
    yield "its fingerprint", f"`{corpus.fingerprint}`"
    if trained.corpus_fingerprint != corpus.fingerprint:
        yield "trained on", f"another version of it, `{trained.corpus_fingerprint}`"
    yield "vocabulary", f"{corpus.vocabulary.size:,} wordpieces"
    if before_training:
        yield "training", "none, it is the encoder as it was"
    else:
        yield "stage", f"`realm {trained.stage.replace('_', '-')}`"
        yield "updates", f"{run.step:,} of {run.details.get('train_steps', run.step):,}"
    start = newest_record(open_store(run.model_dir), TRAINING)
    if start is not None:
        settings = start.settings
        # A warm start without pairs trains the reader alone, in batches of its own.
        alone = settings.get("pairs_task") == ""
        size = settings.get("reader_batch_size" if alone else "batch_size")
        if not before_training:
            yield "examples per update", "not recorded" if size is None else str(size)
        # Its folder alone: a card may be published.
        began = PurePosixPath(settings.get("warm_start") or "").name
        yield "began with", began or "random parameters"
        yield "seed", str(start.seed)
        yield "version", f"{start.version}, commit {start.commit or 'not recorded'}"
    yield "encoder", f"BERT, {bert.num_layers} layers of {bert.hidden_size}"
    yield "embedding", f"{config.projection_size} features, pooling {config.pooling}"
    prefixes = {"query": config.query_prefix, "document": config.document_prefix}
    for kind, prefix in prefixes.items():
        if prefix:
            yield f"{kind} prompt", f"`{prompt_text(prefix, corpus.vocabulary)}`"


def _report_rows(model_dir: str, corpus: BlockStore) -> Iterator[tuple[str, str, str]]:
    """Yields recalls of the chain's evaluation, if it was of this corpus."""
    store = open_store(within(parent(model_dir), EVALUATE.name))
    if not store.exists(JSON_NAME):
        return
    # Of a damaged report, and of one of a version that lacks a field, there are none.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        report: Any = unseal(store.read(JSON_NAME), required=False)
        run, comparison = report["run"], report["comparison"]
        if run["corpus"]["fingerprint"] != corpus.fingerprint:
            return
        of = f"`realm evaluate`, split {run['split']}"
        for row in [*comparison["baselines"], *comparison["rows"]]:
            recalls = [
                f"{metric} {Interval(**value).percent()} %"
                for metric, value in row["metrics"].items()
                if metric.startswith("recall@")
            ]
            if recalls:
                count = next(iter(row["metrics"].values()))["count"]
                yield f"{count} of {of}", row["label"], ", ".join(recalls)


def _training_rows(run: FinishedRun) -> Iterator[tuple[str, str, str]]:
    """Yields what training itself measured: the first recall, the last, the score."""
    curve = measured(
        find_curve(read_curves([run.model_dir]), run.trained.stage, "recall_at_5")
    )
    points = list(zip(curve.steps, curve.values, strict=True))
    for step, value in dict.fromkeys([*points[:1], *points[-1:]]):
        yield (
            "held out by training",
            f"at update {step:,}",
            f"recall@5 {100 * value:.1f} %",
        )
    for name, value in score_of(run.details).items():
        yield "held out by training", f"at update {run.step:,}", f"{name} {value:.3f}"


def _corpus_name(task: str, corpus: BlockStore) -> str:
    """Returns the name that `prepare` gave the corpus, by its task; else its folder."""
    name, _, kind = task.rpartition("_")
    return name if name and kind in _TASKS else corpus.directory.name


def _table(titles: Sequence[str], rows: Any) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
