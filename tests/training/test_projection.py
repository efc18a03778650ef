"""The projection fitted to a corpus, against NumPy's own singular values."""

import dataclasses

import jax
import numpy as np
import pytest

from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import warm_start
from realm_jax.training.initialization import initial_params
from realm_jax.training.projection import fit_projection, principal_components
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.refused import refused
from tests.training.test_initialization import save_published

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
    init = jax.jit(Retriever(config).init)
    params = init(jax.random.key(0), ids, ids, ids)["params"]
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
    pooled = jax.jit(Bert(bert).apply)(
        {"params": params["document_tower"]["bert"]}, ids, segments
    ).pooled
    largest = np.linalg.eigvalsh(np.cov(np.asarray(pooled).T))[::-1][:4]
    np.testing.assert_allclose(variances, largest, rtol=1e-3)
    # Both towers speak of the same directions.
    np.testing.assert_array_equal(
        fitted["query_tower"]["projection"]["kernel"],
        fitted["document_tower"]["projection"]["kernel"],
    )


def test_the_encoder_needs_as_many_features(corpus, config):
    wide = dataclasses.replace(config, projection_size=17)
    with refused("at most 16, the encoder's features"):
        fit_projection({}, wide, corpus, EMBED)


def published(folder, vocab_size):
    """A folder with the weights of an encoder, as MiniLM comes; and the encoder."""
    config = tiny_world.models().retriever_config(vocab_size)
    models = Retriever(config), KnowledgeEncoder(config.bert)
    params, _ = initial_params(*models, tiny_world.LENGTHS, seed=5)
    folder.mkdir()
    save_published(folder, params, config)
    return params["reader"]["bert"]


def started(world, folder, **changes):
    config = tiny_world.warm_start_config(world, folder, pairs_task="", **changes)
    stage = Stage(config, KnowledgeEncoder)
    stage.close()
    return stage.state.params["retriever"]


def test_a_stage_fits_it_to_weights_and_keeps_that_of_an_earlier_stage(
    world, corpus, tmp_path
):
    weights = tmp_path / "weights"
    encoder = published(weights, corpus.vocabulary.size)
    from_weights = {"warm_start": str(weights), "train_steps": 0}
    drawn = started(world, tmp_path / "drawn", **from_weights)
    fitted = started(world, tmp_path / "fitted", projection="pca", **from_weights)
    for tower in ("query_tower", "document_tower"):
        tiny_world.assert_same_bits(fitted[tower]["bert"], encoder)
        kernel = np.asarray(fitted[tower]["projection"]["kernel"])
        np.testing.assert_allclose(kernel.T @ kernel, np.eye(8), atol=1e-5)
        assert (kernel != drawn[tower]["projection"]["kernel"]).any()
    first = tiny_world.warm_start_config(
        world, tmp_path / "first", pairs_task="", projection="pca", **from_weights
    )
    assert warm_start.run(first, tiny_world.silent, tiny_world.NEVER)
    later = started(
        world, tmp_path / "later", projection="pca", warm_start=first.model_dir
    )
    tiny_world.assert_same_bits(later, fitted)
