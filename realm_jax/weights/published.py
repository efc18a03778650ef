"""Reads a published model, whatever its layout.

    config.json of model type "realm"      `realm.py`
    a checkpoint of TensorFlow             `tf_checkpoint.py`
    config.json of a BERT                  a sentence encoder, `published_encoder.py`

A checkpoint is best accompanied by the `bert_config.json` that it was trained with. The
published REALM and ORQA checkpoints have none; sizes are then those of the variables,
with heads of 64 features, as of all BERTs that Google has published.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from realm_jax.data.tokenizer_files import load_vocabulary, vocabulary_file
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.weights.bert import (
    CONFIG_FILE,
    config_from_values,
    load_masked_lm,
    unused_of_bert,
)
from realm_jax.weights.published_encoder import (
    SentenceEncoder,
    load_dense,
    prompt_pieces,
    read_sentence_encoder,
)
from realm_jax.weights.realm import MODEL_TYPE, SHARED_TOWER, PublishedModel, assemble
from realm_jax.weights.stored import DamagedWeightsError, StoredTensor
from realm_jax.weights.tensors import stored_tensors
from realm_jax.weights.tf_checkpoint import (
    as_transformers_names,
    checkpoint_prefix,
    tf_tensors,
)

__all__ = ["PublishedModel", "block_embeddings", "read_published"]

BERT_CONFIG_FILE = "bert_config.json"

_HEAD_SIZE = 64
_ENCODER = "encoder"
# Of BERT in TensorFlow, which computes GELU by tanh and calls it "gelu".
_OF_TENSORFLOW = {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
}


def read_published(source: str) -> PublishedModel:
    """Reads a model from a folder, or from a checkpoint of TensorFlow."""
    path = pathlib.Path(source) / CONFIG_FILE
    prefix = checkpoint_prefix(source)
    if prefix is not None and not path.exists():
        return _read_tensorflow(source, prefix)
    try:
        config = parse_json(path.read_bytes())
        require_fields(config, {})
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected {CONFIG_FILE} of a published model in {source}, or a checkpoint "
            f"of TensorFlow, got neither ({error}); give the folder of a model"
        ) from error
    kind = config.get("model_type", "bert")
    if kind == MODEL_TYPE:
        bert = config_from_values(config, str(path))
        return assemble(source, bert, config, stored_tensors(source))
    if kind != "bert":
        raise BadInputError(
            f"expected a model of type bert or realm in {path}, got {kind!r:.80}; give "
            "another source"
        )
    return _read_sentence_encoder(source)


def block_embeddings(place: str) -> StoredTensor:
    """Returns the embeddings of blocks in a checkpoint, which are not read yet."""
    prefix = checkpoint_prefix(place)
    tensors = {} if prefix is None else _variables(place, prefix)
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
    if len(matrices) != 1:
        raise BadInputError(
            f"expected a checkpoint with one matrix, the embeddings of the blocks, in "
            f"{place}, got {len(matrices)}; give encoded.ckpt"
        )
    return matrices[0]


def _variables(source: str, prefix: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the variables of a checkpoint, each compared with its checksum."""
    try:
        found = tf_tensors(prefix)
        for tensor in found.values():
            tensor.verify()
    except (OSError, DamagedWeightsError) as error:
        raise BadInputError(
            f"expected a checkpoint of TensorFlow in {source}, but it cannot be read "
            f"({error}); fetch it again"
        ) from error
    return found


def _read_tensorflow(source: str, prefix: pathlib.Path) -> PublishedModel:
    named = as_transformers_names(_variables(source, prefix))
    parts = sorted({name.partition(".")[0] for name in named.tensors})
    if not parts:
        raise BadInputError(
            f"expected the variables of BERT, REALM or ORQA in {source}, got "
            f"{', '.join(named.unused[:3]) or 'none'}; give another checkpoint"
        )
    settings = _bert_config(prefix) or _sizes(named.tensors, parts[0])
    projection = named.tensors.get("embedder.cls.dense.bias")
    if projection is not None:
        settings["retriever_proj_size"] = projection.shape[0]
    settings["architectures"] = ["+".join(parts)]
    config = config_from_values(settings, str(prefix))
    model = assemble(source, config, settings, named.tensors)
    unused = [*model.unused, *named.unused]
    if named.num_of_optimizer:
        unused.append(f"{named.num_of_optimizer} variables of the optimizer")
    model = dataclasses.replace(model, unused=unused)
    if parts != [_ENCODER] or model.reader is None:
        return model
    return dataclasses.replace(
        model,
        towers={SHARED_TOWER: {"bert": model.reader["bert"]}},
        retriever=RetrieverConfig(
            config,
            projection_size=config.hidden_size,
            pooling="mean",
            projected=False,
        ),
        is_bert=True,
    )


