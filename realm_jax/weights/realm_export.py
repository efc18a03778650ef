"""Writes models of the REALM family with the names of `transformers`.

The inverse of `realm.py`. The temperature, which has no setting there, is folded into
the projection's LayerNorm, which leaves embeddings and scores as they are.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.weights import bert
from realm_jax.weights.bert_tensors import encoder_tensors, from_parameter
from realm_jax.weights.realm import (
    BERT_PREFIX,
    BLOCK_EMBEDDINGS,
    EXTRA_NAMES,
    MODEL_TYPE,
    PARTS,
    Reading,
)
from realm_jax.weights.tensors import SAFETENSORS_FILE

_NUM_BLOCKS = "num_block_records"
_NORM = ("projection_norm/scale", "projection_norm/bias")


def save_realm(
    folder: pathlib.Path,
    name: str,
    parts: Mapping[str, PyTree],
    config: RetrieverConfig,
    vocabulary: WordPiece,
    *,
    reading: Reading | None = None,
    block_embeddings: np.ndarray | None = None,
) -> None:
    """Writes a model that `from_pretrained` of its class reads, into an empty folder.

    `name` is its class, and `parts` are the parameters of each of its parts, as
    `realm.PARTS` names them. `reading` says how a span reader is used; the embeddings
    are those of the blocks of a RealmForOpenQA.
    """
    tensors = {}
    for part, prefix in PARTS[name].items():
        tensors |= _tensors(part, prefix, parts[part], config)
    settings = _settings(name, config, reading)
    if block_embeddings is not None:
        tensors[BLOCK_EMBEDDINGS] = np.ascontiguousarray(block_embeddings, np.float32)
        settings[_NUM_BLOCKS] = len(block_embeddings)
    safetensors.numpy.save_file(tensors, folder / SAFETENSORS_FILE, bert.METADATA)
    bert.write_json(folder / bert.CONFIG_FILE, settings)
    save_tokenizer(folder, vocabulary, "RealmTokenizer")


def save_tokenizer(folder: pathlib.Path, vocabulary: WordPiece, name: str) -> None:
    """Writes the vocabulary and the settings of a tokenizer class of `transformers`."""
    vocabulary.save(folder / "vocab.txt")
    settings = {
        "tokenizer_class": name,
        "do_lower_case": vocabulary.lowercase,
        "strip_accents": vocabulary.strip_accents,
        "tokenize_chinese_chars": vocabulary.tokenize_chinese_chars,
    }
    bert.write_json(folder / "tokenizer_config.json", settings)


def require_realm(config: RetrieverConfig, place: str) -> None:
    """Requires towers that the family has: BERT's pooler, projection and LayerNorm."""
    plain = RetrieverConfig(
        bert=config.bert,
        projection_size=config.projection_size,
        layer_norm_epsilon=config.bert.layer_norm_epsilon,
    )
    for name, value in plain.recorded().items():
        found = config.recorded()[name]
        if name not in ("shared", "temperature", "projection_dropout") and (
            found != value
        ):
            raise BadInputError(
                f"expected towers with {name} {value!r} in {place}, as all REALM "
                f"models of transformers have, got {found!r}; export them for "
                "sentence-transformers"
            )


def _tensors(
    part: str, prefix: str, params: PyTree, config: RetrieverConfig
) -> dict[str, np.ndarray]:
    encoder = encoder_tensors(params["bert"], config.bert)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    found = {f"{prefix}{BERT_PREFIX}{name}": value for name, value in encoder.items()}
    for name, source in EXTRA_NAMES[part].items():
        value = np.asarray(flat[name], np.float32)
        if name in _NORM and config.temperature != 1.0:
            value = value * np.float32(config.temperature**-0.5)
        found[prefix + source] = from_parameter(name, value)
    return found


def _settings(
    name: str, config: RetrieverConfig, reading: Reading | None
) -> dict[str, Any]:
    settings = bert.config_values(config.bert) | {
        "model_type": MODEL_TYPE,
        "architectures": [name],
        "retriever_proj_size": config.projection_size,
    }
    if reading is None:
        return settings
    return settings | {
        "max_span_width": reading.max_span,
        "reader_layer_norm_eps": reading.layer_norm_epsilon,
        "reader_beam_size": reading.num_read,
        "reader_seq_len": reading.length,
        # `transformers` allocates as many rows.
        _NUM_BLOCKS: 0,
    }
