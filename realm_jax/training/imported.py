"""Makes model directories of models that were published by others.

A source is read by `weights/`; here sources become one model with the checkpoint and
the record of a stage, so that every command runs on it as on one that was trained here:

    a BERT or a sentence encoder               a finished warm start
    an embedder, with or without an encoder    a finished pre-training
    a span reader, with or without embedder    a finished fine-tuning

After fine-tuning the embedder embeds questions, and what embedded the blocks was the
one before it. So a fine-tuned model gets two towers: its own embedder for queries, and
that of a second source for documents, or its own again where none is given.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from realm_jax.data.block_records import RECORDS_FILE, source_of, write_corpus
from realm_jax.data.blocks import INFO_FILE, VOCABULARY_FILE, BlockStore
from realm_jax.data.store_files import new_folder, require_free
from realm_jax.data.tokenizer_files import load_vocabulary, vocabulary_file
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.imported import ImportedIndex, ReadRows, import_index
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.source import FIRST_STEP
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER, RetrieverConfig
from realm_jax.run_record import Trained, new_record, write_record
from realm_jax.stages import FINETUNE, IMPORT_WEIGHTS, PRETRAIN, WARM_START
from realm_jax.storage import absolute_url, open_store
from realm_jax.training.checkpoints import Checkpointer
from realm_jax.training.initialization import describe
from realm_jax.training.recorded import TRAINED
from realm_jax.training.state import TrainState
from realm_jax.types import Lengths
from realm_jax.weights.published import (
    PublishedModel,
    block_embeddings,
    read_published,
)
from realm_jax.weights.realm import SHARED_TOWER

_LENGTHS = Lengths()
_RETRIEVER = "retriever"


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """What is imported, and where to.

    Attributes:
      sources: folders or checkpoints, see `weights.published.read_published`.
      model_dir: the new model directory.
      corpus: the corpus that the model searches, made of `blocks` if it is not there;
        "" for none yet.
      blocks: texts of the blocks, see `block_records`; "" for those of a source.
      titles: their titles in a file of the same kind, or "".
      embeddings: a checkpoint of TensorFlow with their embeddings, `encoded.ckpt`; ""
        for those of a source.
      vocabulary: `vocab.txt`; "" for that of a source or of the corpus.
    """

    sources: Sequence[str]
    model_dir: str
    corpus: str = ""
    blocks: str = ""
    titles: str = ""
    embeddings: str = ""
    vocabulary: str = ""


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was imported: the sources, their stage, and the index if there is one."""

    models: Mapping[str, PublishedModel]
    stage: str
    index: ImportedIndex | None


@dataclasses.dataclass(frozen=True)
class _Model:
    params: PyTree
    retriever: RetrieverConfig
    trained: Mapping[str, Any]
    lengths: Lengths


def import_weights(config: ImportConfig) -> Imported:
    """Makes a model directory of published models; it appears whole."""
    if "://" in config.model_dir:
        raise BadInputError(
            f"expected a local folder as DEST, got {config.model_dir}; import to one, "
            "and copy it"
        )
    target = pathlib.Path(config.model_dir).expanduser().absolute()
    require_free(target)
    models = {source: read_published(source) for source in config.sources}
    parts = list(models.values())
    bert = _common(parts)
    vocabulary = _vocabulary(config, bert.vocab_size)
    model = _put_together(parts)
    rows = _block_embeddings(config, parts)
    corpus = _open_corpus(config, vocabulary, needed=rows is not None)
    with new_folder(target, "the model directory") as partial:
        index = None
        trained = _trained(model, vocabulary, corpus, config)
        _save_checkpoint(partial, model.params, trained)
        vocabulary.save(partial / VOCABULARY_FILE)
        vocabulary.save_pair_tokenizer(partial / "tokenizer.json")
        if rows is not None and corpus is not None and _RETRIEVER in model.params:
            towers, words = model.params[_RETRIEVER], vocabulary.fingerprint
            retriever = TrainedRetriever(FIRST_STEP, model.retriever, towers, words)
            embed = EmbedConfig(document_length=model.lengths.document)
            index = import_index(open_store(partial), corpus, retriever, embed, *rows)
        _write_record(partial, config, models, trained)
    return Imported(models, model.trained["stage"], index)


