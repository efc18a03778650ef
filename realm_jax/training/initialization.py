"""Builds the models of a run and their initial parameters."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from realm_jax.data.tokenizer_files import load_vocabulary, vocabulary_file
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.models import encoders
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import (
    SETTINGS_OF_TRAINING,
    Retriever,
    RetrieverConfig,
)
from realm_jax.models.span_reader import SpanReader
from realm_jax.ranges import require_ranges
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.recorded import open_run
from realm_jax.types import Lengths
from realm_jax.weights import bert as bert_weights
from realm_jax.weights.published_encoder import load_dense, read_sentence_encoder
from realm_jax.weights.tensors import weights_file

# Settings that do not change the meaning of the parameters.
_FREE = (*SETTINGS_OF_TRAINING, "dtype", "products")


def _no_sizes(**settings: Any) -> BertConfig:
    """Stands for sizes that no gin file gives."""
    raise BadInputError(
        "expected a gin file with the sizes of the models, got none; add "
        "--gin_file=gin/models/minilm_l6.gin, or another one of gin/models/"
    )


@dataclasses.dataclass(frozen=True)
class ModelFactory:
    """Sizes of a run's models, before the vocabulary is known.

    Attributes:
      bert: makes the encoder of both towers and of the reader from `vocab_size`, and
        from other settings of `BertConfig` when the planner varies them.
      retriever: makes the towers from `bert`.
      lengths: padded lengths.
      span_scorer: whether fine-tuning's span scorer exists before fine-tuning: the
        reader's warm start then trains it too (`objectives/open_qa.py`), and
        REALM passes it on.
    """

    bert: Callable[..., BertConfig] = _no_sizes
    retriever: Callable[..., RetrieverConfig] = RetrieverConfig
    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    span_scorer: bool = False

    def __post_init__(self):
        require_ranges(self)
        if self.bert is _no_sizes:
            self.bert()

    def retriever_config(self, vocab_size: int) -> RetrieverConfig:
        """Returns the configuration of the towers for a vocabulary size."""
        return self.retriever(bert=self.bert(vocab_size=vocab_size))

    def knowledge_encoder(self, bert: BertConfig) -> KnowledgeEncoder:
        """Returns the reader of all stages before fine-tuning."""
        return KnowledgeEncoder(bert, span_scorer=self.span_scorer)


Reader = KnowledgeEncoder | SpanReader


def initial_params(
    retriever: Retriever, reader: Reader, lengths: Lengths, seed: int
) -> tuple[PyTree, PyTree]:
    """Draws {"retriever": ..., "reader": ...}; returns them and their logical axes."""
    retriever_key, reader_key = jax.random.split(jax.random.key(seed))
    document, joined = (
        jnp.zeros((1, 1, length), jnp.int32)
        for length in (lengths.document, lengths.joined)
    )
    query = jnp.zeros((1, lengths.query), jnp.int32)
    masks = jnp.zeros((1, 1, 1), jnp.int32)
    arguments = (joined, joined) + (
        (masks,) if isinstance(reader, KnowledgeEncoder) else ()
    )
    retriever = retriever.clone(config=retriever.config.rolled())
    reader = reader.clone(config=reader.config.rolled())
    variables = {
        "retriever": _init(retriever, retriever_key, query, document, document),
        "reader": _init(reader, reader_key, *arguments),
    }
    return (
        {name: value["params"] for name, value in variables.items()},
        {name: value["params_axes"] for name, value in variables.items()},
    )


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Retriever | Reader, key: jax.Array, *inputs: jax.Array) -> Any:
    """Returns the initial variables, compiled once per model in a process."""
    return model.init(key, *inputs)


def recorded_activation(source: str) -> str | None:
    """Returns the activation of a source's encoders; None if nothing there says it."""
    if not source:
        return None
    if weights_file(source) is not None:
        has_config = (pathlib.Path(source) / bert_weights.CONFIG_FILE).exists()
        return bert_weights.config_from_json(source).activation if has_config else None
    run = open_run(source)
    return None if run is None else run.trained.model["bert"].get("activation")


def warm_start_params(
    params: PyTree,
    source: str,
    config: RetrieverConfig,
    vocabulary: WordPiece,
    *,
    retriever_source: str = "",
    reader_source: str = "",
    checkpoint: Which = Which.LAST,
) -> PyTree:
    """Replaces parameters by those of earlier stages or of published weights.

    A source is either a folder with `model.safetensors` and `config.json`, whose BERT
    is loaded into every tower and the reader, and whose masked-LM head, if any, into a
    knowledge encoder's; or the model directory of an earlier stage, whose parameters
    are taken wherever this stage has them too. `source` is that of each model without a
    source of its own; "" keeps the random parameters.

    An error names the macro of the source and the models it is for.
    """
    own = {"retriever": retriever_source, "reader": reader_source}
    models_of: dict[tuple[str, str], list[str]] = {}
    for model, of_model in own.items():
        macro = f"{model.upper()}_WARM_START" if of_model else "WARM_START"
        if of_model or source:
            models_of.setdefault((macro, of_model or source), []).append(model)
    started = dict(params)
    for (macro, address), models in models_of.items():
        drawn = {model: params[model] for model in models}
        try:
            started |= _from_source(drawn, address, config, vocabulary, checkpoint)
        except BadInputError as error:
            raise BadInputError(
                f"{macro} of {' and '.join(models)}: {error}"
            ) from error
    return started


