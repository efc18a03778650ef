"""Loads a tagger from a BERT token classifier saved by `transformers`.

The folder holds config.json (a BERT, with `id2label`), vocab.txt, weights in a format
of `tensors.py`, and optionally tokenizer_config.json or tokenizer.json. The paper's
tagger is such a model: BERT trained on CoNLL-2003 (§3.4).

Its labels are those of CoNLL-2003 (BIO): `B-PER` begins a name of type PER, `I-PER`
continues one, `O` is outside. In the original scheme (IOB1) `I-` begins a name too, and
`B-` only separates two neighbours of one type; both schemes are accepted.
"""

import dataclasses
import functools
import hashlib
import pathlib
import re
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from realm_jax.data import dates
from realm_jax.data.chunking import split_sentences
from realm_jax.data.features import in_chunks, query_row
from realm_jax.data.salient_spans import Span, bare_name, date_spans, merge
from realm_jax.data.tokenizer_files import CONFIG_FILE, load_vocabulary, read_settings
from realm_jax.data.wordpiece import Encoding, WordPiece
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.types import Array
from realm_jax.weights import bert as bert_weights
from realm_jax.weights import bert_tensors
from realm_jax.weights.tensors import (
    FLAX_FILE,
    SAFETENSORS_FILE,
    read_tensors,
    weights_file,
    weights_parts,
)

VOCABULARY_FILE = "vocab.txt"
_CLASSIFIER = ("classifier.weight", "classifier.bias")
_FILES = (
    SAFETENSORS_FILE,
    FLAX_FILE,
    bert_weights.CONFIG_FILE,
    VOCABULARY_FILE,
    CONFIG_FILE,
)
# Few shapes, because each is compiled; sentences of similar length share one.
_BATCH = 32
_SHORTEST = 32
_OUTSIDE = "O"
_LABEL = re.compile(r"O|[BI]-.+")
# Quantities of OntoNotes and of Korean corpora (KLUE), and their dates, which are found
# by the pattern instead: see `salient_spans.ENTITY_LABELS`.
_NOT_SALIENT = (
    "CARDINAL",
    "ORDINAL",
    "PERCENT",
    "MONEY",
    "QUANTITY",
    "TIME",
    "DATE",
    "DT",
    "TI",
    "QT",
)


@dataclasses.dataclass(frozen=True)
class TokenClassifier:
    """A BERT with a linear layer at every position.

    Attributes:
      labels: names of the classes.
      params: {"bert": ..., "kernel": [embed, label], "bias": [label]}, float32.
    """

    config: BertConfig
    labels: tuple[str, ...]
    vocabulary: WordPiece
    params: PyTree

    def logits(
        self, ids: Int[Array, "batch length"]
    ) -> Float[Array, "batch length label"]:
        """Returns the score of each label at each position of `[CLS] x [SEP]` rows."""
        return _logits(self.config, self.params, ids)


class CheckpointTagger:
    """Finds names with a token classifier, and dates by the pattern.

    It reads sentence by sentence, as such models are trained; a sentence longer than
    the model's positions is split into windows.
    """

    def __init__(self, folder: str | pathlib.Path):
        """Loads the checkpoint in `folder`."""
        self.classifier = load_token_classifier(folder)
        self.name = f"checkpoint-{_fingerprint(folder)[:16]}-{dates.VERSION}"

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns the spans of each text: in order, disjoint, not empty."""
        sentences = [
            (number, start, text[start:end])
            for number, text in enumerate(texts)
            for start, end in split_sentences(text)
        ]
        names: list[list[Span]] = [[] for _ in texts]
        found = self._tag_sentences([sentence for _, _, sentence in sentences])
        for (number, offset, _), spans in zip(sentences, found, strict=True):
            names[number] += [
                Span(offset + start, offset + end, label) for start, end, label in spans
            ]
        return [
            merge(date_spans(text), spans)
            for text, spans in zip(texts, names, strict=True)
        ]

    def _tag_sentences(self, sentences: Sequence[str]) -> list[list[Span]]:
        vocabulary, labels = self.classifier.vocabulary, self.classifier.labels
        encodings = vocabulary.encode_batch(sentences)
        room = self.classifier.config.max_positions - 2
        parts = [
            encoding.ids[part]
            for encoding in encodings
            for part in windows(vocabulary.is_inner[encoding.ids], room)
        ]
        classes = iter(np.concatenate([np.zeros(0, int), *self._classify(parts)]))
        return [
            word_spans(
                sentence,
                encoding,
                vocabulary.is_inner[encoding.ids],
                [labels[next(classes)] for _ in range(len(encoding))],
            )
            for sentence, encoding in zip(sentences, encodings, strict=True)
        ]

    def _classify(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the class of each wordpiece of each part."""
        classes = [np.zeros(0, int)] * len(parts)
        by_length = np.argsort([len(part) for part in parts], kind="stable")
        for batch in in_chunks(by_length, _BATCH):
            length = self._bucket(len(parts[batch[-1]]) + 2)
            rows = np.zeros((_BATCH, length), np.int32)
            for row, part in enumerate(batch):
                rows[row] = query_row(parts[part], length, self.classifier.vocabulary)
            best = np.asarray(self.classifier.logits(rows).argmax(-1))
            for row, part in enumerate(batch):
                classes[part] = best[row, 1 : 1 + len(parts[part])]
        return classes

    def _bucket(self, length: int) -> int:
        bucket = _SHORTEST
        while bucket < length:
            bucket *= 2
        return min(bucket, self.classifier.config.max_positions)


