"""Exports MiniLM as retrievers, with embeddings for sentence-transformers to repeat.

    python -m bench.sentence_encoder --weights .cache/data/minilm-l6 --output DIR
    python bench/peers/sentence_encoder.py DIR   # where sentence-transformers is

A folder is written for each: both ways of pooling with a random projection, and MiniLM
at its own width, normalised and with prompts, as e5 has them.
"""

import argparse
import json
import pathlib

import jax
import numpy as np

from realm_jax.data.features import query_row
from realm_jax.data.layout import document_inputs, from_lists
from realm_jax.data.wordpiece import WordPiece
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.weights.bert import config_from_json, load_bert
from realm_jax.weights.published_encoder import prompt_pieces
from realm_jax.weights.sentence_encoder import save_sentence_encoder, scale_of_export

LENGTH = 64
TEXTS = (
    "Who commissioned the Taj Mahal?",
    "Ça va? [MASK] is no mask, [SEP] ends nothing.",
    "東京 is the capital of Japan.",
    "a query beyond the longest input " * 20,
)
PAIRS = (
    ("Taj Mahal", "It was commissioned in 1631 by Shah Jahan."),
    ("", "A block of an article without a title."),
    ("Photosynthesis", "Plants turn light into chemical energy. " * 20),
)


def main() -> None:
    """Writes the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    bert = config_from_json(arguments.weights)
    words = WordPiece.load(arguments.weights / "vocab.txt")
    for name, config in {
        "mean": RetrieverConfig(bert, pooling="mean"),
        "cls": RetrieverConfig(
            bert, pooling="cls", temperature=8.0, layer_norm_epsilon=1e-3
        ),
        "own_width": RetrieverConfig(
            bert,
            projection_size=bert.hidden_size,
            pooling="mean",
            normalize=True,
            projected=False,
            temperature=0.05,
            query_prefix=prompt_pieces("query: ", words),
            document_prefix=prompt_pieces("passage: ", words),
        ),
    }.items():
        folder = arguments.output / name
        folder.mkdir(parents=True)
        pieces = [words.encode(text).ids for text in TEXTS]
        ids = np.stack([query_row(row, LENGTH, words) for row in pieces])
        titles, bodies = (
            [words.encode(pair[side]).ids for pair in PAIRS] for side in (0, 1)
        )
        documents = document_inputs(
            from_lists(titles, bodies), LENGTH, words.cls, words.sep, np
        )
        retriever = Retriever(config)
        params = retriever.init(jax.random.key(0), ids, *documents)["params"]
        tower = {**params["tower"], "bert": load_bert(arguments.weights, bert)}
        save_sentence_encoder(folder, tower, config, words, max_length=LENGTH)
        queries, found = jax.jit(retriever.apply)(
            {"params": {"tower": tower}}, ids, *documents
        )
        (folder / "inputs.json").write_text(json.dumps([TEXTS, PAIRS]))
        scale = scale_of_export(config)
        np.savez(folder / "expected.npz", texts=queries * scale, pairs=found * scale)


if __name__ == "__main__":
    main()
