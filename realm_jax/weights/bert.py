"""BERT in the names of `transformers`, MiniLM among them.

One table says which tensor is which parameter. PyTorch keeps a dense layer's matrix as
[output, input]; here it is [input, output], split into heads where there are heads, and
the layers are stacked along a leading axis.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Literal

import flax.traverse_util
import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.weights.tensors import read_tensors, weights_file

CONFIG_FILE = "config.json"

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
# Tensors that are no parameters, or of heads that are not read.
_IGNORED = ("embeddings.position_ids", "cls.")

_ACTIVATIONS: dict[str, Literal["gelu_tanh", "gelu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def config_from_json(folder: str | pathlib.Path) -> BertConfig:
    """Reads the size of an encoder from `config.json`.

    Raises:
      BadInputError: the file is missing, or describes another architecture.
    """
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text())
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


def load_bert(folder: str | pathlib.Path, config: BertConfig) -> PyTree:
    """Reads the parameters of `models.bert.Bert` from a checkpoint's folder.

    Args:
      folder: holds the file, see `tensors.py`.
      config: the encoder they are for. A numerical setting that the file's own
        `config.json` has otherwise (its activation) is refused too.

    Returns:
      float32 host arrays.

    Raises:
      BadInputError: the file is missing or damaged, lacks a tensor, has one too many,
        or one of another shape; all of them are named.
    """
    tensors = read_tensors(folder)
    _check_activation(folder, config)
    tensors = {
        name.removeprefix("bert."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(_IGNORED)
        and not name.removeprefix("bert.").startswith(_IGNORED)
    }
    shapes = expected_shapes(config)
    params, problems, used = {}, [], set()
    for name, shape in shapes.items():
        sources = sources_of(name, config.num_layers)
        used |= set(sources)
        missing = [source for source in sources if source not in tensors]
        if missing:
            problems.append(f"{missing[0]} is missing")
            continue
        try:
            params[name] = to_parameter(name, [tensors[s] for s in sources], shape)
        except ValueError:
            problems.append(
                f"{sources[0]} has shape {tensors[sources[0]].shape}, which does not "
                f"make {name} {shape}"
            )
    problems += [f"{name} is not known" for name in sorted(set(tensors) - used)]
    if problems:
        raise BadInputError(
            f"expected the weights of a BERT of {config.num_layers} layers of "
            f"{config.hidden_size} with {config.vocab_size} wordpieces in "
            f"{weights_file(folder)}, but {'; '.join(problems[:5])} ({len(problems)} "
            "in all); use the model file "
            "that fits these weights, and their vocabulary for the corpus"
        )
    return flax.traverse_util.unflatten_dict(params, sep="/")


def save_bert(path: str | pathlib.Path, params: PyTree, config: BertConfig) -> None:
    """Writes parameters as a safetensors file that `transformers` reads."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tensors = {}
    for name, value in flat.items():
        sources = sources_of(name, config.num_layers)
        values = list(np.asarray(value)) if name.startswith("layers/") else [value]
        for source, one in zip(sources, values, strict=True):
            tensors[source] = _from_parameter(name, np.asarray(one, np.float32))
    safetensors.numpy.save_file(tensors, path)


def _check_activation(folder: str | pathlib.Path, config: BertConfig) -> None:
    if not (pathlib.Path(folder) / CONFIG_FILE).exists():
        return
    found = config_from_json(folder).activation
    if found != config.activation:
        raise BadInputError(
            f"expected weights trained with activation {config.activation!r} in "
            f"{folder}, got {found!r}; set bert.BertConfig.activation to it"
        )


def expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of `Bert`, by its path."""
    ids = jax.ShapeDtypeStruct((1, 2), np.int32)
    variables = jax.eval_shape(Bert(config).init, jax.random.key(0), ids, ids)
    flat = flax.traverse_util.flatten_dict(variables["params"], sep="/")
    return {name: value.shape for name, value in flat.items()}


def sources_of(name: str, num_layers: int) -> list[str]:
    """The tensors a parameter is made of: one, or one a layer."""
    if not name.startswith("layers/"):
        return [_NAMES[name]]
    module, _, kind = name.removeprefix("layers/").rpartition("/")
    leaf = {"kernel": "weight", "scale": "weight", "bias": "bias"}[kind]
    return [
        f"encoder.layer.{layer}.{_LAYER_NAMES[module]}.{leaf}"
        for layer in range(num_layers)
    ]


def to_parameter(
    name: str, tensors: list[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """Transposes matrices, splits heads, stacks layers; ValueError if it won't fit."""
    turn: Callable[[np.ndarray], np.ndarray] = (
        np.transpose if name.endswith("kernel") else np.asarray
    )
    rows = [turn(tensor).astype(np.float32) for tensor in tensors]
    stacked = np.stack(rows) if name.startswith("layers/") else rows[0]
    if not _same_but_for_heads(stacked.shape, shape):
        raise ValueError(name)
    return stacked.reshape(shape)


def _same_but_for_heads(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether `wanted` is `found` with at most one axis split in two."""
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
