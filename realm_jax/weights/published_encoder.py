"""Reads how a published sentence encoder makes an embedding of BERT's features.

A folder in the layout of sentence-transformers says it in `modules.json`: pooling, and
perhaps a dense layer and division by the length. Its prompts, words that stand in front
of each text, are in `config_sentence_transformers.json`. A folder without
`modules.json` is a bare BERT, whose embedding is taken to be the mean of its features.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import PyTree

from realm_jax.data.tokenizer_files import CONFIG_FILE as TOKENIZER_CONFIG
from realm_jax.data.tokenizer_files import read_settings
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields
from realm_jax.models.bert import BertConfig
from realm_jax.weights.bert import CONFIG_FILE, config_from_json
from realm_jax.weights.tensors import read_tensors

MODULES_FILE = "modules.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
_INPUT_FILE = "sentence_bert_config.json"
_MAX_LENGTH = "model_max_length"

_USABLE = "a BERT with [CLS] or mean pooling, such as MiniLM, bge, e5 or gte"
# What follows the Transformer in modules.json.
_SEQUENCES = (
    ["Pooling"],
    ["Pooling", "Dense"],
    ["Pooling", "Normalize"],
    ["Pooling", "Dense", "Normalize"],
)
# Of older versions, which have a flag for each.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# As `RetrieverConfig` names them.
_POOLINGS: dict[Any, Literal["cls_state", "mean"]] = {
    ("cls",): "cls_state",
    ("mean",): "mean",
}
_ACTIVATIONS: dict[Any, Literal["identity", "tanh"]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}
_QUERY_PROMPTS = ("query",)
# In the order in which `encode_document` looks for them.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """The dense layer after pooling, whose weights are in a folder."""

    folder: pathlib.Path
    size: int
    activation: Literal["identity", "tanh"]


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """What a folder says of its encoder.

    Attributes:
      is_bare: whether the folder says nothing of how an embedding is made.
      pooling: as in `RetrieverConfig`.
      normalize: whether an embedding is divided by its length.
      query_prompt: what stands in front of a query, "" for nothing.
      document_prompt: likewise, of a document.
      max_length: longest input in wordpieces, or None if the folder does not say.
    """

    folder: pathlib.Path
    bert: BertConfig
    is_bare: bool = True
    pooling: Literal["cls_state", "mean"] = "mean"
    dense: DenseLayer | None = None
    normalize: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None

    @property
    def width(self) -> int:
        """Number of features of an embedding."""
        return self.dense.size if self.dense else self.bert.hidden_size

    def description(self) -> str:
        """Returns what was found, in a line."""
        pooling = "[CLS]" if self.pooling == "cls_state" else "mean"
        parts = [f"{self.width} wide", f"{pooling} pooling"]
        if self.dense:
            parts.append(f"a dense layer ({self.dense.activation})")
        parts.append("normalised" if self.normalize else "not normalised")
        for kind, prompt in (
            ("query", self.query_prompt),
            ("document", self.document_prompt),
        ):
            if prompt:
                parts.append(f"{kind} prompt {prompt!r}")
        return ", ".join(parts)


def read_sentence_encoder(
    folder: str,
    *,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
) -> SentenceEncoder:
    """Reads what a folder says of its encoder; no weights but the dense layer's.

    A prompt, what stands in front of a query or a document, is what the folder says if
    it is None.
    """
    root = pathlib.Path(folder)
    kind = _read_fields(root / CONFIG_FILE, {}).get("model_type", "bert")
    if kind != "bert":
        raise _refusal(root / CONFIG_FILE, "model type", "'bert'", repr(kind))
    bert = config_from_json(folder)
    modules = _modules(root)
    settings = _optional_fields(root / _INPUT_FILE)
    _require_lowercase(root, settings)
    # Newer versions say it in the tokenizer's settings.
    max_length = settings.get(
        "max_seq_length", _optional_fields(root / TOKENIZER_CONFIG).get(_MAX_LENGTH)
    )
    if not isinstance(max_length, int | None):
        path = root / _INPUT_FILE
        raise _refusal(path, "max_seq_length", "a whole number", repr(max_length))
    prompts = _prompts(root)
    encoder = SentenceEncoder(
        folder=root,
        bert=bert,
        is_bare=modules is None,
        query_prompt=prompts[0] if query_prompt is None else query_prompt,
        document_prompt=prompts[1] if document_prompt is None else document_prompt,
        max_length=max_length,
    )
    if modules is None:
        return encoder
    prompted = bool(encoder.query_prompt or encoder.document_prompt)
    return dataclasses.replace(
        encoder,
        pooling=_pooling(modules["Pooling"], bert.hidden_size, prompted),
        dense=_dense(modules["Dense"], bert.hidden_size)
        if "Dense" in modules
        else None,
        normalize="Normalize" in modules,
    )


def prompt_pieces(prompt: str, vocabulary: WordPiece) -> tuple[int, ...]:
    """Returns the wordpieces that a prompt adds in front of any text."""
    pieces = vocabulary.encode(prompt).ids.tolist()
    word = vocabulary.encode("a").ids.tolist()
    if vocabulary.encode(f"{prompt}a").ids.tolist() != pieces + word:
        raise BadInputError(
            f"expected a prompt that ends with a space or a punctuation mark, got "
            f"{prompt!r}; its last word would become one with the text"
        )
    if vocabulary.unk in pieces:
        raise BadInputError(
            f"expected a prompt of words that the encoder's vocabulary has, got "
            f"{prompt!r}, of which it lacks some; give the prompt the encoder was "
            "trained with"
        )
    return tuple(pieces)


def prompt_text(pieces: Sequence[int], vocabulary: WordPiece) -> str:
    """Returns a prompt of these wordpieces: `prompt_pieces` gives them again."""
    # A punctuation mark is a word of its own, with or without a space before it.
    text = re.sub(r" (?=[:;,.?!])", "", vocabulary.decode(pieces))
    return f"{text} " if text else ""


def load_dense(encoder: SentenceEncoder) -> PyTree:
    """Returns kernel and bias of the encoder's dense layer, float32 host arrays."""
    dense = encoder.dense
    if dense is None:
        raise BadInputError(
            f"expected a Dense in {encoder.folder / MODULES_FILE}, as dense_size asks "
            "for, got none; use the settings that `realm init` writes for these weights"
        )
    tensors = read_tensors(dense.folder)
    kernel = tensors.pop("linear.weight", np.zeros(0))
    bias = tensors.pop("linear.bias", np.zeros(dense.size))
    shapes = (dense.size, encoder.bert.hidden_size), (dense.size,)
    if (kernel.shape, bias.shape) != shapes or tensors:
        found = ", ".join([f"{kernel.shape} and {bias.shape}", *sorted(tensors)])
        raise _refusal(
            dense.folder, "linear.weight and linear.bias", f"{shapes}", found
        )
    return {
        "kernel": np.ascontiguousarray(kernel.T, np.float32),
        "bias": np.asarray(bias, np.float32),
    }


