"""Builds one attempt at an index: shards of embeddings, their verification, and ScaNN.

In a job of several processes each writes its own shards; the first then reads a sample
back and compares it. The attempt takes effect when `builder.build_once` commits it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index import arrays
from realm_jax.index.arrays import ArrayLayout
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    embed_shards,
    local_mesh,
    place_locally,
    query_embedder,
    shard_ranges,
)
from realm_jax.index.embedding_cache import HASHES, UNREADABLE, KnownRows
from realm_jax.index.manifest import EMBEDDINGS, ArrayRecord, DamagedSnapshotError
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.scann_assets import ScannAssets, write_assets
from realm_jax.index.scann_searcher import LowRecallError
from realm_jax.index.snapshot_writer import SnapshotWriter, data_folder
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import MissingObjectError

# Relative difference between two embeddings of a block in different batches. bfloat16
# rounds at 2^-8 in every layer; the embedding of another block differs by about 1.
SAMPLE_TOLERANCE = 0.1
# Wordpieces of the queries that ScaNN is evaluated on.
_QUERY_LENGTH = 32

_log = logging.getLogger(__name__)


class DivergedRetrieverError(BadInputError):
    """Raised when a retriever's embeddings are not finite."""


def beginnings_as_queries(
    blocks: BlockStore, num_queries: int
) -> Int[np.ndarray, "query length"]:
    """Returns the beginnings of blocks, spread over the corpus, as ids of queries."""
    num_queries = min(num_queries, blocks.num_blocks)
    spread = np.linspace(0, blocks.num_blocks - 1, num_queries)
    bodies = blocks.body_ids(spread.astype(np.int64), _QUERY_LENGTH - 2)
    ids = np.zeros((num_queries, _QUERY_LENGTH), np.int32)
    ids[:, 0] = blocks.vocabulary.cls
    ids[:, 1:-1] = bodies
    ends = 1 + np.count_nonzero(bodies, axis=1)
    ids[np.arange(num_queries), ends] = blocks.vocabulary.sep
    return ids


def index_layouts(
    blocks: BlockStore, retriever: RetrieverConfig, embed: EmbedConfig
) -> dict[str, ArrayLayout]:
    """Returns the arrays of an index, by name."""
    shape, rows = (blocks.num_blocks, retriever.projection_size), embed.shard_blocks
    return {
        EMBEDDINGS: ArrayLayout(shape, "float32", rows),
        HASHES: ArrayLayout(blocks.content_hashes.shape, "uint8", rows),
    }


