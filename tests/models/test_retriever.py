"""The towers: what an embedding is, which parameters make it, where gradients go."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models.bert import Bert, BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from tests.models.conftest import apply
from tests.refused import refused


@pytest.fixture(scope="module")
def inputs(joined):
    """Three queries, and two documents for each."""
    ids, segment_ids = joined
    queries = ids[:3, :5]
    documents = ids[[0, 1, 2, 3, 1, 0]].reshape(3, 2, -1)
    segments = segment_ids[[0, 1, 2, 3, 1, 0]].reshape(3, 2, -1)
    return queries, documents, segments


@pytest.fixture
def make(config, inputs, random_params):
    """Makes the settings of a retriever and its parameters."""

    def make(bert=config, projection_size=6, **settings):
        settings = RetrieverConfig(bert, projection_size, **settings)
        return settings, random_params(Retriever(settings), *inputs)

    return make


def embed(config, params, inputs, **options):
    return apply(Retriever(config), params, *inputs, **options)


def encoded_and_embedded(settings, params, inputs):
    """What the encoder makes of two documents, and their embeddings."""
    _, embeddings = embed(settings, params, inputs)
    texts = (each[1] for each in inputs[1:])
    return apply(Bert(settings.bert), params["tower"]["bert"], *texts), embeddings[1]


def dense(features, layer):
    return np.float64(features) @ np.float64(layer["kernel"]) + layer["bias"]


def test_an_embedding_is_the_pooled_vector_projected_and_normalised(make, inputs):
    epsilon = 1e-3
    settings, params = make(layer_norm_epsilon=epsilon, temperature=4.0)
    tower = params["tower"]
    for leaf in ("kernel", "bias"):  # A variance near the epsilon, so that it counts.
        tower["projection"][leaf] *= 0.02
    encoded, embeddings = encoded_and_embedded(settings, params, inputs)
    assert embeddings.shape == (2, 6)
    assert embeddings.dtype == jnp.float32
    projected = dense(encoded.pooled, tower["projection"])
    projected -= projected.mean(-1, keepdims=True)
    variance = (projected**2).mean(-1, keepdims=True)
    norm = tower["projection_norm"]
    expected = projected / np.sqrt(variance + epsilon) * norm["scale"] + norm["bias"]
    # Two embeddings share the temperature of their product.
    np.testing.assert_allclose(embeddings, expected / 2, atol=1e-4)


def test_mean_pooling_takes_every_wordpiece_and_no_padding(make, inputs):
    settings, params = make(layer_norm=False, pooling="mean")
    tower = params["tower"]
    # Those of any other pooling, the encoder's pooler included.
    assert tower.keys() == {"bert", "projection"}
    assert "pooler" in tower["bert"]
    encoded, embeddings = encoded_and_embedded(settings, params, inputs)
    ids = inputs[1][1]
    assert (ids == 0).any()
    for row, states, embedding in zip(ids, encoded.sequence, embeddings, strict=True):
        # Without layer norm the projection is the embedding.
        expected = dense(np.float64(states)[row != 0].mean(0), tower["projection"])
        np.testing.assert_allclose(embedding, expected, atol=1e-4)
    with refused("cls, cls_state, mean"):
        dataclasses.replace(settings, pooling="max")


def test_without_a_projection_an_embedding_is_that_of_a_sentence_encoder(make, inputs):
    settings, params = make(
        projection_size=7,
        pooling="cls_state",
        dense_size=7,
        dense_activation="tanh",
        normalize=True,
        projected=False,
        temperature=0.25,
    )
    tower = params["tower"]
    assert tower.keys() == {"bert", "dense"}
    encoded, embeddings = encoded_and_embedded(settings, params, inputs)
    expected = np.tanh(dense(encoded.sequence[:, 0], tower["dense"]))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings, expected * 2, atol=1e-4)
    with refused("projection_size to be 7"):
        dataclasses.replace(settings, projection_size=6)


@pytest.mark.parametrize("pooling", ["mean", "cls_state"])
def test_a_prefix_is_read_as_if_it_stood_in_the_text(make, inputs, pooling):
    plain, params = make(pooling=pooling)
    prompted = dataclasses.replace(plain, query_prefix=(3,), document_prefix=(5, 7))
    queries, documents, segments = inputs
    documents = documents.copy()
    documents[0, 0, 1:] = 0  # Shorter than the prefix.
    found = embed(prompted, params, (queries, documents, segments))

    def inserted(rows, pieces):
        """One by one, with what is added at the end of each cut off by padding."""
        flat = rows.reshape(-1, rows.shape[-1])
        longer = [[row[0], *pieces, *row[1:]] for row in flat.tolist()]
        return np.array(longer, np.int32).reshape(*rows.shape[:-1], -1)

    by_hand = (
        inserted(queries, [3]),
        inserted(documents, [5, 7]),
        inserted(segments, [0, 0]),
    )
    for one, other in zip(found, embed(plain, params, by_hand), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    # In rows that two documents share, too.
    length = documents.shape[-1]
    packed = apply(
        Retriever(prompted),
        params,
        documents.reshape(-1, length),
        segments.reshape(-1, length),
        packed_length=2 * length - 3,
        method="embed_documents",
    )
    np.testing.assert_allclose(packed.reshape(found[1].shape), found[1], atol=1e-5)


def test_the_record_of_a_retriever_makes_it_again(config):
    settings = RetrieverConfig(
        config, projection_size=5, dense_size=5, projected=False, query_prefix=(3, 4)
    )
    recorded = json.loads(json.dumps(settings.recorded()))
    assert recorded == settings.recorded()
    again = RetrieverConfig(BertConfig(**recorded.pop("bert")), **recorded)
    assert again == settings
    assert hash(again) == hash(settings)
    # Records of other retrievers are as they were before there were such settings.
    assert RetrieverConfig(config).recorded().keys() == {
        *("bert", "projection_size", "pooling", "shared", "layer_norm"),
        *("layer_norm_epsilon", "temperature", "projection_dropout"),
    }


def test_a_shared_tower_embeds_queries_as_documents_of_segment_0(make, inputs):
    settings, params = make()
    assert set(params) == {"tower"}
    queries = inputs[0]
    as_queries, as_documents = embed(
        settings, params, (queries, queries, np.zeros_like(queries))
    )
    np.testing.assert_allclose(as_queries, as_documents, atol=1e-6)


def test_separate_towers_have_parameters_and_gradients_of_their_own(make, inputs):
    settings, params = make(shared=False)
    assert set(params) == {"query_tower", "document_tower"}

    @jax.jit
    def loss(params):
        queries, documents = Retriever(settings).apply({"params": params}, *inputs)
        scores = jnp.einsum("bp,bkp->bk", queries, documents)
        return jnp.sum(jnp.sin(scores)), (queries, documents)

    gradients, (queries, documents) = jax.jit(jax.grad(loss, has_aux=True))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        # Every kernel learns, down to the embeddings. (A key bias does not: it adds the
        # same to every score of a softmax.)
        assert np.any(gradient) or path[-1].key == "bias", path

    params["document_tower"] = jax.tree.map(lambda x: 1.1 * x, params["document_tower"])
    _, (same, others) = loss(params)
    np.testing.assert_allclose(same, queries, atol=1e-5)
    assert np.abs(others - documents).max() > 0.01


def test_projection_dropout_only_in_training(make, inputs):
    settings, params = make(projection_size=64, projection_dropout=0.25)
    _, kept = embed(settings, params, inputs)
    rngs = {"dropout": jax.random.key(0)}
    _, dropped = embed(settings, params, inputs, deterministic=False, rngs=rngs)
    is_dropped = np.asarray(dropped) == 0
    assert 0.15 < is_dropped.mean() < 0.35
    np.testing.assert_allclose(
        dropped[~is_dropped], kept[~is_dropped] / 0.75, rtol=1e-4, atol=1e-5
    )


def test_embeddings_are_float32_when_activations_are_not(config, make, inputs):
    settings, params = make(dataclasses.replace(config, dtype="bfloat16"))
    found = jax.eval_shape(Retriever(settings).apply, {"params": params}, *inputs)
    assert {embeddings.dtype for embeddings in found} == {jnp.dtype("float32")}


def test_what_is_embedded_alone_is_embedded_without_dropout(config, make, inputs):
    dropping = dataclasses.replace(config, dropout_rate=0.5)
    settings, params = make(dropping, projection_dropout=0.5)
    queries, documents, segments = inputs
    kept = embed(RetrieverConfig(config, projection_size=6), params, inputs)
    # No key for dropout is given.
    alone = functools.partial(apply, Retriever(settings), params)
    as_queries = alone(queries, method="embed_queries")
    as_documents = alone(documents, segments, method="embed_documents")
    np.testing.assert_allclose(as_queries, kept[0], atol=1e-6)
    np.testing.assert_allclose(as_documents, kept[1], atol=1e-6)
