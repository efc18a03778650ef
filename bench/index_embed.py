"""Measures embedding in blocks per second, in length buckets and at full length."""

import pathlib
import time
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

from bench.index_search import spread
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockStore, BlockText
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.index.embed import EmbedConfig, EmbedFn, document_embedder, embed_blocks
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training.initialization import initial_params
from realm_jax.types import Lengths

# As in gin/models: hidden size, layers, heads, MLP; and the number of blocks to embed.
MODELS = {
    "toy": ((16, 1, 2, 32), 64),
    "tiny": ((128, 2, 2, 512), 2048),
    "mini": ((256, 4, 4, 1024), 512),
    "minilm": ((384, 6, 12, 1536), 256),
}


def bert_config(name: str, vocab_size: int) -> BertConfig:
    """Returns the encoder of gin/models/<name>.gin."""
    (hidden, layers, heads, mlp), _ = MODELS[name]
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        mlp_size=mlp,
        dropout_rate=0.0,
    )


def random_params(config: RetrieverConfig) -> PyTree:
    """Returns parameters of a retriever and a reader, the same in every process."""
    models = Retriever(config), KnowledgeEncoder(config.bert)
    params, _ = initial_params(*models, Lengths(), seed=0)
    return params


def spread_blocks(store: BlockStore, count: int) -> Int[np.ndarray, " block"]:
    """Returns so many blocks of a corpus, spread over it; at most all."""
    count = min(count, store.num_blocks)
    return np.linspace(0, store.num_blocks - 1, count).astype(np.int64)


class _Counting:
    """Blocks padded to buckets or to full length; counts wordpieces and positions."""

    def __init__(self, store: BlockStore, *, full_length: bool):
        self.num_blocks = store.num_blocks
        self._store = store
        self._full_length = full_length
        self.wordpieces = self.places = 0

    def document_ids(self, block_ids: Int[np.ndarray, " block"], length: int):
        ids, segments = self._store.document_ids(block_ids, length)
        self.places += ids.size
        self.wordpieces += np.count_nonzero(ids[block_ids >= 0])
        return ids, segments

    def title_lengths(self, block_ids: Int[np.ndarray, " block"]) -> np.ndarray:
        return self._store.title_lengths(block_ids)

    def body_lengths(self, block_ids: Int[np.ndarray, " block"]) -> np.ndarray:
        lengths = self._store.body_lengths(block_ids)
        # Reported as longer than any bucket, each is padded to the longest.
        return np.full_like(lengths, 1 << 15) if self._full_length else lengths


def measure_embedding(
    store: BlockStore, model: str, *, document_length: int, repetitions: int
) -> dict[str, Any]:
    """Embeds blocks spread over a corpus, both ways, alternating."""
    config = RetrieverConfig(bert_config(model, store.vocabulary.size), 128)
    return time_both_ways(
        document_embedder(config),
        jax.device_put(random_params(config)["retriever"]),
        store,
        spread_blocks(store, MODELS[model][1]),
        EmbedConfig(document_length),
        repetitions,
    )


def time_both_ways(
    embed: EmbedFn,
    params: Any,
    store: BlockStore,
    block_ids: Int[np.ndarray, " block"],
    config: EmbedConfig,
    repetitions: int,
) -> dict[str, Any]:
    """Embeds these blocks with length buckets and without, alternating."""
    count = len(block_ids)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    padding = {}
    for turn in range(-1, repetitions):  # The first compiles.
        for full_length in (False, True):
            counting = _Counting(store, full_length=full_length)
            began = time.perf_counter()
            embed_blocks(embed, params, counting, block_ids, config)
            if turn >= 0:
                seconds[full_length].append(time.perf_counter() - began)
            padding[full_length] = 1.0 - counting.wordpieces / counting.places
    return {
        "blocks": count,
        "document_length": config.document_length,
        **{
            name: {
                "blocks_per_second": spread([count / s for s in seconds[full_length]]),
                "padding_share": padding[full_length],
            }
            for name, full_length in {"buckets": False, "full length": True}.items()
        },
    }


def invent_blocks(
    folder: pathlib.Path, num_blocks: int, mean_length: int, longest: int
) -> BlockStore:
    """Writes blocks of random wordpieces, with lengths that vary like articles'."""
    pieces = [*SPECIAL_PIECES, *(f"w{i}" for i in range(2000))]
    generator = np.random.default_rng(0)
    ids = generator.integers(len(SPECIAL_PIECES), len(pieces), 1 << 18, np.uint16)
    lengths = generator.gamma(3.0, mean_length / 3.0, num_blocks).astype(int)
    lengths = lengths.clip(8, longest - 6)
    starts = generator.integers(len(ids) - longest, size=num_blocks)
    text = BlockText("", "", "", [], [])
    return write_blocks(
        folder,
        (
            Block(ids[start : start + 3], ids[start + 3 : start + length], text)
            for start, length in zip(starts, lengths, strict=True)
        ),
        vocabulary=WordPiece(pieces),
        chunk_length=longest,
    )
