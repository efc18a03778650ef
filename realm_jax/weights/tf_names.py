"""Names of variables of TensorFlow checkpoints as those of `transformers`.

Three layouts are known: BERT as published in 2018 (TF1), the published REALM and ORQA
modules, which have that BERT in TF-Hub modules within modules, and BERT of TensorFlow's
model garden (TF2), whose names are paths of Python objects. Each has a table.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from realm_jax.weights.stored import StoredTensor

_OPTIMIZER = re.compile(
    r"(^|/)(adam_[mv]|AdamWeightDecayOptimizer\w*|global_step|save_counter|optimizer)(/|$)"
)
_MODULES = re.compile(r"^(?:module(?:_\d+)?/)+")
_LAYER = re.compile(r"/layer_(\d+)/")

_LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "output_bias": "bias",
    "word_embeddings": "word_embeddings.weight",
    "position_embeddings": "position_embeddings.weight",
    "token_type_embeddings": "token_type_embeddings.weight",
}

# What follows the modules: TF's name -> that of `transformers`. The first part decides.
_EMBEDDER = {
    "bert": "embedder.realm",
    "cls": "embedder.cls",
    "dense": "embedder.cls.dense",
    "LayerNorm": "embedder.cls.LayerNorm",
}
_ENCODER = {"bert": "encoder.realm", "cls": "encoder.cls"}
_READER = {
    "bert": "reader.realm",
    "cls": "reader.cls",
    "dense": "reader.qa_outputs.dense_intermediate",
    "dense_1": "reader.qa_outputs.dense_output",
    "layer_normalization": "reader.qa_outputs.layer_normalization",
}
_OF_READERS = "reader"
_PROJECTION = ("dense/", "LayerNorm/")

# Of the model garden: numbers of `layer_with_weights` before the encoder's layers.
_TF2_LAYER = re.compile(r"^(?:model/)?layer_with_weights-(\d+)/(.+)/\.ATTRIBUTES/")
_TF2_EMBEDDINGS = {
    0: "embeddings.word_embeddings",
    1: "embeddings.position_embeddings",
    2: "embeddings.token_type_embeddings",
    3: "embeddings.LayerNorm",
}
_TF2_MODULES = {
    "_attention_layer/_query_dense": "attention.self.query",
    "_attention_layer/_key_dense": "attention.self.key",
    "_attention_layer/_value_dense": "attention.self.value",
    "_attention_layer/_output_dense": "attention.output.dense",
    "_attention_output_dense": "attention.output.dense",
    "_attention_layer_norm": "attention.output.LayerNorm",
    "_intermediate_dense": "intermediate.dense",
    "_output_dense": "output.dense",
    "_output_layer_norm": "output.LayerNorm",
}


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """The variables of a checkpoint with the names of `transformers`.

    Attributes:
      tensors: those of the model, matrices as [output, input].
      unused: variables of other names, but for the optimizer's.
      num_of_optimizer: number of variables of the optimizer.
    """

    tensors: Mapping[str, StoredTensor]
    unused: list[str]
    num_of_optimizer: int


def renamed(variables: Mapping[str, StoredTensor]) -> NamedTensors:
    """Renames the variables of a checkpoint.

    The names begin with `embedder.`, `encoder.` or `reader.`, after the part of REALM
    that they are of; BERT is the `encoder.`.
    """
    kept = {n: v for n, v in variables.items() if not _OPTIMIZER.search(n)}
    pairs = dict(_tf2_names(kept)) or dict(_tf1_names(kept))
    tensors = {}
    for name, new in pairs.items():
        tensors[new] = _turned(kept[name]) if "kernel" in name else kept[name]
    return NamedTensors(
        tensors, sorted(set(kept) - set(pairs)), len(variables) - len(kept)
    )


def _tf1_names(variables: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """Yields each name that is known and its new one."""
    bare = {name: _MODULES.sub("", name) for name in variables}
    of_model = {n: b for n, b in bare.items() if not b.startswith(f"{_OF_READERS}/")}
    # A checkpoint of pre-training has the encoder outside of all modules.
    within = {name for name, rest in of_model.items() if name != rest}
    has_own = any(of_model[name].startswith("bert/") for name in within)
    has_projection = any(rest.startswith("dense/") for rest in of_model.values())
    for name, rest in bare.items():
        if name not in of_model:
            table, rest = (
                _READER,
                _MODULES.sub("", rest.removeprefix(f"{_OF_READERS}/")),
            )
        elif rest.startswith(_PROJECTION) or (
            has_projection and (name in within or not has_own)
        ):
            table = _EMBEDDER
        else:
            table = _ENCODER
        first, _, last = rest.partition("/")
        path, _, leaf = _LAYER.sub(r"/layer/\1/", f"/{last}").rpartition("/")
        if first == "cls" and not path.startswith("/predictions"):
            continue  # BERT's head for the next sentence.
        if first in table and leaf in _LEAVES:
            yield name, f"{table[first]}{path.replace('/', '.')}.{_LEAVES[leaf]}"


def _tf2_names(variables: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    found = {name: _TF2_LAYER.match(name) for name in variables}
    matches = {name: match for name, match in found.items() if match}
    last = max((int(match[1]) for match in matches.values()), default=0)
    for name, match in matches.items():
        number, (path, _, leaf) = int(match[1]), match[2].rpartition("/")
        if number in _TF2_EMBEDDINGS:
            module = _TF2_EMBEDDINGS[number]
        elif number == last and not path:
            module = "pooler.dense"
        elif path in _TF2_MODULES:
            module = (
                f"encoder.layer.{number - len(_TF2_EMBEDDINGS)}.{_TF2_MODULES[path]}"
            )
        else:
            continue
        kind = "weight" if leaf == "embeddings" else _LEAVES.get(leaf)
        if kind:
            yield name, f"encoder.realm.{module}.{kind}"


def _turned(matrix: StoredTensor) -> StoredTensor:
    """Returns a matrix as [output, input]; heads of attention are one axis."""
    shape = matrix.shape
    if len(shape) == 3:
        # Of the model garden: [input, head, size], or [head, size, output].
        heads_first = shape[0] * shape[1] <= shape[2]
        shape = (
            (math.prod(shape[:2]), shape[2])
            if heads_first
            else (shape[0], math.prod(shape[1:]))
        )
    if len(shape) != 2:
        return matrix
    return dataclasses.replace(matrix, shape=shape[::-1], strides=(1, shape[1]))