def load_token_classifier(folder: str | pathlib.Path) -> TokenClassifier:
    """Reads a `BertForTokenClassification` of `transformers` from its folder."""
    folder = pathlib.Path(folder)
    config = bert_weights.config_from_json(folder)
    labels = _labels(folder / bert_weights.CONFIG_FILE)
    vocabulary = load_vocabulary(folder / VOCABULARY_FILE)
    if vocabulary.size > config.vocab_size:
        raise BadInputError(
            f"expected at most {config.vocab_size} wordpieces in "
            f"{folder / VOCABULARY_FILE}, which is what config.json says, got "
            f"{vocabulary.size}; use the vocabulary that came with the weights."
        )
    params = _load_params(folder, config, len(labels))
    return TokenClassifier(config, labels, vocabulary, params)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: BertConfig, params: PyTree, ids: Array) -> Array:
    encoded = Bert(config).apply({"params": params["bert"]}, ids, jnp.zeros_like(ids))
    sequence: Any = encoded.sequence
    return sequence @ params["kernel"] + params["bias"]


def _labels(path: pathlib.Path) -> tuple[str, ...]:
    config = parse_json(path.read_bytes())  # Already validated by `config_from_json`.
    kind = config.get("model_type", "bert")
    if kind != "bert":
        raise BadInputError(
            f"expected the model type 'bert' in {path}, got {kind!r}; give a "
            "checkpoint of BertForTokenClassification."
        )
    names = config.get("id2label") or {}
    if not isinstance(names, dict):
        raise BadInputError(
            f"expected the labels by their numbers as id2label in {path}, got "
            f"{reprlib.repr(names)}; give a checkpoint of BertForTokenClassification."
        )
    labels = tuple(str(names.get(str(index))) for index in range(len(names)))
    check_labels(labels, f"id2label of {path}")
    return labels


def _load_params(folder: pathlib.Path, config: BertConfig, num_labels: int) -> PyTree:
    tensors = read_tensors(folder)
    problems = []
    wanted = ((num_labels, config.hidden_size), (num_labels,))
    head = [tensors.pop(name, None) for name in _CLASSIFIER]
    for name, tensor, shape in zip(_CLASSIFIER, head, wanted, strict=True):
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else f"of shape {tensor.shape}"
            problems.append(f"{name} is {found}, not {shape}")
    encoder = {name.removeprefix("bert."): value for name, value in tensors.items()}
    # Token classification needs no pooler, and `transformers` leaves it out.
    bert, more_problems = bert_tensors.encoder_parameters(
        encoder, config, needs_pooler=False
    )
    problems += more_problems
    if problems:
        raise BadInputError(
            f"expected in {folder} the token classifier of its config.json, but "
            f"{'; '.join(problems[:5])} ({len(problems)} in all); use the files of "
            "one checkpoint of BertForTokenClassification."
        )
    kernel, bias = (np.asarray(tensor, np.float32) for tensor in head)
    return {"bert": bert, "kernel": kernel.T, "bias": bias}


def _fingerprint(folder: str | pathlib.Path) -> str:
    """Returns the SHA-256 (hex) of the files that determine the spans found."""
    digest = hashlib.sha256()
    paths = [pathlib.Path(folder) / name for name in _FILES]
    settings_file, _ = read_settings(folder)
    weights = weights_file(folder)
    read = [settings_file] if settings_file else []
    read += weights_parts(weights) if weights else []
    # The order is that of the names that corpora already have.
    paths += [path for path in read if path not in paths]
    for path in paths:
        if path.exists():
            with path.open("rb") as file:
                digest.update(f"{path.name}\0".encode())
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_labels(labels: Sequence[str], where: str) -> None:
    """Checks that labels are in the BIO scheme."""
    wrong = [label for label in labels if not _LABEL.fullmatch(label)]
    if wrong or set(labels) <= {_OUTSIDE}:
        raise BadInputError(
            f"expected labels as in CoNLL-2003 (O, B-PER, I-PER, …) in {where}, got "
            f"{', '.join(wrong or labels) or 'none'}; give a checkpoint that was "
            "trained to find names, with its labels in id2label."
        )


def word_spans(
    text: str,
    encoding: Encoding,
    is_inner: Bool[np.ndarray, " pieces"],
    labels: Sequence[str],
) -> list[Span]:
    """Returns the names in a text: in order, disjoint, not empty.

    The first wordpiece of a word determines the label of the word; `is_inner` are those
    that continue one. Words are those of BERT, which in Korean include the particles.
    """
    spans: list[Span] = []
    kind_before = None
    for (start, end), inner, label in zip(
        encoding.offsets.tolist(), is_inner.tolist(), labels, strict=True
    ):
        if inner and spans and kind_before is not None:
            spans[-1] = spans[-1]._replace(end=end)
        if inner:
            continue
        begins, _, kind = label.partition("-")
        if label == _OUTSIDE:
            kind_before = None
        elif begins == "I" and kind == kind_before:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(Span(start, end, kind))
            kind_before = kind
    found = [
        Span(*bare_name(text, start, end), kind)
        for start, end, kind in spans
        if kind not in _NOT_SALIENT
    ]
    return [span for span in found if span.start < span.end]


def windows(is_inner: Bool[np.ndarray, " pieces"], room: int) -> list[slice]:
    """Splits wordpieces into consecutive windows of at most `room` pieces.

    The windows cover all pieces, and begin at a word boundary unless a word is longer
    than a window.
    """
    cuts, start = [], 0
    while len(is_inner) - start > room:
        begins = np.flatnonzero(~is_inner[start + 1 : start + room + 1])
        end = start + 1 + int(begins[-1]) if len(begins) else start + room
        cuts.append(slice(start, end))
        start = end
    return [*cuts, slice(start, len(is_inner))] if start < len(is_inner) else cuts
