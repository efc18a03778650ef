"""Commits embeddings that others have made as the index of a corpus."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.build import SAMPLE_TOLERANCE, index_layouts
from realm_jax.index.builder import BuilderConfig, index_metadata
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    place_locally,
    shard_ranges,
)
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C, HASHES, index_series
from realm_jax.index.manifest import EMBEDDINGS, Expectation, Manifest
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.storage import Store

ReadRows = Callable[[int, int], Float[np.ndarray, "block projection"]]
"""Maps (start, stop) to these rows."""

_SAMPLED = 16


class ImportedIndex(NamedTuple):
    """An index that was committed, and how far a sample of its rows is off.

    `difference` is the largest distance to what the retriever embeds, relative to that.
    """

    manifest: Manifest
    difference: float

    @property
    def is_of_retriever(self) -> bool:
        """Whether the retriever's document tower has made the rows."""
        return self.difference <= SAMPLE_TOLERANCE


def import_index(
    store: Store,
    corpus: BlockStore,
    retriever: TrainedRetriever,
    embed: EmbedConfig,
    num_rows: int,
    read: ReadRows,
) -> ImportedIndex:
    """Writes rows shard by shard, commits them, and verifies the snapshot.

    Only an index whose rows the document tower would make again is recorded as one of
    that tower, so that rows of two encoders are never mixed.
    """
    if num_rows != corpus.num_blocks:
        raise BadInputError(
            f"expected an embedding for each of the {corpus.num_blocks:,} blocks of "
            f"{corpus.directory}, got {num_rows:,}; give the blocks that they are of"
        )
    difference = _difference(corpus, retriever, embed, read)
    series = index_series(store, corpus.fingerprint)
    writer = series.begin(
        retriever.step,
        corpus_fingerprint=corpus.fingerprint,
        metadata=index_metadata(retriever, BuilderConfig(embed=embed)),
    )
    for name, layout in index_layouts(corpus, retriever.config, embed).items():
        writer.create_array(name, *layout)
    for shard in shard_ranges(num_rows, embed.shard_blocks):
        rows = np.asarray(read(shard.start, shard.stop), np.float32)
        if not np.isfinite(rows).all():
            raise BadInputError(
                f"expected finite embeddings, got others in rows {shard.start:,} to "
                f"{shard.stop:,}; fetch the file again"
            )
        hashes = corpus.content_hashes[shard.start : shard.stop]
        writer.write_rows(HASHES, shard.start, hashes)
        writer.write_rows(EMBEDDINGS, shard.start, rows)
    made_by = {}
    if difference <= SAMPLE_TOLERANCE:
        made_by = {DOCUMENT_CRC32C: retriever.document_crc32c()}
    manifest = writer.commit(made_by)
    expected = Expectation(
        corpus.fingerprint, retriever.config.projection_size, num_rows
    )
    series.verify(manifest, expected)
    return ImportedIndex(manifest, difference)


def _difference(
    corpus: BlockStore, retriever: TrainedRetriever, embed: EmbedConfig, read: ReadRows
) -> float:
    count = min(_SAMPLED, corpus.num_blocks)
    blocks = np.linspace(0, corpus.num_blocks - 1, count).astype(np.int64)
    made = embed_blocks(
        document_embedder(retriever.config),
        place_locally(retriever.params),
        corpus,
        blocks,
        embed,
    )
    found = np.concatenate([read(row, row + 1) for row in blocks.tolist()])
    distances = np.linalg.norm(found - made, axis=-1) / np.linalg.norm(made, axis=-1)
    return float(distances.max())
