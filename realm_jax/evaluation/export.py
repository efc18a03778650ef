"""Writes the retriever of a run as sentence-transformers models, for other software.

One tower is one model. Two are two, `query/` and `document/`; so is a single tower that
fine-tuning has changed, since the documents of its index were embedded before, unless
the index was refreshed.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jaxtyping import PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import new_folder, require_free
from realm_jax.evaluation import embedding_files
from realm_jax.evaluation.ask import open_model
from realm_jax.evaluation.loading import TrainedModel
from realm_jax.evaluation.model_card import model_card
from realm_jax.evaluation.recorded import (
    Overrides,
    ask_config,
)
from realm_jax.evaluation.searching import find_retriever, open_retriever
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.snapshots import SnapshotArray
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER
from realm_jax.stages import FINETUNE
from realm_jax.weights.sentence_encoder import save_sentence_encoder, scale_of_export

CARD_NAME = "README.md"

# Key of the parameters of a retriever with one tower.
_TOWER = "tower"
_READS: dict[str, Literal["query", "document"]] = {
    "query": "query",
    "document": "document",
}


def export_retriever(
    run: str,
    output: str,
    given: Overrides,
    *,
    checkpoint: str = "last",
    as_begun: bool = False,
    embeddings: Sequence[str] = (),
    stop: threading.Event | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Writes the retriever of a run's last stage into a local folder, new or empty.

    The folder appears whole. `run` is as in `searching.open_retriever`, `given` what is
    not to be found, and `checkpoint` "last" or "best" of a run that is not fine-tuned.
    `as_begun` is as in `searching.PretrainedRetriever.open`, of a model directory.
    `embeddings` are formats, of `embedding_files.FORMATS`, in which to write the
    blocks' embeddings, too; an index that is missing is made, and `note` told so.
    Returns the folders of the models, relative to `output`: "." or "query" and
    "document".

    Raises:
      StoppedError: `stop` was set while an index was made.
    """
    target = Path(output).expanduser().absolute()
    require_free(target)
    embedding_files.require_libraries(embeddings)
    model, corpus, as_begun = _open(run, given, checkpoint, as_begun)
    config = model.source(corpus).config
    lengths = model.models.lengths
    towers = _towers(model, corpus)
    if as_begun:  # They are the same.
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
                reads=_READS.get(name),
            )
        card = model_card(
            model.run, config, corpus, two_towers=len(towers) > 1, as_begun=as_begun
        )
        (partial / CARD_NAME).write_text(card)
        if rows is not None:
            scale = scale_of_export(config)
            embedding_files.write_embeddings(partial, embeddings, rows, corpus, scale)
    return list(towers)


def _open(
    run: str, given: Overrides, checkpoint: str, as_begun: bool
) -> tuple[TrainedModel, BlockStore, bool]:
    """Opens the run, a fine-tuned one together with what embedded its documents.

    The last value is whether it is the encoder that the run began with.
    """
    recorded, is_chosen = find_retriever(run)
    as_begun = as_begun or is_chosen
    if recorded.trained.stage != FINETUNE.name:
        model, corpus = open_retriever(
            recorded, given, checkpoint=checkpoint, as_begun=as_begun
        )
        return model, corpus, as_begun
    config = ask_config(recorded, given)
    corpus = BlockStore.open(config.corpus)
    return open_model(config, corpus), corpus, False


def _towers(model: TrainedModel, corpus: BlockStore) -> dict[str, PyTree]:
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