def _bert_config(prefix: pathlib.Path) -> dict[str, Any] | None:
    """Returns the settings beside a checkpoint, None if there are none."""
    path = prefix.with_name(BERT_CONFIG_FILE)
    if not path.exists():
        return None
    try:
        values = parse_json(path.read_bytes())
        require_fields(values, {})
    except ValueError as error:
        raise BadInputError(
            f"expected the configuration of a BERT in {path}, got none ({error}); "
            "fetch it again"
        ) from error
    if values.get("hidden_act") == "gelu":
        del values["hidden_act"]
    return {**_OF_TENSORFLOW, **values}


def _sizes(tensors: Mapping[str, StoredTensor], part: str) -> dict[str, Any]:
    prefix = f"{part}.realm."
    layers = {
        name.removeprefix(prefix).split(".")[2]
        for name in tensors
        if name.startswith(f"{prefix}encoder.layer.")
    }
    try:
        words, positions, segments = (
            tensors[f"{prefix}embeddings.{kind}_embeddings.weight"].shape
            for kind in ("word", "position", "token_type")
        )
        mlp = tensors[f"{prefix}encoder.layer.0.intermediate.dense.bias"].shape
    except KeyError as error:
        raise BadInputError(
            f"expected the variables of a whole BERT, but {error} is missing; fetch "
            "the checkpoint again"
        ) from error
    return {
        **_OF_TENSORFLOW,
        "vocab_size": words[0],
        "hidden_size": words[-1],
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, words[-1] // _HEAD_SIZE),
        "intermediate_size": mlp[0],
        "max_position_embeddings": positions[0],
        "type_vocab_size": segments[0],
    }


def _read_sentence_encoder(source: str) -> PublishedModel:
    """Reads a BERT, whose embedding is its mean where nothing says otherwise."""
    encoder = read_sentence_encoder(source)
    reader = load_masked_lm(source, encoder.bert, needs_pooler=False)
    missing = (
        [] if "head_dense" in reader else ["cls.predictions.* (a new one is drawn)"]
    )
    stored = stored_tensors(source)
    if not any(name.removeprefix("bert.").startswith("pooler.") for name in stored):
        missing.append("pooler.dense")
    tower = {"bert": reader["bert"]}
    if encoder.dense:
        tower["dense"] = load_dense(encoder)
    return PublishedModel(
        name="BertForMaskedLM" if "head_dense" in reader else "BertModel",
        bert=encoder.bert,
        retriever=_retriever_of(encoder),
        towers={SHARED_TOWER: tower},
        reader=reader,
        max_length=encoder.max_length,
        unused=unused_of_bert(stored),
        missing=missing,
        is_bert=True,
    )


def _retriever_of(encoder: SentenceEncoder) -> RetrieverConfig:
    query_prefix = document_prefix = ()
    if encoder.query_prompt or encoder.document_prompt:
        file = vocabulary_file(encoder.folder)
        if file is None:
            raise BadInputError(
                f"expected vocab.txt or tokenizer.json in {encoder.folder}, for its "
                "prompts, got neither; fetch all files of the encoder"
            )
        vocabulary = load_vocabulary(file)
        query_prefix = prompt_pieces(encoder.query_prompt, vocabulary)
        document_prefix = prompt_pieces(encoder.document_prompt, vocabulary)
    return RetrieverConfig(
        bert=encoder.bert,
        projection_size=encoder.width,
        pooling=encoder.pooling,
        dense_size=encoder.dense.size if encoder.dense else None,
        dense_activation=encoder.dense.activation if encoder.dense else "identity",
        normalize=encoder.normalize,
        projected=False,
        query_prefix=query_prefix,
        document_prefix=document_prefix,
    )
