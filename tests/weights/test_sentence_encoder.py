"""Exported towers give in another implementation the embeddings that they give here."""

import functools

import jax
import numpy as np
import pytest

from realm_jax.data.wordpiece import WordPiece
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.weights.sentence_encoder import save_sentence_encoder, scale_of_export
from tests.weights.sentence_encoder_twin import encode, read_json

LENGTH = 24
TEXTS = ("The river Fosk.", "Ça va? [MASK] [SEP] fosk", "", "Town, " * 40)
PAIRS = (("Fosk", "The river is near Town7."), ("", "A town."), ("Town", "mill " * 40))


@functools.cache
def vocabulary(lowercase, folder):
    texts = ["The river Fosk is near Town7. A mill, a town; Ça va?"]
    return WordPiece.train(texts, 90, folder / "vocab.txt", lowercase=lowercase)


def padded(rows):
    return np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows]).astype("i4")


def towers_inputs(vocabulary):
    """`[CLS] x [SEP]` and `[CLS] title [SEP] body [SEP]` by hand, cut at the end."""
    cls, sep = vocabulary.cls, vocabulary.sep
    queries = [[cls, *vocabulary.encode(t).ids[: LENGTH - 2], sep] for t in TEXTS]
    documents, segments = [], []
    for title, body in PAIRS:
        first = [cls, *vocabulary.encode(title).ids, sep]
        rest = [*vocabulary.encode(body).ids[: LENGTH - len(first) - 1], sep]
        documents.append([*first, *rest])
        segments.append([0] * len(first) + [1] * len(rest))
    return padded(queries), padded(documents), padded(segments)


@pytest.mark.parametrize(
    ("settings", "lowercase"),
    [
        ({"pooling": "cls", "temperature": 3.0, "layer_norm_epsilon": 1e-3}, True),
        ({"pooling": "mean"}, False),
        ({"pooling": "mean", "layer_norm": False, "temperature": 0.5}, True),
        (
            {"pooling": "cls_state", "normalize": True, "projected": False}
            | {"projection_size": 16, "temperature": 0.25},
            True,
        ),
        (
            {"pooling": "mean", "dense_size": 5, "dense_activation": "tanh"}
            | {"normalize": True},
            False,
        ),
    ],
)
def test_a_tower_is_what_sentence_transformers_makes_of_its_folder(
    settings, lowercase, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("encoder")
    words = vocabulary(lowercase, tmp_path_factory.getbasetemp())
    activation = "gelu" if lowercase else "gelu_tanh"
    bert = BertConfig(words.size, 16, 2, 2, 20, LENGTH, activation=activation)
    config = RetrieverConfig(bert, **({"projection_size": 6} | settings))
    retriever = Retriever(config)
    ids, documents, segments = towers_inputs(words)
    shapes = jax.eval_shape(
        retriever.init, jax.random.key(0), ids, documents, segments
    )["params"]
    # Biases and scales too must differ, or leaving one out would not show. The small
    # projection makes the LayerNorm's epsilon count.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4") / 4, shapes)
    if projection := params["tower"].get("projection"):
        for name in ("kernel", "bias"):
            projection[name] *= np.float32(0.02)
    save_sentence_encoder(folder, params["tower"], config, words, max_length=LENGTH)
    queries, found = jax.jit(retriever.apply)(
        {"params": params}, ids, documents, segments
    )
    scale = scale_of_export(config)
    np.testing.assert_allclose(encode(folder, TEXTS), queries * scale, atol=1e-5)
    np.testing.assert_allclose(encode(folder, PAIRS), found * scale, atol=1e-5)
    assert scale == (0.5 if not config.projected else 1.0)


@pytest.mark.parametrize("reads", [None, "query", "document"])
def test_prompts_are_in_its_folder(reads, tmp_path):
    words = vocabulary(True, tmp_path)
    bert = BertConfig(words.size, 16, 1, 2, 20, LENGTH + 9)
    ids = towers_inputs(words)
    prompts = {"query": "The river; ", "document": "A town, "}
    config = RetrieverConfig(
        bert,
        projection_size=16,
        pooling="mean",
        projected=False,
        **{f"{k}_prefix": tuple(words.encode(v).ids) for k, v in prompts.items()},
    )
    retriever = Retriever(config)
    params = jax.jit(retriever.init)(jax.random.key(0), *ids)["params"]
    towers = jax.jit(retriever.apply)({"params": params}, *ids)
    folder = tmp_path / "encoder"
    folder.mkdir()
    save_sentence_encoder(
        folder, params["tower"], config, words, max_length=LENGTH, reads=reads
    )
    said = read_json(folder / "config_sentence_transformers.json")
    assert said["default_prompt_name"] == reads
    inputs = {"query": TEXTS, "document": PAIRS}
    assert set(said["prompts"]) == ({reads} if reads else set(inputs))
    for tower, (kind, of_kind) in zip(towers, inputs.items(), strict=True):
        # A single model has the length of documents: the last query is longer.
        kept = of_kind[:-1] if (kind, reads) == ("query", None) else of_kind
        if prompt := said["prompts"].get(kind):
            found = encode(folder, kept, prompt)
            np.testing.assert_allclose(found, tower[: len(kept)], atol=1e-5)