def _common(models: Sequence[PublishedModel]) -> BertConfig:
    bert = models[0].bert
    for model in models[1:]:
        if model.bert != bert:
            raise BadInputError(
                f"expected sources of one encoder, got {bert} and {model.bert}; import "
                "them into two directories"
            )
    return bert


def _vocabulary(config: ImportConfig, size: int) -> WordPiece:
    files = [config.vocabulary] if config.vocabulary else []
    for source in config.sources:
        folder = pathlib.Path(source)
        for place in (folder, folder / "assets", folder.parent):
            if place.is_dir() and (file := vocabulary_file(place)) is not None:
                files.append(str(file))
                break
    if (pathlib.Path(config.corpus) / INFO_FILE).exists():
        files.append(f"{config.corpus}/{VOCABULARY_FILE}")
    if not files:
        raise BadInputError(
            f"expected {VOCABULARY_FILE} or tokenizer.json in {config.sources[0]}, "
            "found neither; give --vocabulary FILE"
        )
    vocabulary = load_vocabulary(files[0])
    if vocabulary.size != size:
        raise BadInputError(
            f"expected the {size} wordpieces of the weights in {files[0]}, got "
            f"{vocabulary.size}; give the weights' own with --vocabulary FILE"
        )
    for file in files[1:]:
        if load_vocabulary(file).fingerprint != vocabulary.fingerprint:
            raise BadInputError(
                f"expected the same vocabulary in {files[0]} and {file}, got two; give "
                "sources and a corpus of one vocabulary"
            )
    return vocabulary


def _put_together(models: Sequence[PublishedModel]) -> _Model:
    readers = [model for model in models if model.reader is not None]
    towers = [model for model in models if model.towers]
    towers = [model for model in towers if not model.is_bert] or towers
    finetuned = next((model for model in models if model.reading), None)
    most = 2 if finetuned is not None and finetuned.towers else 1
    for found, allowed, what in ((readers, 1, "reader"), (towers, most, "embedder")):
        if len(found) > allowed:
            raise BadInputError(
                f"expected sources with one {what}, got "
                f"{' and '.join(model.name for model in found)}; leave one out"
            )
    shared = all(set(model.towers) == {SHARED_TOWER} for model in towers)
    shared = shared and not (towers and finetuned)
    retriever = dataclasses.replace((towers or models)[0].retriever, shared=shared)
    params: dict[str, PyTree] = {"reader": readers[0].reader} if readers else {}
    if towers and finetuned is None:
        params[_RETRIEVER] = dict(towers[0].towers)
    elif towers:
        towers.sort(key=lambda model: model is not finetuned)
        params[_RETRIEVER] = {
            QUERY_TOWER: _tower(towers[0], QUERY_TOWER),
            DOCUMENT_TOWER: _tower(towers[-1], DOCUMENT_TOWER),
        }
    is_bert = all(model.is_bert for model in models)
    stage = WARM_START if is_bert else PRETRAIN
    trained: dict[str, Any] = {"stage": stage.name, "data_order": {"task": ""}}
    if finetuned is not None and finetuned.reading is not None:
        reading = finetuned.reading
        trained = {
            "stage": FINETUNE.name,
            "num_read": reading.num_read,
            "searcher": "device",
            "data_order": {
                "task": "",
                "marginalization": "joint_softmax",
                "max_span": reading.max_span,
                "span_layer_norm_epsilon": reading.layer_norm_epsilon,
            },
        }
    joined = finetuned.reading.length if finetuned and finetuned.reading else None
    longest = towers[0].max_length if towers else None
    return _Model(params, retriever, trained, _lengths(retriever, joined, longest))


def _tower(model: PublishedModel, name: str) -> PyTree:
    return model.towers[name if name in model.towers else SHARED_TOWER]


