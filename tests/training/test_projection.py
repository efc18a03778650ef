"""The projection fitted to a corpus, against NumPy's singular values, and by rank."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import warm_start
from realm_jax.training.projection import (
    SHRINKAGES,
    Projection,
    choose_shrinkage,
    discriminants,
    fit_projection,
    principal_components,
)
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.refused import refused
from tests.training.runs import drawn_params, run_to_end, towers_of
from tests.training.test_initialization import save_published

EMBED = EmbedConfig(document_length=24, batch_size=8)
QUERY_LENGTH = 16


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


def pairs(seed, count=300, spread=(*[0.3] * 6, *[2.0] * 14)):
    """Blocks, and two pieces of each that share 6 of 20 features with it.

    `spread` is the standard deviation of what is not shared, by feature.
    """
    rng = np.random.default_rng(seed)
    shared = np.pad(rng.normal(size=(count, 6)), [(0, 0), (0, 14)])
    mixing = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 20)))[0]
    noise = rng.normal(size=(3, count, 20)) * spread
    pieces, blocks = np.split((shared + noise) @ mixing, [2])
    return pieces.swapaxes(0, 1), blocks[0]


def share_found(kernel, pieces, blocks):
    """The share of the pieces whose own block is the nearest one by the cosine."""
    x, z = (rows @ kernel for rows in (np.concatenate(pieces), blocks))
    x, z = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, z))
    own = np.repeat(np.arange(len(blocks)), pieces.shape[1])
    return np.mean((x @ z.T).argmax(axis=1) == own)


def test_discriminants_find_what_a_piece_shares_with_its_block():
    pieces, blocks = pairs(1)
    mean, kernel = discriminants(pieces, blocks, 6, shrinkage=0.2)
    np.testing.assert_allclose(mean, (pieces.mean((0, 1)) + blocks.mean(0)) / 2)
    assert np.linalg.norm(kernel) ** 2 == pytest.approx(6)
    unseen = pairs(2, count=100)
    assert share_found(kernel, *unseen) > 0.5
    assert share_found(principal_components(blocks, 6), *unseen) < 0.1


def test_discriminants_have_the_largest_ratios_of_covariances():
    """By the whitened problem that the generalised one is the same as."""
    pieces, blocks = pairs(3)
    mean, found = discriminants(pieces, blocks, 4, shrinkage=0.7)
    within, between = np.zeros((2, 20, 20))
    for of_block, block in zip(pieces - mean, blocks - mean, strict=True):
        for piece in of_block:
            within += np.outer(piece - block, piece - block)
            between += np.outer(piece, block) + np.outer(block, piece)
    within += 0.7 * np.diag(within).mean() * np.eye(20)
    variances, axes = np.linalg.eigh(within)
    whiten = axes / np.sqrt(variances)
    _, vectors = np.linalg.eigh(whiten.T @ between @ whiten)
    expected = whiten @ vectors[:, ::-1][:, :4]
    lengths = np.linalg.norm(expected, axis=0) * np.linalg.norm(found, axis=0)
    cosines = np.abs((expected * found).sum(axis=0)) / lengths
    np.testing.assert_allclose(cosines, 1.0, atol=1e-9)


def reciprocal_ranks(pieces, blocks, shrinkage):
    """A slow twin: by NumPy's correlations, piece by piece."""
    halves = [i % 2 for i in range(len(blocks))]
    found = []
    for own, half in enumerate(halves):
        kept = [i for i, other in enumerate(halves) if other != half]
        mean, kernel = discriminants(pieces[kept], blocks[kept], 6, shrinkage)
        for piece in pieces[own]:
            rows = (np.vstack([piece, blocks]) - mean) @ kernel
            scores = np.corrcoef(rows)[0, 1:]
            found.append(1 / (1 + sum(scores > scores[own])))
    return np.mean(found)


def test_the_shrinkage_is_that_by_which_unseen_blocks_are_found_best():
    uneven, even = pairs(4, count=24), pairs(4, count=60, spread=[0.5] * 20)
    for rows in (uneven, even):
        best = max(SHRINKAGES, key=lambda shrinkage: reciprocal_ranks(*rows, shrinkage))
        assert choose_shrinkage(*rows, 6) == best
    # A covariance that is the same everywhere says nothing but noise.
    assert choose_shrinkage(*uneven, 6) < 1 < choose_shrinkage(*even, 6)


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
    fitted = fit_projection(params, config, corpus, EMBED, Projection.PCA, QUERY_LENGTH)
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


def test_too_many_features_or_too_few_blocks_are_refused(corpus, config):
    wide = dataclasses.replace(config, projection_size=17)
    with refused("at most 16, the encoder's features"):
        fit_projection({}, wide, corpus, EMBED, Projection.PCA, QUERY_LENGTH)
    # Discriminants are judged by other blocks.
    one = types.SimpleNamespace(num_blocks=1)
    with refused("at least 2 blocks"):
        fit_projection({}, config, one, EMBED, Projection.LDA, QUERY_LENGTH)


def started(world, folder, **changes):
    config = tiny_world.warm_start_config(world, folder, pairs_task="", **changes)
    stage = Stage(config, KnowledgeEncoder)
    stage.close()
    return stage.state.params["retriever"]


@pytest.mark.parametrize("kind", ["pca", "lda"])
def test_a_stage_fits_it_to_weights_and_keeps_that_of_an_earlier_stage(
    kind, world, corpus, tmp_path
):
    weights, published = tmp_path / "weights", drawn_params(corpus)
    weights.mkdir()
    save_published(weights, published, towers_of(corpus))
    from_weights = {"warm_start": str(weights), "train_steps": 0}
    drawn = started(world, tmp_path / "drawn", **from_weights)
    fitted = started(world, tmp_path / "fitted", projection=kind, **from_weights)
    for tower in ("query_tower", "document_tower"):
        tiny_world.assert_same_bits(fitted[tower]["bert"], published["reader"]["bert"])
        kernel = np.asarray(fitted[tower]["projection"]["kernel"])
        assert np.trace(kernel.T @ kernel) == pytest.approx(8, rel=1e-5)
        if kind == "pca":
            np.testing.assert_allclose(kernel.T @ kernel, np.eye(8), atol=1e-5)
        assert (kernel != drawn[tower]["projection"]["kernel"]).any()
    changes = {"pairs_task": "", "projection": kind}
    first = run_to_end(warm_start, world, tmp_path / "first", **changes, **from_weights)
    later = started(
        world, tmp_path / "later", projection=kind, warm_start=first.model_dir
    )
    tiny_world.assert_same_bits(later, fitted)
