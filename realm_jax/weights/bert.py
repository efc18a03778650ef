"""Reads and writes BERT weights, MiniLM's included, in the layout of `transformers`.

A table maps parameters to tensors. PyTorch stores a dense layer's matrix as [output,
input]; here it is [input, output], split into heads in attention, and the layers are
stacked along a leading axis.

BERT's masked-LM head (`cls.predictions`) is the head of `models.knowledge_encoder`. Its
output matrix is tied to the word embeddings in both layouts; a file may repeat it.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

import flax.traverse_util
import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.models.bert import PAD_ID, Bert, BertConfig
from realm_jax.weights.tensors import Tensor, read_tensors, weights_file

CONFIG_FILE = "config.json"
METADATA = {"format": "pt"}
"""Of a safetensors file that `transformers` and sentence-transformers accept."""

# Parameter -> tensor; {layer} is filled with the number of each layer.
_NAMES = {
    "token_embedding/embedding": "embeddings.word_embeddings.weight",
    "position_embedding/embedding": "embeddings.position_embeddings.weight",
    "segment_embedding/embedding": "embeddings.token_type_embeddings.weight",
    "embedding_norm/scale": "embeddings.LayerNorm.weight",
    "embedding_norm/bias": "embeddings.LayerNorm.bias",
    "pooler/kernel": "pooler.dense.weight",
    "pooler/bias": "pooler.dense.bias",
}
_LAYER_NAMES = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_input": "intermediate.dense",
    "mlp_output": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_HEAD = "cls.predictions."
HEAD_NAMES = {
    "head_dense/kernel": f"{_HEAD}transform.dense.weight",
    "head_dense/bias": f"{_HEAD}transform.dense.bias",
    "head_norm/scale": f"{_HEAD}transform.LayerNorm.weight",
    "head_norm/bias": f"{_HEAD}transform.LayerNorm.bias",
    "head_bias": f"{_HEAD}bias",
}
# Repetitions in a file: tensor -> the tensor it must equal.
_TIED = {
    f"{_HEAD}decoder.weight": "embeddings.word_embeddings.weight",
    f"{_HEAD}decoder.bias": f"{_HEAD}bias",
}
# Tensors that are not parameters of the encoder.
_IGNORED = ("embeddings.position_ids", "cls.")

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
    """Reads the configuration of an encoder from `config.json`.

    Raises:
      BadInputError: the file is missing, or describes another architecture.
    """
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        values = parse_json(path.read_bytes())
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
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"expected the configuration of a BERT in {path}, got none ({error!r}); "
            "give a folder with config.json and model.safetensors"
        ) from error


def save_config(folder: str | pathlib.Path, config: BertConfig) -> None:
    """Writes `config.json` of a BertModel, which `config_from_json` reads."""
    values = {
        "model_type": "bert",
        "architectures": ["BertModel"],
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
    path = pathlib.Path(folder) / CONFIG_FILE
    path.write_text(json.dumps(values, indent=2) + "\n")


def load_bert(
    folder: str | pathlib.Path, config: BertConfig, *, needs_pooler: bool = True
) -> PyTree:
    """Reads the parameters of `models.bert.Bert` from a checkpoint's folder.

    Args:
      folder: folder of the weights, see `tensors.py`.
      config: the encoder that the parameters are for. Settings that shapes do not
        reveal (`_UNSEEN`) must agree with the folder's `config.json`, if it has one.
      needs_pooler: whether a file without the pooler is refused; `transformers` writes
        none with a BertForMaskedLM.

    Returns:
      float32 host arrays; without "pooler" if the file has none.

    Raises:
      BadInputError: the file is missing or damaged, lacks a tensor, has an unknown one,
        or one of another shape (the message names the first five of these); or
        `config.json` has another setting.
    """
    return _encoder_params(folder, _read(folder), config, needs_pooler)


def load_masked_lm(
    folder: str | pathlib.Path, config: BertConfig, *, needs_pooler: bool = True
) -> PyTree:
    """Reads the parameters of `models.knowledge_encoder.KnowledgeEncoder`.

    Args:
      folder: as in `load_bert`.
      config: as in `load_bert`.
      needs_pooler: as in `load_bert`; a masked LM itself does not use it.

    Returns:
      float32 host arrays: "bert", and unless the file has no masked-LM head at all,
      "head_dense", "head_norm" and "head_bias".

    Raises:
      BadInputError: as in `load_bert`, for encoder and head; or the file's output
        matrix differs from its word embeddings.
    """
    tensors = _read(folder)
    params = {"bert": _encoder_params(folder, tensors, config, needs_pooler)}
    if any(name.startswith(_HEAD) for name in tensors):
        params |= _head_params(folder, tensors, config)
    return params


def save_bert(path: str | pathlib.Path, params: PyTree, config: BertConfig) -> None:
    """Writes parameters as a safetensors file that `transformers` reads."""
    safetensors.numpy.save_file(_encoder_tensors(params, config), path, METADATA)


def save_masked_lm(
    path: str | pathlib.Path, params: PyTree, config: BertConfig
) -> None:
    """Writes a knowledge encoder with the tensor names of a BertForPreTraining."""
    encoder = _encoder_tensors(params["bert"], config)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    head = {
        source: _from_parameter(name, np.asarray(flat[name], np.float32))
        for name, source in HEAD_NAMES.items()
    }
    tensors = {f"bert.{name}": tensor for name, tensor in encoder.items()}
    safetensors.numpy.save_file(tensors | head, path, METADATA)


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
    shapes = expected_shapes(config)
    if not needs_pooler and not any(name.startswith("pooler.") for name in tensors):
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not name.startswith("pooler/")
        }
    sources = {name: sources_of(name, config.num_layers) for name in shapes}
    flat, problems = flat_parameters(tensors, sources, shapes)
    used = {source for names in sources.values() for source in names}
    problems += [f"{name} is not known" for name in sorted(set(tensors) - used)]
    if problems:
        raise BadInputError(
            f"expected the weights of a BERT of {config.num_layers} layers of "
            f"{config.hidden_size} with {config.vocab_size} wordpieces in "
            f"{weights_file(folder)}, but {'; '.join(problems[:5])} ({len(problems)} "
            "in all); use the model file "
            "that fits these weights, and their vocabulary for the corpus"
        )
    _check_unseen(folder, config)
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def _head_params(
    folder: str | pathlib.Path, tensors: dict[str, np.ndarray], config: BertConfig
) -> PyTree:
    sources = {name: [source] for name, source in HEAD_NAMES.items()}
    flat, problems = flat_parameters(tensors, sources, head_shapes(config))
    problems += untied(tensors, _TIED)
    if problems:
        raise BadInputError(
            f"expected BERT's masked-LM head, tied to its word embeddings, in "
            f"{weights_file(folder)}, but {'; '.join(problems)}; give weights with the "
            "whole head, or with nothing of cls.predictions for a new one"
        )
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def flat_parameters(
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the parameters that could be made, and the problems with the others.

    Args:
      tensors: the tensors by name.
      sources: names of the tensors of each parameter, see `sources_of`.
      shapes: shapes of parameters, of which those in `sources` are made.
    """
    params, problems = {}, []
    for name, names in sources.items():
        missing = [source for source in names if source not in tensors]
        if missing:
            problems.append(f"{missing[0]} is missing")
            continue
        found = [tensors[source] for source in names]
        try:
            params[name] = to_parameter(name, found, shapes[name])
        except ValueError:
            problems.append(
                f"{names[0]} has shape {found[0].shape}, which does not make "
                f"{name} {shapes[name]}"
            )
    return params, problems


