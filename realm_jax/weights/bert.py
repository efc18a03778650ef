"""Reads and writes BERT weights, MiniLM's included, in the layout of `transformers`.

`bert_tensors.py` has the tables of names.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

import flax.traverse_util
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.models.bert import PAD_ID, BertConfig
from realm_jax.weights.bert_tensors import (
    HEAD,
    HEAD_NAMES,
    POSITION_IDS,
    TIED,
    encoder_parameters,
    encoder_tensors,
    flat_parameters,
    from_parameter,
    head_shapes,
    require_bert,
    untied,
)
from realm_jax.weights.tensors import read_tensors, weights_file

CONFIG_FILE = "config.json"
METADATA = {"format": "pt"}
"""Of a safetensors file that `transformers` and sentence-transformers accept."""

# Tensors that are not parameters of the encoder.
_IGNORED = (POSITION_IDS, "cls.")

_ACTIVATIONS: dict[str, Literal["gelu_tanh", "gelu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# As `transformers` names the activation that `_ACTIVATIONS` has several names for.
_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_CONFIG_FIELDS = {
    "vocab_size": int,
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "type_vocab_size": int,
    "hidden_act": str,
    "layer_norm_eps": int | float,
}
# Of any of these, and beyond all models; shapes are kept as 64-bit numbers.
_LARGEST_SIZE = 1 << 31

# Settings that the shapes of the parameters do not reveal.
_UNSEEN = ("activation", "num_heads", "layer_norm_epsilon")


def config_from_json(folder: str | pathlib.Path) -> BertConfig:
    """Reads the configuration of an encoder from `config.json`."""
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _no_config(str(path), error) from error
    return config_from_values(values, str(path))


def config_from_values(values: Any, place: str) -> BertConfig:
    """Returns the configuration that the fields of a `config.json` describe."""
    try:
        require_fields(values, _CONFIG_FIELDS)
        for name, kind in _CONFIG_FIELDS.items():
            if kind is int and not 0 < values[name] <= _LARGEST_SIZE:
                raise ValueError(f"its {name!r} is {values[name]}")
        return BertConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            mlp_size=values["intermediate_size"],
            max_positions=values["max_position_embeddings"],
            num_segments=values["type_vocab_size"],
            activation=_ACTIVATIONS[values["hidden_act"]],
            layer_norm_epsilon=values["layer_norm_eps"],
        )
    except (ValueError, KeyError) as error:
        raise _no_config(place, error) from error


def _no_config(place: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"expected the configuration of a BERT in {place}, got none ({error!r}); "
        "give a folder with config.json and model.safetensors"
    )


def save_config(
    folder: str | pathlib.Path, config: BertConfig, name: str = "BertModel"
) -> None:
    """Writes `config.json` of a class of BERT, which `config_from_json` reads."""
    values = {"model_type": "bert", "architectures": [name], **config_values(config)}
    write_json(pathlib.Path(folder) / CONFIG_FILE, values)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a file of settings as `transformers` does."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def config_values(config: BertConfig) -> dict[str, Any]:
    """Returns the fields of `config.json` that describe BERT's encoder."""
    require_bert(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.num_segments,
        "hidden_act": _ACTIVATION_NAMES[config.activation],
        "layer_norm_eps": config.layer_norm_epsilon,
        "pad_token_id": PAD_ID,
    }


def load_bert(
    folder: str | pathlib.Path, config: BertConfig, *, needs_pooler: bool = True
) -> PyTree:
    """Reads the parameters of `models.bert.Bert` from a checkpoint's folder.

    Settings of `config` that shapes do not reveal (`_UNSEEN`) must agree with the
    folder's `config.json`, if it has one. A file without the pooler, as `transformers`
    writes for a BertForMaskedLM, is refused if `needs_pooler`, and else gets zeros.

    Returns float32 host arrays.
    """
    return _encoder_params(folder, _read(folder), config, needs_pooler)


def load_masked_lm(
    folder: str | pathlib.Path, config: BertConfig, *, needs_pooler: bool = True
) -> PyTree:
    """Reads the parameters of `models.knowledge_encoder.KnowledgeEncoder`.

    See `load_bert`; a masked LM itself does not use the pooler. Returns float32 host
    arrays: "bert", and unless the file has no masked-LM head at all, "head_dense",
    "head_norm" and "head_bias".
    """
    tensors = _read(folder)
    params = {"bert": _encoder_params(folder, tensors, config, needs_pooler)}
    if any(name.startswith(HEAD) for name in tensors):
        params |= _head_params(folder, tensors, config)
    return params


def save_bert(path: str | pathlib.Path, params: PyTree, config: BertConfig) -> None:
    """Writes parameters as a safetensors file that `transformers` reads."""
    safetensors.numpy.save_file(encoder_tensors(params, config), path, METADATA)


def save_masked_lm(
    path: str | pathlib.Path, params: PyTree, config: BertConfig
) -> None:
    """Writes a knowledge encoder with the tensor names of a BertForPreTraining."""
    encoder = encoder_tensors(params["bert"], config)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    head = {
        source: from_parameter(name, np.asarray(flat[name], np.float32))
        for name, source in HEAD_NAMES.items()
    }
    tensors = {f"bert.{name}": tensor for name, tensor in encoder.items()}
    safetensors.numpy.save_file(tensors | head, path, METADATA)


def unused_of_bert(names: Iterable[str]) -> list[str]:
    """Returns the tensors of a BERT's file that `load_masked_lm` passes over."""
    head = {*HEAD_NAMES.values(), *TIED}
    return sorted(
        name
        for name in names
        if (bare := name.removeprefix("bert.")).startswith(_IGNORED)
        and bare not in head
    )


def _read(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    tensors = read_tensors(folder)
    return {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}


def _encoder_params(
    folder: str | pathlib.Path,
    tensors: dict[str, np.ndarray],
    config: BertConfig,
    needs_pooler: bool,
) -> PyTree:
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_IGNORED)
    }
    params, problems = encoder_parameters(tensors, config, needs_pooler=needs_pooler)
    if problems:
        raise BadInputError(
            f"expected the weights of a BERT of {config.num_layers} layers of "
            f"{config.hidden_size} with {config.vocab_size} wordpieces in "
            f"{weights_file(folder)}, but {'; '.join(problems[:5])} ({len(problems)} "
            "in all); use the model file "
            "that fits these weights, and their vocabulary for the corpus"
        )
    _check_unseen(folder, config)
    return params


def _head_params(
    folder: str | pathlib.Path, tensors: dict[str, np.ndarray], config: BertConfig
) -> PyTree:
    sources = {name: [source] for name, source in HEAD_NAMES.items()}
    flat, problems = flat_parameters(tensors, sources, head_shapes(config))
    problems += untied(tensors, TIED)
    if problems:
        raise BadInputError(
            f"expected BERT's masked-LM head, tied to its word embeddings, in "
            f"{weights_file(folder)}, but {'; '.join(problems)}; give weights with the "
            "whole head, or with nothing of cls.predictions for a new one"
        )
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def _check_unseen(folder: str | pathlib.Path, config: BertConfig) -> None:
    if not (pathlib.Path(folder) / CONFIG_FILE).exists():
        return
    theirs = config_from_json(folder)
    for name in _UNSEEN:
        expected, found = getattr(config, name), getattr(theirs, name)
        if expected != found:
            value = f"'\"{found}\"'" if isinstance(found, str) else found
            raise BadInputError(
                f"expected weights trained with {name} {expected!r} in {folder}, got "
                f"{found!r}; set --gin.bert.BertConfig.{name}={value}"
            )
