"""Maps the parameters of BERT to the tensors of `transformers`, by tables.

PyTorch stores a dense layer's matrix as [output, input]; here it is [input, output],
split into heads in attention, and the layers are stacked along a leading axis.

BERT's masked-LM head (`cls.predictions`) is the head of `models.knowledge_encoder`. Its
output matrix is tied to the word embeddings in both layouts; a file may repeat it.
"""

from collections.abc import Mapping, Sequence

import flax.traverse_util
import jax
import numpy as np
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.weights.tensors import Tensor

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
# In older files, and no parameter.
POSITION_IDS = "embeddings.position_ids"
HEAD = "cls.predictions."
HEAD_NAMES = {
    "head_dense/kernel": f"{HEAD}transform.dense.weight",
    "head_dense/bias": f"{HEAD}transform.dense.bias",
    "head_norm/scale": f"{HEAD}transform.LayerNorm.weight",
    "head_norm/bias": f"{HEAD}transform.LayerNorm.bias",
    "head_bias": f"{HEAD}bias",
}
# Repetitions in a file: tensor -> the tensor it must equal.
TIED = {
    f"{HEAD}decoder.weight": "embeddings.word_embeddings.weight",
    f"{HEAD}decoder.bias": f"{HEAD}bias",
}


def flat_parameters(
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the parameters that could be made, and the problems with the others.

    `sources` has the names of the tensors of each parameter, see `sources_of`; `shapes`
    may have those of others, too.
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


def encoder_parameters(
    tensors: Mapping[str, Tensor], config: BertConfig, *, needs_pooler: bool
) -> tuple[PyTree, list[str]]:
    """Returns the parameters of BERT's encoder, and the problems with its tensors.

    The tensors have the names of a BertModel. Unless it `needs_pooler`, the pooler of
    an encoder that has none is zero: no model that takes such an encoder reads it.
    """
    shapes = expected_shapes(config)
    sources = {name: sources_of(name, config.num_layers) for name in shapes}
    known = {POSITION_IDS}.union(*sources.values())
    absent = []
    if not needs_pooler and not any(name.startswith("pooler.") for name in tensors):
        absent = [name for name in shapes if name.startswith("pooler/")]
    wanted = {name: found for name, found in sources.items() if name not in absent}
    flat, problems = flat_parameters(tensors, wanted, shapes)
    flat |= {name: np.zeros(shapes[name], np.float32) for name in absent}
    problems += [f"{name} is not known" for name in sorted(set(tensors) - known)]
    return flax.traverse_util.unflatten_dict(flat, sep="/"), problems


def head_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the masked-LM head's parameters."""
    size = (config.hidden_size,)
    shapes = dict.fromkeys(HEAD_NAMES, size)
    return shapes | {"head_dense/kernel": size * 2, "head_bias": (config.vocab_size,)}


def tied_names(prefix: str, of_bert: str) -> dict[str, str]:
    """Returns the repetitions of a masked LM by name, with what each must equal."""
    return {
        prefix + name: prefix + (other if other.startswith(HEAD) else of_bert + other)
        for name, other in TIED.items()
    }


def untied(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> list[str]:
    """Describes the repetitions that are none."""
    return [
        f"{name} is not {other}"
        for name, other in tied.items()
        if name in tensors and not np.array_equal(tensors[name], tensors.get(other, 0))
    ]


def require_bert(config: BertConfig) -> None:
    """Requires the encoder that published weights are for."""
    if type(config) is not BertConfig:
        raise BadInputError(
            "expected BERT's encoder, which published weights are for, got that of "
            f"{type(config).__qualname__}; start without weights or from a stage that "
            "trained it, and use what was trained with realm_jax.load"
        )


def encoder_tensors(params: PyTree, config: BertConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of BERT's encoder, by the names of a BertModel."""
    require_bert(config)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tensors = {}
    for name, value in flat.items():
        sources = sources_of(name, config.num_layers)
        values = list(np.asarray(value)) if name.startswith("layers/") else [value]
        for source, one in zip(sources, values, strict=True):
            tensors[source] = from_parameter(name, np.asarray(one, np.float32))
    return tensors


def expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of BERT's encoder by its path."""
    require_bert(config)
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


def from_parameter(name: str, value: np.ndarray) -> np.ndarray:
    """Returns the tensor of a parameter, of one layer; inverts `to_parameter`."""
    module = name.rpartition("/")[0]
    if module.endswith(("attention/query", "attention/key", "attention/value")):
        value = value.reshape(value.shape[0], -1) if value.ndim == 3 else value.ravel()
    elif module.endswith("attention/output") and value.ndim == 3:
        value = value.reshape(-1, value.shape[-1])
    if name.endswith("kernel"):
        value = value.T
    return np.ascontiguousarray(value)
