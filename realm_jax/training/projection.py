"""Initializes the projection of a retriever whose published weights have none.

Weights such as MiniLM's end with the encoder's features. A random projection preserves
no more of them than of any other features. Principal components preserve as much of the
variance of the blocks as a projection can. Linear discriminants preserve what a piece
of a block shares with it, which is little of the variance of a BERT that is no sentence
encoder, and of a sentence encoder more than principal components do (docs/adapt.md).
This is an extension: the paper's retriever learns its projection in the inverse cloze
task.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from absl import logging
from jaxtyping import Float, PyTree

from realm_jax import multihost
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
from realm_jax.metrics.retrieval import rank_of_best
from realm_jax.models.retriever import DOCUMENT_TOWER, RetrieverConfig

NUM_SAMPLED = 2048
"""Number of blocks that a projection is fitted to."""

NUM_PIECES = 2
"""Pseudo-queries of each."""

SHRINKAGES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""The shrinkages of linear discriminants that cross-validation chooses from."""


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
    if kind is Projection.LDA and corpus.num_blocks < 2:
        raise BadInputError(
            'expected a corpus of at least 2 blocks for projection="lda", which is '
            f"cross-validated on them, got {corpus.num_blocks}; choose "
            '"pca" or "random"'
        )
    count = min(NUM_SAMPLED, corpus.num_blocks)
    sample = np.linspace(0, corpus.num_blocks - 1, count).astype(np.int64)
    tower = retriever["tower" if config.shared else DOCUMENT_TOWER]
    blocks = document_features(tower, config, corpus, sample, embed)
    if kind is Projection.LDA:
        pieces = _features_of_pieces(tower, config, corpus, sample, embed, query_length)
        shrinkage = choose_shrinkage(pieces, blocks, config.projection_size)
        # Where two are as good, the last bit of a host must not choose another kernel.
        shrinkage = multihost.from_first(shrinkage)
        logging.info("linear discriminants: a shrinkage of %g", shrinkage)
        mean, kernel = discriminants(pieces, blocks, config.projection_size, shrinkage)
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
    pieces: Float[np.ndarray, "block piece embed"],
    blocks: Float[np.ndarray, "block embed"],
    count: int,
    shrinkage: float,
) -> tuple[Float[np.ndarray, " embed"], Float[np.ndarray, "embed projection"]]:
    """Returns the mean and the linear discriminants, the best first, as columns.

    They have the largest ratios of the covariance between a piece and its block to the
    covariance of their difference. A multiple of the identity, `shrinkage` of the mean
    variance, is added to the latter, without which a few thousand pairs say too little
    of hundreds of features (Friedman 1989). The mean square length of the discriminants
    is 1, as that of principal components.
    """
    x, z = (
        np.reshape(rows, (-1, rows.shape[-1])).astype(np.float64)
        for rows in (pieces, np.broadcast_to(blocks[:, None], pieces.shape))
    )
    mean = (x.mean(axis=0) + z.mean(axis=0)) / 2
    between = (x - mean).T @ (z - mean)
    within = (x - z).T @ (x - z)
    within += shrinkage * np.trace(within) / len(within) * np.eye(len(within))
    width = len(within)
    _, vectors = scipy.linalg.eigh(
        between + between.T, within, subset_by_index=[width - count, width - 1]
    )
    best = _with_signs(vectors[:, ::-1])
    return mean, best * np.sqrt(count) / np.linalg.norm(best)


def choose_shrinkage(
    pieces: Float[np.ndarray, "block piece embed"],
    blocks: Float[np.ndarray, "block embed"],
    count: int,
) -> float:
    """Returns the one of `SHRINKAGES` by which pieces find their blocks best.

    There are two blocks at least.

    The criterion is the mean reciprocal rank of a piece's block, cross-validated in two
    folds of the blocks. A BERT that is no sentence encoder is served best by little
    shrinkage, and a sentence encoder by much (docs/adapt.md).
    """
    numbers = np.arange(len(blocks))
    folds = numbers[::2], numbers[1::2]

    def reciprocal_ranks(shrinkage: float) -> float:
        total = 0.0
        for fold, others in (folds, folds[::-1]):
            mean, kernel = discriminants(pieces[fold], blocks[fold], count, shrinkage)
            queries, documents = (
                np.asarray(jax.nn.standardize((rows - mean) @ kernel, epsilon=1e-12))
                for rows in (np.concatenate(pieces[others]), blocks)
            )
            own = np.repeat(others, pieces.shape[1])[:, None].tolist()
            ranks = rank_of_best(queries @ documents.T, own, [()] * len(own))
            total += np.sum(1.0 / ranks)
        return total

    return max(SHRINKAGES, key=reciprocal_ranks)


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
) -> Float[np.ndarray, "block piece embed"]:
    """Returns the features of `NUM_PIECES` pseudo-queries of each block, as queries."""
    plain, params = unprojected(tower, config)
    count = len(block_ids) * NUM_PIECES
    drawn = uniform(Stream.PROJECTION, 0, 0, count, NUM_DRAWS)
    texts = corpus.texts(np.repeat(block_ids, NUM_PIECES))
    pieces = [*map(pseudo_query, texts, drawn)]
    ids = query_rows(pieces, min(query_length, PSEUDO_QUERY_LENGTH), corpus.vocabulary)
    features = embed_questions(
        plain, place_locally(params), ids, batch_size=embed.batch_size
    )
    return features.reshape(len(block_ids), NUM_PIECES, -1)


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