def _modules(root: pathlib.Path) -> dict[str, pathlib.Path] | None:
    """Returns the folders of the modules after the Transformer; None without any."""
    path = root / MODULES_FILE
    if not path.exists():
        if (root / "1_Pooling").exists():
            raise BadInputError(
                f"expected {MODULES_FILE} beside 1_Pooling in {root}, got none; fetch "
                "all files of the encoder"
            )
        return None
    modules = _parse(path)
    try:
        modules = sorted(modules, key=lambda module: module["idx"])
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        folders = [root / module["path"] for module in modules]
    except (TypeError, KeyError, AttributeError) as error:
        raise BadInputError(
            f"expected a list of modules in {path}, each with idx, type and path, got "
            f"others ({error!r}); fetch the file again"
        ) from error
    if kinds[:1] != ["Transformer"] or kinds[1:] not in _SEQUENCES:
        wanted = "Transformer, Pooling and then at most one Dense and one Normalize"
        raise _refusal(path, "modules", wanted, ", ".join(kinds) or "none")
    if folders[0] != root:
        raise BadInputError(
            f"expected the Transformer in {root} itself, got it in {folders[0]}; move "
            "its files there, and set its path in modules.json to ''"
        )
    return dict(zip(kinds[1:], folders[1:], strict=True))