def _from_source(
    params: PyTree,
    source: str,
    config: RetrieverConfig,
    vocabulary: WordPiece,
    checkpoint: Which,
) -> PyTree:
    """Loads the models in `params` from a source; see `warm_start_params`."""
    folder = pathlib.Path(source)
    if weights_file(folder) is not None:
        started = _with_weights(params, folder, config)
        if (file := vocabulary_file(folder)) is not None:
            theirs = load_vocabulary(file, **vocabulary.settings)
            _require_vocabulary(theirs.fingerprint, vocabulary, source)
        return started
    run = open_run(source)
    restored = restore_params(open_store(source), checkpoint)
    if run is None or restored is None:
        raise BadInputError(
            f"expected a finished checkpoint or model.safetensors in {source!r}, found "
            "neither; run the stage before this one first"
        )
    merged = _take_over(params, restored.tree, source)
    expected, received = describe(config), run.trained.model
    if "retriever" not in params:  # The towers may then differ.
        expected, received = expected["bert"], received["bert"]
    if received != expected:
        raise BadInputError(
            f"expected the model {expected} in {source}, got {received}; use the model "
            "file that stage was trained with"
        )
    _require_vocabulary(run.trained.vocabulary_fingerprint, vocabulary, source)
    return merged


def _with_weights(
    params: PyTree, folder: pathlib.Path, config: RetrieverConfig
) -> PyTree:
    """Copies published weights into every matching part of the models."""
    if "retriever" in params and config.dense_size is not None:
        params = {**params, "retriever": _with_dense(params["retriever"], folder)}
    # Only "cls" pooling uses a pooler.
    needs_pooler = "retriever" in params and config.pooling == "cls"
    if "head_dense" not in params.get("reader", {}):
        return _with_bert(
            params,
            bert_weights.load_bert(folder, config.bert, needs_pooler=needs_pooler),
        )
    loaded = bert_weights.load_masked_lm(folder, config.bert, needs_pooler=needs_pooler)
    head = {name: loaded[name] for name in loaded if name != "bert"}
    if not head:
        logging.info("no masked-LM head in %s; the reader's is a new one", folder)
    started = _with_bert(params, loaded["bert"])
    return {**started, "reader": started["reader"] | jax.tree.map(jnp.asarray, head)}


def _with_dense(towers: PyTree, folder: pathlib.Path) -> PyTree:
    found = load_dense(read_sentence_encoder(str(folder)))
    for tower in towers.values():
        expected, received = tower["dense"]["kernel"].shape, found["kernel"].shape
        if expected != received:
            raise BadInputError(
                f"expected a Dense of {expected} in {folder}, got {received}; use the "
                "settings that `realm init` writes for these weights"
            )
    dense = jax.tree.map(jnp.asarray, found)
    return {name: {**tower, "dense": dense} for name, tower in towers.items()}


def _require_vocabulary(found: str | None, expected: WordPiece, source: str) -> None:
    """Requires the same vocabulary; shapes cannot tell two of one size apart."""
    if found != expected.fingerprint:
        raise BadInputError(
            f"expected parameters trained on the corpus's vocabulary "
            f"{expected.fingerprint[:12]} in {source}, got {str(found)[:12]}; prepare "
            "the corpus with the vocabulary they were trained on (VOCABULARY)"
        )


def _with_bert(params: PyTree, bert: PyTree) -> PyTree:
    """Copies one encoder into every subtree called "bert"."""
    return {
        name: {**value, **jax.tree.map(jnp.asarray, bert)}
        if name == "bert"
        else _with_bert(value, bert)
        if isinstance(value, Mapping)
        else value
        for name, value in params.items()
    }


def _take_over(params: PyTree, source: PyTree, where: str) -> PyTree:
    """Takes every parameter that both have; the encoders must be complete."""
    flat, found = (
        flax.traverse_util.flatten_dict(tree, sep="/") for tree in (params, source)
    )
    needed = [
        name for name in flat if name.startswith("retriever/") or "/bert/" in name
    ]
    for name in needed:
        expected, received = flat[name].shape, getattr(found.get(name), "shape", None)
        if expected != received:
            raise BadInputError(
                f"expected {name} of shape {expected} in {where}, got {received}; "
                "use the model file and vocabulary that stage was trained with"
            )
    merged = {
        name: found[name]
        if name in found and found[name].shape == value.shape
        else value
        for name, value in flat.items()
    }
    return flax.traverse_util.unflatten_dict(merged, sep="/")


def described_models(
    described: Mapping[str, Any], lengths: Lengths, **numerics: str
) -> ModelFactory:
    """Returns models of the sizes that `describe` recorded; its inverse.

    Settings that it omits, which are those of training and of numerics, have their
    defaults, or are `dtype` and `products` of `numerics`. A setting that is missing, or
    unknown to this version, is a TypeError.
    """
    towers = dict(described)
    recorded = {**towers.pop("bert"), **numerics}
    bert = functools.partial(encoders.from_record, recorded)
    models = ModelFactory(bert, functools.partial(RetrieverConfig, **towers), lengths)
    models.retriever_config(described["bert"]["vocab_size"])
    return models


def describe(config: RetrieverConfig) -> dict[str, Any]:
    """Returns the settings that define the parameters, as JSON, for checkpoints.

    Settings of training and computation (dropout, precision, rematerialisation) may
    change from one run to the next.
    """
    described = config.recorded()
    for name in _FREE:
        described.pop(name, None)
        described["bert"].pop(name, None)
    if config.temperature == 1.0:
        # Runs older than this setting have none.
        del described["temperature"]
    return described
