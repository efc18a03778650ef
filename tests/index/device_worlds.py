"""Random blocks and sentences, for candidates made on the host and on devices."""

from typing import NamedTuple

import jax
import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.index import candidates, device_tokens
from realm_jax.index.device_tokens import DocumentLayout
from realm_jax.types import Neighbours, PretrainBatch
from tests.index.memory_store import MemoryStore

NUM_CANDIDATES = 4
WORDPIECE = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(9))])


class World(NamedTuple):
    store: BlockStore
    batch: PretrainBatch
    neighbours: Neighbours
    layout: DocumentLayout


def make(seed, num_blocks=23, batch_size=6) -> World:
    """Few different wordpieces, so that sentences are repeated by chance, too."""
    rng = np.random.default_rng(seed)
    document, joined, query_length = 14, 20, 12

    def pieces(low, high):
        return rng.integers(5, 14, rng.integers(low, high), np.int32)

    titles = [pieces(0, document + 3) for _ in range(num_blocks)]
    bodies = [pieces(1, joined + 6) for _ in range(num_blocks)]
    store = MemoryStore(bodies, titles, WORDPIECE)
    query_ids = np.zeros((batch_size, query_length), np.int32)
    positions, mask_ids = np.zeros((2, batch_size, 3), np.int32)
    weights = np.zeros((batch_size, 3), np.float32)
    source = rng.integers(-1, num_blocks, batch_size).astype(np.int32)
    for row in range(batch_size):
        # Mostly a stretch of a block, as sentences are.
        body = bodies[source[row]] if rng.random() < 0.8 else pieces(1, query_length)
        length = min(len(body), int(rng.integers(1, query_length - 1)))
        start = rng.integers(0, len(body) - length + 1)
        sentence = body[start : start + length].copy()
        masked = rng.choice(length, int(rng.integers(0, min(length, 4) + 1)), False)
        scored = masked[:3]
        used = row, slice(len(scored))
        positions[used], mask_ids[used], weights[used] = scored + 1, sentence[scored], 1
        sentence[masked] = WORDPIECE.mask
        query_ids[row, : length + 2] = [WORDPIECE.cls, *sentence, WORDPIECE.sep]
    batch = PretrainBatch(query_ids, positions, mask_ids, weights, source)
    ids = np.full((batch_size, candidates.num_neighbours(NUM_CANDIDATES)), -1, np.int32)
    for row in ids:
        found = rng.permutation(num_blocks)[: len(row)]
        row[: len(found)] = found
    neighbours = Neighbours(ids, np.zeros(ids.shape, np.float32))
    layout = DocumentLayout(document, joined, WORDPIECE.cls, WORDPIECE.sep)
    return World(store, batch, neighbours, layout)


def host_candidates(world: World):
    return candidates.pretrain_candidates(
        world.store,
        world.neighbours,
        world.batch,
        num_candidates=NUM_CANDIDATES,
        document_length=world.layout.document,
        joined_length=world.layout.joined,
    )


def device_candidates(world: World, table, mesh):
    make_candidates = jax.jit(
        device_tokens.pretrain_candidates,
        static_argnames=("num_candidates", "layout", "mesh"),
    )
    return make_candidates(
        table,
        world.neighbours,
        world.batch,
        num_candidates=NUM_CANDIDATES,
        layout=world.layout,
        mesh=mesh,
    )


def assert_same(found, expected) -> None:
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
