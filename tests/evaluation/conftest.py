"""A small corpus of invented articles, made once."""

import functools
import types

import jax
import numpy as np
import pytest

from realm_jax.data.documents import Document
from realm_jax.data.wordpiece import WordPiece
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.models.span_reader import SpanReader
from tests.corpus_builder import build_corpus
from tests.evaluation.tiny_reader import LENGTHS, TOWNS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Towns with a river, a founder and a year each, in blocks of a sentence or two."""
    documents = [
        Document(
            title=town,
            text=f"{town} lies on the river {TOWNS[i - 1]}ava. It was founded by Karel "
            f"von {TOWNS[i - 3]} in {1500 + 40 * i}. Its Bells are known — as far as "
            f"{TOWNS[i - 2]}.",
            source_id=town,
        )
        for i, town in enumerate(TOWNS)
    ]
    directory = tmp_path_factory.mktemp("towns")
    vocabulary = WordPiece.train(
        [document.text for document in documents], 150, directory / "vocab.txt"
    )
    return build_corpus(documents, directory / "corpus", vocabulary, chunk_length=56)


@pytest.fixture(scope="session")
def models(corpus):
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 32}
    sizes |= {"max_positions": 64, "initializer_range": 0.5}
    bert = BertConfig(vocab_size=corpus.vocabulary.size, **sizes)
    retriever = Retriever(RetrieverConfig(bert, projection_size=8))
    reader = SpanReader(bert, max_span=4)
    ids = np.ones((1, 8), np.int32)
    params = {
        "retriever": jax.jit(retriever.init)(jax.random.key(0), ids, ids, ids),
        "reader": jax.jit(reader.init)(jax.random.key(1), ids, ids),
    }
    return types.SimpleNamespace(
        retriever=retriever,
        reader=reader,
        params={name: variables["params"] for name, variables in params.items()},
        read_one=jax.jit(reader.apply),
    )


@pytest.fixture(scope="session")
def embeddings(corpus, models):
    ids, segments = corpus.document_ids(np.arange(corpus.num_blocks), LENGTHS.document)
    embed = functools.partial(models.retriever.apply, method=Retriever.embed_documents)
    variables = {"params": models.params["retriever"]}
    return np.asarray(jax.jit(embed)(variables, ids, segments))