class IndexBuild:
    """One attempt at one index; `known` rows need not be embedded again.

    This process embeds `num_own` blocks, of which `num_reused` were copied.
    """

    def __init__(
        self,
        retriever: TrainedRetriever,
        blocks: BlockStore,
        series: SnapshotSeries,
        writer: SnapshotWriter,
        *,
        embed: EmbedConfig,
        known: KnownRows | None = None,
    ):
        self._step = retriever.step
        # Placed once: a host array would be copied again with every batch.
        self._params: PyTree = place_locally(retriever.params)
        self._embed = document_embedder(retriever.config)
        self._embed_queries = query_embedder(retriever.config)
        self._blocks = blocks
        self._series = series
        self._embed_config = embed
        self._writer = writer
        self._known = known
        self._layouts = index_layouts(blocks, retriever.config, embed)
        layout = self._layouts[EMBEDDINGS]
        self._record = ArrayRecord(layout.shape, layout.dtype)
        shards = shard_ranges(blocks.num_blocks, embed.shard_blocks)
        self._own = shards[multihost.number() :: multihost.count()]
        self.num_own = sum(map(len, self._own))
        self.num_reused = 0

    def write_shards(self) -> Iterator[int]:
        """Writes this process's shards; yields the number of its finished blocks.

        A MissingAttemptError says that another has deleted the attempt.
        """
        for name, layout in self._layouts.items():
            self._writer.create_array(name, *layout)
        hashes = self._blocks.content_hashes
        # Check both, because an earlier version began attempts without hashes.
        completed = set(self._writer.completed_rows(EMBEDDINGS))
        completed &= set(self._writer.completed_rows(HASHES))
        missing = [s for s in self._own if (s.start, s.stop) not in completed]
        done = self.num_own - sum(map(len, missing))
        if done:
            _log.info("step %d: resuming at %d blocks", self._step, done)
            yield done
        for start, embeddings in self._embeddings_of(missing):
            self._check_finite(start, embeddings)
            stop = start + len(embeddings)
            try:
                self._writer.write_rows(HASHES, start, hashes[start:stop])
                self._writer.write_rows(EMBEDDINGS, start, embeddings)
            except MissingObjectError:
                self._writer.require_present()
                raise
            done += len(embeddings)
            yield done

    def _embeddings_of(
        self, shards: Sequence[range]
    ) -> Iterator[tuple[int, Float[np.ndarray, "block projection"]]]:
        """Yields first row and embeddings of shards; embeds only unknown blocks."""
        unknown = []
        for shard in shards:
            rows = self._known_rows(shard)
            copied = self._read_known(rows[rows >= 0])
            if not len(copied):
                unknown.append(shard)
                continue
            embeddings = np.empty((len(shard), self._record.shape[1]), np.float32)
            embeddings[rows >= 0] = copied
            changed = shard.start + np.flatnonzero(rows < 0)
            if len(changed):
                embeddings[rows < 0] = embed_blocks(
                    self._embed,
                    self._params,
                    self._blocks,
                    changed,
                    self._embed_config,
                )
            self.num_reused += int((rows >= 0).sum())
            yield shard.start, embeddings
        yield from embed_shards(
            self._embed, self._params, self._blocks, unknown, self._embed_config
        )

    def _known_rows(self, shard: range) -> Int[np.ndarray, " block"]:
        if self._known is None:
            return np.full(len(shard), -1)
        return self._known.find(self._blocks.content_hashes[shard.start : shard.stop])

    def _read_known(
        self, rows: Int[np.ndarray, " block"]
    ) -> Float[np.ndarray, "row projection"]:
        """Reads rows of the other index; none if it cannot be read any more."""
        if self._known is not None and len(rows):
            try:
                return self._known.read(rows)
            except UNREADABLE as error:
                _log.warning("%s; its blocks are embedded instead", error)
                self._known = None
        return np.empty((0, self._record.shape[1]), np.float32)

    def verify_sample(self, num_sampled: int) -> None:
        """Compares rows, evenly spread, with another embedding of their blocks.

        If they differ, the attempt is deleted, and a DamagedSnapshotError raised.
        """
        num_sampled = min(num_sampled, self._blocks.num_blocks)
        spread = np.linspace(0, self._blocks.num_blocks - 1, num_sampled)
        block_ids = spread.astype(np.int64)
        expected = embed_blocks(
            self._embed, self._params, self._blocks, block_ids, self._embed_config
        )
        written = np.concatenate([self._read(row, row + 1) for row in block_ids])
        distance = np.linalg.norm(written - expected, axis=-1)
        wrong = distance > SAMPLE_TOLERANCE * np.linalg.norm(expected, axis=-1)
        if wrong.any():
            raise self._damaged(f"another embedding of block {block_ids[wrong][0]}")

    def write_scann_assets(self, assets: ScannAssets) -> Mapping[str, float]:
        """Trains ScaNN and returns its metrics; a low recall deletes the attempt."""
        try:
            rows = self._read(0, self._blocks.num_blocks)
            return write_assets(self._writer, rows, self._queries(assets), assets)
        except LowRecallError:
            self._writer.discard()
            raise

    def _queries(self, assets: ScannAssets) -> Float[np.ndarray, "query projection"]:
        ids = beginnings_as_queries(self._blocks, assets.num_queries)
        with jax.set_mesh(local_mesh()):
            return np.asarray(self._embed_queries(self._params, ids), np.float32)

    def _read(self, start: int, stop: int) -> Float[np.ndarray, "row projection"]:
        name = self._series.name
        attempt = data_folder(name, self._writer.step, self._writer.attempt)
        place = self._series.store, f"{attempt}/{EMBEDDINGS}"
        try:
            return arrays.read_rows(*place, self._record, start, stop)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, found: str) -> DamagedSnapshotError:
        # What another one's collection has taken is no fault of the disk.
        self._writer.require_present()
        self._writer.discard()
        copied = ""
        if self._known is not None and self.num_reused:
            copied = f", and delete {self._known.url}, which rows were copied from"
        return DamagedSnapshotError(
            f"expected to read the index of step {self._step} back as it was written, "
            f"got {found}; check the disk{copied}. The attempt was deleted."
        )

    def _check_finite(self, start: int, embeddings: np.ndarray) -> None:
        finite = np.isfinite(embeddings).all(axis=-1)
        if not finite.all():
            raise DivergedRetrieverError(
                f"expected finite embeddings from the retriever of step {self._step}, "
                f"got nan or inf for block {start + np.argmin(finite)}; training has "
                "diverged: lower the learning rate."
            )
