"""The projection fitted to a corpus, against NumPy's own singular values."""

import dataclasses

import jax
import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training.projection import fit_projection, principal_components

EMBED = EmbedConfig(document_length=24, batch_size=8)


def test_components_are_the_right_singular_vectors():
    rows = np.random.default_rng(0).normal(size=(50, 6)) * [5, 4, 3, 2, 1, 0.5]
    rows -= rows.mean(axis=0)
    found = principal_components(rows, 3)
    _, _, expected = np.linalg.svd(rows, full_matrices=False)
    np.testing.assert_allclose(
        np.abs((found * expected[:3].T).sum(axis=0)), 1.0, atol=1e-9
    )
    largest = np.abs(found).argmax(axis=0)
    assert (found[largest, [0, 1, 2]] > 0).all()


@pytest.fixture(scope="module")
def config():
    bert = BertConfig(
        vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, mlp_size=32
    )
    return RetrieverConfig(
        bert, projection_size=4, layer_norm=False, shared=False, temperature=2.0
    )


def test_embeddings_keep_the_most_variance(corpus, config):
    bert = dataclasses.replace(config.bert, vocab_size=corpus.vocabulary.size)
    config = dataclasses.replace(config, bert=bert)
    ids = np.zeros((1, 8), np.int32)
    params = Retriever(config).init(jax.random.key(0), ids, ids, ids)["params"]
    fitted = fit_projection(params, config, corpus, EMBED)
    blocks = np.arange(corpus.num_blocks)
    embeddings = embed_blocks(
        document_embedder(config), fitted, corpus, blocks, EMBED
    ) * np.sqrt(config.temperature)
    # Centred and uncorrelated, the largest variance first.
    np.testing.assert_allclose(embeddings.mean(axis=0), 0.0, atol=1e-4)
    covariance = np.cov(embeddings.T)
    variances = np.diagonal(covariance)
    np.testing.assert_allclose(covariance, np.diag(variances), atol=1e-4)
    ids, segments = corpus.document_ids(blocks, EMBED.document_length)
    pooled = (
        Bert(bert)
        .apply({"params": params["document_tower"]["bert"]}, ids, segments)
        .pooled
    )
    largest = np.linalg.eigvalsh(np.cov(np.asarray(pooled).T))[::-1][:4]
    np.testing.assert_allclose(variances, largest, rtol=1e-3)
    # Both towers speak of the same directions.
    np.testing.assert_array_equal(
        fitted["query_tower"]["projection"]["kernel"],
        fitted["document_tower"]["projection"]["kernel"],
    )


def test_the_encoder_needs_as_many_features(corpus, config):
    wide = dataclasses.replace(config, projection_size=17)
    with pytest.raises(BadInputError, match="at most 16, the encoder's features"):
        fit_projection({}, wide, corpus, EMBED)