def _pooling(
    folder: pathlib.Path, hidden_size: int, prompted: bool
) -> Literal["cls_state", "mean"]:
    path = folder / CONFIG_FILE
    values = _read_fields(path, {})
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if values.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes
    names = " and ".join(map(str, modes)) if modes else "none"
    if not isinstance(modes, list) or tuple(modes) not in _POOLINGS:
        raise _refusal(path, "pooling", "cls or mean", names)
    width = values.get("embedding_dimension", values.get("word_embedding_dimension"))
    if width not in (None, hidden_size):
        raise _refusal(path, "features", f"{hidden_size}, those of BERT", f"{width}")
    if prompted and values.get("include_prompt") is False:
        raise _refusal(path, "pooling", "one that includes the prompt", "another")
    return _POOLINGS[tuple(modes)]


def _dense(folder: pathlib.Path, hidden_size: int) -> DenseLayer:
    path = folder / CONFIG_FILE
    values = _read_fields(
        path, {"in_features": int, "out_features": int, "activation_function": str}
    )
    if values["in_features"] != hidden_size:
        expected = f"{hidden_size}, those of BERT"
        raise _refusal(path, "in_features", expected, str(values["in_features"]))
    activation = values["activation_function"]
    if activation not in _ACTIVATIONS or values.get("use_residual"):
        found = activation + ", with a residual" * bool(values.get("use_residual"))
        raise _refusal(path, "activation", "Identity or Tanh", found)
    return DenseLayer(folder, values["out_features"], _ACTIVATIONS[activation])


def _prompts(root: pathlib.Path) -> tuple[str, str]:
    """Returns the prompts of queries and of documents.

    Newer versions of sentence-transformers save empty ones for "query" and "document"
    with every encoder; an empty one is none. The default is for both kinds, unless its
    name says that it is for one.
    """
    path = root / _PROMPTS_FILE
    values = _optional_fields(path)
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise _refusal(path, "prompts", "texts by their names", repr(prompts))
    default = values.get("default_prompt_name")
    if default in (*_QUERY_PROMPTS, *_DOCUMENT_PROMPTS):
        default = None

    def first_of(*names: Any) -> str:
        return next((str(prompts[name]) for name in names if prompts.get(name)), "")

    return first_of(*_QUERY_PROMPTS, default), first_of(*_DOCUMENT_PROMPTS, default)


def _require_lowercase(root: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Requires that the tokenizer lowercases, if the encoder's input is lowercased."""
    _, tokenizer = read_settings(root)
    if settings.get("do_lower_case") and tokenizer.get("lowercase") is False:
        raise BadInputError(
            f"expected do_lower_case to be the same in {root / _INPUT_FILE} and in the "
            "settings of the tokenizer, got true and false; set it to true in "
            "tokenizer_config.json"
        )


def _optional_fields(path: pathlib.Path) -> Mapping[str, Any]:
    return _read_fields(path, {}) if path.exists() else {}


def _read_fields(path: pathlib.Path, fields: Mapping[str, type]) -> Mapping[str, Any]:
    values = _parse(path)
    try:
        require_fields(values, fields)
    except ValueError as error:
        raise BadInputError(
            f"expected the settings of a sentence encoder in {path}, got others "
            f"({error}); fetch the file again"
        ) from error
    return values


def _parse(path: pathlib.Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"expected the settings of a sentence encoder in {path}, but they cannot "
            f"be read ({error}); fetch all files of the encoder"
        ) from error


def _refusal(path: pathlib.Path, what: str, expected: str, found: str) -> BadInputError:
    return BadInputError(
        f"expected as {what} in {path} {expected}, got {found}; give {_USABLE}"
    )