def head_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the masked-LM head's parameters."""
    size = (config.hidden_size,)
    shapes = dict.fromkeys(HEAD_NAMES, size)
    return shapes | {"head_dense/kernel": size * 2, "head_bias": (config.vocab_size,)}


def tied_names(prefix: str, of_bert: str) -> dict[str, str]:
    """Returns the repetitions of a masked LM by name, with what each must equal."""
    return {
        prefix + name: prefix + (other if other.startswith(_HEAD) else of_bert + other)
        for name, other in _TIED.items()
    }


def untied(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> list[str]:
    """Describes the repetitions that are none."""
    return [
        f"{name} is not {other}"
        for name, other in tied.items()
        if name in tensors and not np.array_equal(tensors[name], tensors.get(other, 0))
    ]


def _encoder_tensors(params: PyTree, config: BertConfig) -> dict[str, np.ndarray]:
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tensors = {}
    for name, value in flat.items():
        sources = sources_of(name, config.num_layers)
        values = list(np.asarray(value)) if name.startswith("layers/") else [value]
        for source, one in zip(sources, values, strict=True):
            tensors[source] = _from_parameter(name, np.asarray(one, np.float32))
    return tensors


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


def expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of `Bert` by its path."""
    ids = jax.ShapeDtypeStruct((1, 2), np.int32)
    variables = jax.eval_shape(Bert(config).init, jax.random.key(0), ids, ids)
    flat = flax.traverse_util.flatten_dict(variables["params"], sep="/")
    return {name: value.shape for name, value in flat.items()}


def sources_of(name: str, num_layers: int) -> list[str]:
    """Returns the names of the tensors of a parameter: one, or one for each layer."""
    if not name.startswith("layers/"):
        return [_NAMES[name]]
    module, _, kind = name.removeprefix("layers/").rpartition("/")
    leaf = {"kernel": "weight", "scale": "weight", "bias": "bias"}[kind]
    return [
        f"encoder.layer.{layer}.{_LAYER_NAMES[module]}.{leaf}"
        for layer in range(num_layers)
    ]


def to_parameter(
    name: str, tensors: Sequence[Tensor], shape: tuple[int, ...]
) -> np.ndarray:
    """Transposes matrices, splits heads and stacks layers.

    Raises:
      ValueError: the tensors do not make a parameter of this shape.
    """
    is_matrix, in_layers = name.endswith("kernel"), name.rpartition("layers/")[1]
    found = {tensor.shape[::-1] if is_matrix else tensor.shape for tensor in tensors}
    stacked = {(len(tensors), *one) if in_layers else one for one in found}
    # Before anything is read.
    if len(stacked) != 1 or not _same_but_for_heads(stacked.pop(), shape):
        raise ValueError(name)
    rows = [np.asarray(tensor).astype(np.float32) for tensor in tensors]
    rows = [row.T for row in rows] if is_matrix else rows
    return np.stack(rows).reshape(shape) if in_layers else rows[0].reshape(shape)


def _same_but_for_heads(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Returns whether `wanted` is `found` with at most one axis split in two."""
    if len(found) == len(wanted):
        return found == wanted
    return any(
        found == (*wanted[:i], wanted[i] * wanted[i + 1], *wanted[i + 2 :])
        for i in range(len(wanted) - 1)
    )


def _from_parameter(name: str, value: np.ndarray) -> np.ndarray:
    """Inverts `to_parameter` for one layer."""
    module = name.rpartition("/")[0]
    if module.endswith(("attention/query", "attention/key", "attention/value")):
        value = value.reshape(value.shape[0], -1) if value.ndim == 3 else value.ravel()
    elif module.endswith("attention/output") and value.ndim == 3:
        value = value.reshape(-1, value.shape[-1])
    if name.endswith("kernel"):
        value = value.T
    return np.ascontiguousarray(value)
