"""Writes a tower in the layout of sentence-transformers.

    modules.json                       the modules below, in the order they are applied
    config.json, model.safetensors     the encoder, as a BertModel of transformers
    sentence_bert_config.json          its longest input, in wordpieces
    tokenizer.json, vocab.txt          this package's tokenizer, and its vocabulary
    config_sentence_transformers.json  the prompts, as text
    1_Pooling/config.json              [CLS] or the mean over the wordpieces
    Dense                              BERT's tanh pooler, if [CLS] is pooled by it
    Dense                              the dense layer of the encoder it started with
    Normalize                          if that encoder has it
    Dense                              the projection, if there is one
    LayerNorm                          of the projection, if there is one

Folders of modules are numbered, `2_Dense`. Scores are inner products ("dot"). Two
things have no setting there and are folded into weights, which leaves the embeddings as
they are: the temperature, and the epsilon of the LayerNorm, which is torch's 1e-5.
LN(x; epsilon) = LN(s x; s^2 epsilon) for any s > 0, so the projection is scaled by
s = sqrt(1e-5 / epsilon).

A tower without a projection has no weights to fold the temperature into. It is left
out: the embeddings are those of an encoder of the kind it started as, of length 1 if
that one normalises, and those of the tower times `scale_of_export`.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from realm_jax.data.wordpiece import CLS, MASK, PAD, SEP, UNK, WordPiece
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.weights import bert
from realm_jax.weights.published_encoder import prompt_text
from realm_jax.weights.tensors import SAFETENSORS_FILE

# Of torch.nn.LayerNorm.
_EPSILON = 1e-5
_IDENTITY = "torch.nn.modules.linear.Identity"
_TANH = "torch.nn.modules.activation.Tanh"

_SPECIAL = {
    "cls_token": CLS,
    "mask_token": MASK,
    "pad_token": PAD,
    "sep_token": SEP,
    "unk_token": UNK,
}


def save_sentence_encoder(
    folder: pathlib.Path,
    tower: PyTree,
    config: RetrieverConfig,
    vocabulary: WordPiece,
    *,
    max_length: int,
    reads: Literal["query", "document"] | None = None,
) -> None:
    """Writes a tower so that `SentenceTransformer(folder).encode` gives its embeddings.

    A text is encoded as `[CLS] x [SEP]`, a pair (title, body) as a document, with its
    segments. Prompts, if there are any, are chosen by `encode_query` and
    `encode_document`; by `encode`, too, where the tower `reads` but one of the two.

    The folder must be empty. `tower` are parameters of `models.retriever.Tower`, and
    `max_length` is the longest input in wordpieces, [CLS] and [SEP] included, but
    without a prompt.
    """
    prompts = _prompts(config, vocabulary, reads)
    prefix = config.query_prefix if reads == "query" else config.document_prefix
    max_length += len(prefix)
    bert.save_bert(folder / SAFETENSORS_FILE, tower["bert"], config.bert)
    bert.save_config(folder, config.bert)
    _save_tokenizer(folder, vocabulary, max_length)
    modules = _modules(tower, config)
    for number, module in enumerate(modules, start=1):
        inner = folder / f"{number}_{module.kind}"
        inner.mkdir()
        bert.write_json(inner / "config.json", module.settings)
        if module.weights:
            arrays = {
                name: np.ascontiguousarray(array, np.float32)
                for name, array in module.weights.items()
            }
            path = inner / SAFETENSORS_FILE
            safetensors.numpy.save_file(arrays, path, bert.METADATA)
    kinds = ["Transformer", *(module.kind for module in modules)]
    described = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    bert.write_json(folder / "modules.json", described)
    bert.write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": max_length, "do_lower_case": False},
    )
    bert.write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": prompts,
            "default_prompt_name": reads if prompts else None,
            "similarity_fn_name": "cosine" if has_length_1(config) else "dot",
        },
    )


def has_length_1(config: RetrieverConfig) -> bool:
    """Returns whether exported embeddings have length 1."""
    return config.normalize and not config.projected


def scale_of_export(config: RetrieverConfig) -> float:
    """Returns what a tower's embeddings are multiplied by in its export."""
    return 1.0 if config.projected else math.sqrt(config.temperature)


def _prompts(
    config: RetrieverConfig, vocabulary: WordPiece, reads: str | None
) -> dict[str, str]:
    """Returns the prompts by the names of `encode_query` and `encode_document`."""
    prefixes = {"query": config.query_prefix, "document": config.document_prefix}
    if not any(prefixes.values()):
        return {}
    return {
        name: prompt_text(prefix, vocabulary)
        for name, prefix in prefixes.items()
        if reads in (None, name)
    }


class _Module(NamedTuple):
    """A module after the encoder: class, settings, and tensors by torch's names."""

    kind: str
    settings: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]


def _modules(tower: PyTree, config: RetrieverConfig) -> list[_Module]:
    pooling = {
        "word_embedding_dimension": config.bert.hidden_size,
        "pooling_mode_cls_token": config.pooling != "mean",
        "pooling_mode_mean_tokens": config.pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    modules = [_Module("Pooling", pooling, {})]
    if config.pooling == "cls":
        modules.append(_dense(tower["bert"]["pooler"], _TANH))
    if config.dense_size is not None:
        activation = _TANH if config.dense_activation == "tanh" else _IDENTITY
        modules.append(_dense(tower["dense"], activation))
    if config.normalize:
        modules.append(_Module("Normalize", {}, {}))
    if not config.projected:
        return modules
    scale = config.temperature**-0.5
    if not config.layer_norm:
        return [*modules, _dense(tower["projection"], _IDENTITY, scale)]
    stretch = math.sqrt(_EPSILON / config.layer_norm_epsilon)
    norm = tower["projection_norm"]
    return [
        *modules,
        _dense(tower["projection"], _IDENTITY, stretch),
        _Module(
            "LayerNorm",
            {"dimension": config.projection_size},
            {
                "norm.weight": np.asarray(norm["scale"]) * scale,
                "norm.bias": np.asarray(norm["bias"]) * scale,
            },
        ),
    ]


def _dense(params: PyTree, activation: str, scale: float = 1.0) -> _Module:
    kernel, bias = np.asarray(params["kernel"]), np.asarray(params["bias"])
    settings = {
        "in_features": kernel.shape[0],
        "out_features": kernel.shape[1],
        "bias": True,
        "activation_function": activation,
    }
    weights = {"linear.weight": kernel.T * scale, "linear.bias": bias * scale}
    return _Module("Dense", settings, weights)


def _save_tokenizer(
    folder: pathlib.Path, vocabulary: WordPiece, max_length: int
) -> None:
    vocabulary.save(folder / "vocab.txt")
    vocabulary.save_pair_tokenizer(folder / "tokenizer.json")
    bert.write_json(folder / "special_tokens_map.json", _SPECIAL)
    settings = {
        **_SPECIAL,
        # Reads tokenizer.json as it is; BertTokenizer would make one by its own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": max_length,
        "do_lower_case": vocabulary.lowercase,
        "strip_accents": vocabulary.strip_accents,
        "tokenize_chinese_chars": vocabulary.tokenize_chinese_chars,
        # "[MASK]" in a text is a bracket, a word and a bracket.
        "split_special_tokens": True,
    }
    bert.write_json(folder / "tokenizer_config.json", settings)
