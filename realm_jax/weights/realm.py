"""Reads models of the REALM family of `transformers`, by tables of their names.

A model is made of parts: BERT under `realm.`, and a projection, a masked-LM head or a
span scorer. `PARTS` says where in a model each part is, and the other tables which of
its tensors are which parameters; those of BERT itself are in `bert_tensors.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.manifests import require_fields
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import DOCUMENT_TOWER, QUERY_TOWER, RetrieverConfig
from realm_jax.models.span_reader import SPAN_SCORER_SIZE
from realm_jax.weights import bert_tensors
from realm_jax.weights.stored import StoredTensor
from realm_jax.weights.tensors import Tensor

MODEL_TYPE = "realm"
BLOCK_EMBEDDINGS = "block_emb"
READER = "reader"
SHARED_TOWER = "tower"

BERT_PREFIX = "realm."
_PROJECTION_NAMES = {
    "projection/kernel": "cls.dense.weight",
    "projection/bias": "cls.dense.bias",
    "projection_norm/scale": "cls.LayerNorm.weight",
    "projection_norm/bias": "cls.LayerNorm.bias",
}
_SCORER_NAMES = {
    "span_dense/kernel": "qa_outputs.dense_intermediate.weight",
    "span_dense/bias": "qa_outputs.dense_intermediate.bias",
    "span_norm/scale": "qa_outputs.layer_normalization.weight",
    "span_norm/bias": "qa_outputs.layer_normalization.bias",
    "span_output/kernel": "qa_outputs.dense_output.weight",
    "span_output/bias": "qa_outputs.dense_output.bias",
}
_POOLER = "bert/pooler/"

# Class -> its parts -> where their names begin. "tower" is one tower for both.
PARTS: Mapping[str, Mapping[str, str]] = {
    "RealmEmbedder": {SHARED_TOWER: ""},
    "RealmScorer": {DOCUMENT_TOWER: "embedder.", QUERY_TOWER: "query_embedder."},
    "RealmKnowledgeAugEncoder": {"encoder": ""},
    "RealmReader": {READER: ""},
    "RealmForOpenQA": {SHARED_TOWER: "embedder.", READER: "reader."},
    # Of checkpoints of TensorFlow, as `tf_checkpoint.py` names their parts.
    "embedder": {SHARED_TOWER: "embedder."},
    "encoder": {"encoder": "encoder."},
    "embedder+encoder": {SHARED_TOWER: "embedder.", "encoder": "encoder."},
    "embedder+reader": {SHARED_TOWER: "embedder.", READER: "reader."},
    "reader": {READER: "reader."},
}
EXTRA_NAMES: Mapping[str, Mapping[str, str]] = {
    SHARED_TOWER: _PROJECTION_NAMES,
    DOCUMENT_TOWER: _PROJECTION_NAMES,
    QUERY_TOWER: _PROJECTION_NAMES,
    "encoder": bert_tensors.HEAD_NAMES,
    READER: _SCORER_NAMES,
}

# As `RealmConfig` has them; files that `transformers` writes have all.
_DEFAULTS = {
    "retriever_proj_size": 128,
    "max_span_width": 10,
    "reader_layer_norm_eps": 1e-3,
    "reader_beam_size": 5,
    "reader_seq_len": 320,
}
_FIELDS = dict.fromkeys(_DEFAULTS, int) | {"reader_layer_norm_eps": int | float}


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a span reader is used, as its source says.

    Attributes:
      max_span: length of the longest span, in wordpieces.
      length: wordpieces of question and block together.
    """

    max_span: int
    layer_norm_epsilon: float
    num_read: int
    length: int


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """What a source holds, as parameters of this package on the host.

    Attributes:
      name: its class in `transformers`.
      towers: "tower", or "query_tower" and "document_tower"; empty without any.
      reader: parameters of a `KnowledgeEncoder` or, with `reading`, a `SpanReader`.
      reading: how the span reader is used; None if there is none.
      block_embeddings: embeddings of the blocks that it answers from.
      retriever: its towers, as one that is shared; of a reader those it would have.
      max_length: longest input of its towers in wordpieces; None if it does not say.
      is_bert: whether it is a BERT or a sentence encoder, which is a retriever and a
        reader at once, and a reader alone beside a source with towers of REALM.
      unused: tensors that are no part of it.
      missing: tensors that it does without.
    """

    name: str
    bert: BertConfig
    retriever: RetrieverConfig
    towers: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    reader: PyTree | None = None
    reading: Reading | None = None
    block_embeddings: StoredTensor | None = None
    max_length: int | None = None
    is_bert: bool = False
    unused: Sequence[str] = ()
    missing: Sequence[str] = ()


