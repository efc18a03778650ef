"""Initializes the projection of a retriever whose published weights have none.

Weights such as MiniLM's end with the encoder's features. A random projection preserves
no more of them than of any other features; the principal components of the corpus's own
embeddings preserve as much of their variance as a projection can. This is an extension:
the paper's retriever learns its projection in the inverse cloze task.
"""

import dataclasses
import enum

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    place_locally,
)
from realm_jax.models.retriever import DOCUMENT_TOWER, RetrieverConfig

NUM_SAMPLED = 2048
"""Number of blocks from which the components are computed."""


class Projection(enum.Enum):
    """Initial value of a projection; that of an earlier stage is always kept.

    RANDOM: random initialization.
    PCA: the principal components of the corpus's embeddings, by `fit_projection`.
    """

    RANDOM = "random"
    PCA = "pca"


def fit_projection(
    retriever: PyTree,
    config: RetrieverConfig,
    corpus: BlockStore,
    embed: EmbedConfig,
) -> PyTree:
    """Sets the projection to the principal components of the blocks' features.

    The document tower's features of `NUM_SAMPLED` blocks, evenly spread over the
    corpus, are centred and projected to the directions in which they vary most
    (Hotelling 1933). The result depends on parameters and corpus alone.
    """
    if config.projection_size > config.features:
        raise BadInputError(
            f"expected a projection_size of at most {config.features}, the encoder's "
            f'features, for projection="pca", got {config.projection_size}; lower it '
            'or choose "random"'
        )
    count = min(NUM_SAMPLED, corpus.num_blocks)
    sample = np.linspace(0, corpus.num_blocks - 1, count).astype(np.int64)
    documents = retriever["tower" if config.shared else DOCUMENT_TOWER]
    features = document_features(documents, config, corpus, sample, embed)
    mean = features.mean(axis=0, dtype=np.float64)
    kernel = principal_components(features - mean, config.projection_size)
    projection = {
        "kernel": jnp.asarray(kernel, jnp.float32),
        "bias": jnp.asarray(-mean @ kernel, jnp.float32),
    }
    # The same for both towers: their embeddings are compared with each other.
    return {
        name: {**tower, "projection": projection} for name, tower in retriever.items()
    }


def principal_components(
    centred: Float[np.ndarray, "row embed"], count: int
) -> Float[np.ndarray, "embed projection"]:
    """Returns the directions of the largest variance, the largest first, as columns.

    The sign of a direction is arbitrary; its largest entry is made positive, so that
    the same rows always give the same columns.
    """
    centred = np.asarray(centred, np.float64)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    vectors = vectors[:, ::-1][:, :count]
    largest = np.abs(vectors).argmax(axis=0)
    return vectors * np.sign(vectors[largest, np.arange(vectors.shape[1])])


def document_features(
    tower: PyTree,
    config: RetrieverConfig,
    corpus: BlockStore,
    block_ids: np.ndarray,
    embed: EmbedConfig,
) -> Float[np.ndarray, "block embed"]:
    """Returns the inputs of the document tower's projection for these blocks."""
    plain, params = unprojected(tower, config)
    return embed_blocks(
        document_embedder(plain), place_locally(params), corpus, block_ids, embed
    )


def unprojected(
    tower: PyTree, config: RetrieverConfig
) -> tuple[RetrieverConfig, PyTree]:
    """Returns the retriever whose embeddings are the features of a tower's encoder."""
    plain = dataclasses.replace(
        config,
        projection_size=config.features,
        projected=False,
        temperature=1.0,
        shared=True,
    )
    kept = {name: tower[name] for name in ("bert", "dense") if name in tower}
    return plain, {"tower": kept}
