"""Initializes the projection of a retriever whose published weights have none.

Weights such as MiniLM's end with the encoder's features. A random projection preserves
no more of them than of any other features. Principal components preserve as much of the
variance of the blocks as a projection can. Linear discriminants preserve what a piece
of a block shares with it, which is little of the variance of a BERT that is no sentence
encoder (docs/adapt.md). This is an extension: the paper's retriever learns its
projection in the inverse cloze task.
"""

import dataclasses
import enum

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Float, PyTree

from realm_jax.answering.search import embed_questions
from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import query_rows
from realm_jax.data.pseudo_queries import (
    NUM_DRAWS,
    PSEUDO_QUERY_LENGTH,
    pseudo_query,
)
from realm_jax.errors import BadInputError
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    place_locally,
)
from realm_jax.models.retriever import DOCUMENT_TOWER, RetrieverConfig

NUM_SAMPLED = 2048
"""Number of blocks that a projection is fitted to."""

NUM_PIECES = 2
"""Pseudo-queries of each."""

SHRINKAGE = 0.2
"""Chosen on Cranfield, by its queries (docs/adapt.md)."""


class Projection(enum.Enum):
    """Initial value of a projection; that of an earlier stage is always kept.

    RANDOM: random initialization.
    PCA: principal components of the blocks (Hotelling 1933).
    LDA: linear discriminants (Fisher 1936) of classes that are a block and its pieces.
    """

    RANDOM = "random"
    PCA = "pca"
    LDA = "lda"


def fit_projection(
    retriever: PyTree,
    config: RetrieverConfig,
    corpus: BlockStore,
    embed: EmbedConfig,
    kind: Projection,
    query_length: int,
) -> PyTree:
    """Sets the projection of both towers to one fitted to a sample of blocks.

    The blocks are `NUM_SAMPLED`, evenly spread over the corpus. The result depends on
    parameters and corpus alone.
    """
    if config.projection_size > config.features:
        raise BadInputError(
            f"expected a projection_size of at most {config.features}, the encoder's "
            f'features, for projection="{kind.value}", got {config.projection_size}; '
            'lower it or choose "random"'
        )
    count = min(NUM_SAMPLED, corpus.num_blocks)
    sample = np.linspace(0, corpus.num_blocks - 1, count).astype(np.int64)
    tower = retriever["tower" if config.shared else DOCUMENT_TOWER]
    blocks = document_features(tower, config, corpus, sample, embed)
    if kind is Projection.LDA:
        pieces = _features_of_pieces(tower, config, corpus, sample, embed, query_length)
        blocks = np.repeat(blocks, NUM_PIECES, axis=0)
        mean = np.concatenate([pieces, blocks]).mean(axis=0, dtype=np.float64)
        kernel = discriminants(pieces - mean, blocks - mean, config.projection_size)
    else:
        mean = blocks.mean(axis=0, dtype=np.float64)
        kernel = principal_components(blocks - mean, config.projection_size)
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
    """Returns the directions of the largest variance, the largest first, as columns."""
    centred = np.asarray(centred, np.float64)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    return _with_signs(vectors[:, ::-1][:, :count])


def discriminants(
    pieces: Float[np.ndarray, "pair embed"],
    blocks: Float[np.ndarray, "pair embed"],
    count: int,
) -> Float[np.ndarray, "embed projection"]:
    """Returns the linear discriminants of pairs, the best first, as columns.

    They have the largest ratios of the covariance between the two of a pair to the
    covariance of their difference. A multiple of the identity, `SHRINKAGE` of the mean
    variance, is added to the latter, without which a few thousand pairs say too little
    of hundreds of features (Friedman 1989). Their mean square length is 1, as that of
    principal components.
    """
    pieces, blocks = (np.asarray(rows, np.float64) for rows in (pieces, blocks))
    between = pieces.T @ blocks
    within = (pieces - blocks).T @ (pieces - blocks)
    shrinkage = SHRINKAGE * np.trace(within) / len(within) * np.eye(len(within))
    _, vectors = scipy.linalg.eigh(between + between.T, within + shrinkage)
    best = vectors[:, ::-1][:, :count]
    return _with_signs(best * np.sqrt(count) / np.linalg.norm(best))


def _with_signs(
    vectors: Float[np.ndarray, "embed projection"],
) -> Float[np.ndarray, "embed projection"]:
    """Makes the largest entry of each column positive: the sign is arbitrary.

    So the same rows always give the same columns.
    """
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


def _features_of_pieces(
    tower: PyTree,
    config: RetrieverConfig,
    corpus: BlockStore,
    block_ids: np.ndarray,
    embed: EmbedConfig,
    query_length: int,
) -> Float[np.ndarray, "piece embed"]:
    """Returns the features of `NUM_PIECES` pseudo-queries of each block, as queries."""
    plain, params = unprojected(tower, config)
    count = len(block_ids) * NUM_PIECES
    drawn = uniform(Stream.PROJECTION, 0, 0, count, NUM_DRAWS)
    texts = corpus.texts(np.repeat(block_ids, NUM_PIECES))
    pieces = [*map(pseudo_query, texts, drawn)]
    ids = query_rows(pieces, min(query_length, PSEUDO_QUERY_LENGTH), corpus.vocabulary)
    return embed_questions(
        plain, place_locally(params), ids, batch_size=embed.batch_size
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