def assemble(
    source: str,
    config: BertConfig,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> PublishedModel:
    """Makes a model of tensors with the names of `transformers`.

    `source` is where they are, for messages; `settings` are fields of a `RealmConfig`,
    and perhaps `architectures`.
    """
    settings = _DEFAULTS | dict(settings)
    try:
        require_fields(settings, _FIELDS)
    except ValueError as error:
        raise BadInputError(
            f"expected the configuration of a REALM model in {source}, but {error}; "
            "fetch its config.json again"
        ) from error
    name = _class_of(source, settings, tensors)
    projection = settings["retriever_proj_size"]
    made, used, missing, problems = {}, set(), [], []
    for part, prefix in PARTS[name].items():
        if part == QUERY_TOWER and prefix not in _prefixes(tensors):
            continue
        found = _read_part(part, prefix, config, projection, tensors)
        made[part] = found.params
        used |= found.used
        missing += found.missing
        problems += found.problems
    if problems:
        raise BadInputError(
            f"expected a {name} of {config.num_layers} layers of {config.hidden_size} "
            f"with {config.vocab_size} wordpieces in {source}, but "
            f"{'; '.join(problems[:5])} ({len(problems)} in all); fetch all its files "
            "again"
        )
    blocks = tensors.get(BLOCK_EMBEDDINGS)
    reader = made.pop(READER, None)
    return PublishedModel(
        name=name,
        bert=config,
        retriever=RetrieverConfig(
            bert=config,
            projection_size=projection,
            layer_norm_epsilon=config.layer_norm_epsilon,
        ),
        towers=_towers({k: v for k, v in made.items() if k != "encoder"}),
        reader=made.get("encoder", reader),
        reading=None if reader is None else _reading(settings),
        block_embeddings=_block_embeddings(source, blocks, projection),
        unused=sorted(set(tensors) - used - {BLOCK_EMBEDDINGS}),
        missing=missing,
    )


def _class_of(
    source: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> str:
    named = settings.get("architectures")
    if isinstance(named, list) and len(named) == 1 and named[0] in PARTS:
        return named[0]
    prefixes = _prefixes(tensors)
    for name, marks in (
        ("RealmForOpenQA", {"embedder.", "reader."}),
        ("RealmScorer", {"embedder."}),
        ("RealmReader", {"qa_outputs."}),
    ):
        if marks <= prefixes:
            return name
    if "cls.dense.weight" in tensors:
        return "RealmEmbedder"
    if "cls.predictions.bias" in tensors:
        return "RealmKnowledgeAugEncoder"
    raise BadInputError(
        f"expected one of {', '.join(PARTS)} in {source}, got the architectures "
        f"{named!r:.80}; give the folder of such a model"
    )


def _prefixes(tensors: Mapping[str, Tensor]) -> set[str]:
    return {name.partition(".")[0] + "." for name in tensors}


@dataclasses.dataclass(frozen=True)
class _Part:
    params: PyTree
    used: set[str]
    missing: list[str]
    problems: list[str]


def _read_part(
    part: str,
    prefix: str,
    config: BertConfig,
    projection: int,
    tensors: Mapping[str, Tensor],
) -> _Part:
    shapes = _shapes(part, config, projection)
    sources = _sources(part, prefix, config, shapes)
    # A masked LM and a span reader do not read the pooler, and files may lack it.
    absent = [
        name
        for name in shapes
        if name.startswith(_POOLER)
        and part in ("encoder", READER)
        and sources[name][0] not in tensors
    ]
    no_head = part == "encoder" and not any(
        name.startswith(prefix + bert_tensors.HEAD) for name in tensors
    )
    if no_head:
        for name in bert_tensors.HEAD_NAMES:
            del shapes[name], sources[name]
    present = {name: found for name, found in sources.items() if name not in absent}
    flat, problems = bert_tensors.flat_parameters(tensors, present, shapes)
    flat |= {name: np.zeros(shapes[name], np.float32) for name in absent}
    tied = bert_tensors.tied_names(prefix, BERT_PREFIX) if part == "encoder" else {}
    return _Part(
        params=flax.traverse_util.unflatten_dict(flat, sep="/"),
        used={source for names in sources.values() for source in names} | set(tied),
        missing=[sources[name][0] for name in absent]
        + ([f"{prefix}{bert_tensors.HEAD}* (a new one is drawn)"] if no_head else []),
        problems=problems + bert_tensors.untied(tensors, tied),
    )


def _shapes(
    part: str, config: BertConfig, projection: int
) -> dict[str, tuple[int, ...]]:
    hidden, half = config.hidden_size, SPAN_SCORER_SIZE
    shapes = {f"bert/{n}": s for n, s in bert_tensors.expected_shapes(config).items()}
    match part:
        case "encoder":
            return shapes | bert_tensors.head_shapes(config)
        case "reader":
            extra = ((hidden, 2 * half), (2 * half,), (half,), (half,), (half, 1), (1,))
        case _:
            extra = ((hidden, projection), *((projection,),) * 3)
    return shapes | dict(zip(EXTRA_NAMES[part], extra, strict=True))


def _sources(
    part: str, prefix: str, config: BertConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Returns the names of the tensors of each parameter."""
    extra = EXTRA_NAMES[part]
    sources = {}
    for name in shapes:
        if name in extra:
            sources[name] = [prefix + extra[name]]
        else:
            names = bert_tensors.sources_of(
                name.removeprefix("bert/"), config.num_layers
            )
            sources[name] = [f"{prefix}{BERT_PREFIX}{source}" for source in names]
    return sources


def _towers(towers: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
    """Returns one tower where a file has two that are equal, or one of two."""
    if DOCUMENT_TOWER not in towers:
        return towers
    documents, queries = towers[DOCUMENT_TOWER], towers.get(QUERY_TOWER)
    if queries is None or jax.tree.all(
        jax.tree.map(np.array_equal, documents, queries)
    ):
        return {SHARED_TOWER: documents}
    return towers


def _reading(settings: Mapping[str, Any]) -> Reading:
    return Reading(
        max_span=settings["max_span_width"],
        layer_norm_epsilon=settings["reader_layer_norm_eps"],
        num_read=settings["reader_beam_size"],
        length=settings["reader_seq_len"],
    )


def _block_embeddings(
    source: str, found: Tensor | None, projection: int
) -> StoredTensor | None:
    if found is None:
        return None
    if not isinstance(found, StoredTensor) or (
        len(found.shape) != 2 or found.shape[1] != projection
    ):
        raise BadInputError(
            f"expected {BLOCK_EMBEDDINGS} of {projection} columns in {source}, got the "
            f"shape {found.shape}; fetch the file again"
        )
    return found