def _lengths(
    retriever: RetrieverConfig, joined: int | None, longest: int | None
) -> Lengths:
    """Returns the lengths of the paper, or what the positions allow."""
    most = retriever.bert.max_positions
    joined = min(joined or _LENGTHS.joined, most)
    prefix = max(len(retriever.query_prefix), len(retriever.document_prefix))
    most = min(most, longest or most) - prefix
    # A question may not fill what it shares with a block.
    query = min(_LENGTHS.query, joined // 2, most)
    return Lengths(query, min(_LENGTHS.document, most), joined)


def _block_embeddings(
    config: ImportConfig, models: Sequence[PublishedModel]
) -> tuple[int, ReadRows] | None:
    stored = [model.block_embeddings for model in models if model.block_embeddings]
    if config.embeddings:
        stored = [block_embeddings(config.embeddings)]
    if not stored or not config.corpus:
        return None
    width = models[0].retriever.projection_size
    if stored[0].shape[1] != width:
        raise BadInputError(
            f"expected embeddings of {width} features in {config.embeddings}, got "
            f"{stored[0].shape[1]}; give those of this embedder"
        )
    return stored[0].shape[0], stored[0].rows


def _open_corpus(
    config: ImportConfig, vocabulary: WordPiece, *, needed: bool
) -> BlockStore | None:
    """Opens the corpus, or makes it of the blocks; None if none is named."""
    if not config.corpus:
        if config.blocks or config.embeddings:
            raise BadInputError(
                "expected --corpus beside --blocks or --embeddings, the folder of the "
                "corpus that they are of, got none; name a new one"
            )
        return None
    blocks = pathlib.Path(config.blocks) if config.blocks else None
    for source in config.sources:
        beside = pathlib.Path(source) / RECORDS_FILE
        blocks = blocks or (beside if beside.exists() else None)
    titles = pathlib.Path(config.titles) if config.titles else None
    if (pathlib.Path(config.corpus) / INFO_FILE).exists():
        corpus = BlockStore.open(config.corpus)
        made_of = corpus.info.get("source")
        if needed and blocks and made_of != source_of(blocks, titles):
            raise BadInputError(
                f"expected {config.corpus} to be absent or made of {blocks}, got one "
                f"made of {made_of}; give another --corpus"
            )
        return corpus
    if blocks is None:
        raise BadInputError(
            f"expected a corpus in {config.corpus}, found none; give one that is "
            "prepared, or --blocks, the texts that it is to be made of"
        )
    return write_corpus(config.corpus, blocks, vocabulary, titles)


def _trained(
    model: _Model,
    vocabulary: WordPiece,
    corpus: BlockStore | None,
    config: ImportConfig,
) -> Trained:
    return Trained(
        model=describe(model.retriever),
        lengths=dataclasses.asdict(model.lengths),
        corpus_fingerprint="" if corpus is None else corpus.fingerprint,
        vocabulary_fingerprint=vocabulary.fingerprint,
        corpus=absolute_url(config.corpus) if config.corpus else "",
        numerics={"dtype": "float32", "products": "float32"},
        **model.trained,
    )


def _save_checkpoint(folder: pathlib.Path, params: PyTree, trained: Trained) -> None:
    """Saves a checkpoint of no updates: no run continues from it."""
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(
        step=jax.numpy.zeros((), "int32"),
        params=jax.tree.map(jax.numpy.asarray, params),
        optimizer_state={"count": jax.numpy.zeros((), "int32")},
        key=key,
    )
    checkpointer = Checkpointer(open_store(folder))
    try:
        details = {"train_steps": 0, TRAINED: dataclasses.asdict(trained)}
        checkpointer.save(state, details)
    finally:
        checkpointer.close()


def _write_record(
    folder: pathlib.Path,
    config: ImportConfig,
    models: Mapping[str, PublishedModel],
    trained: Trained,
) -> None:
    sources = {
        absolute_url(source): {
            "class": model.name,
            "unused": list(model.unused),
            "missing": list(model.missing),
        }
        for source, model in models.items()
    }
    record = new_record(
        command=IMPORT_WEIGHTS.command,
        seed=None,
        arguments=[],
        settings=dataclasses.asdict(config) | {"imported": sources},
        gin="",
        trained=trained,
    )
    write_record(open_store(folder), record)
