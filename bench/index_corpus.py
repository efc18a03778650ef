"""Provides embeddings of real text, and of real questions."""

import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int, PyTree

from bench.index_embed import random_params
from bench.index_embeddings import DIMENSION, EmbeddingFiles
from realm_jax.data.blocks import BlockStore
from realm_jax.data.features import query_row
from realm_jax.errors import BadInputError
from realm_jax.index.build import beginnings_as_queries
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
    query_embedder,
)
from realm_jax.index.retrievers import load_retriever
from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training.initialization import warm_start_params
from realm_jax.weights.bert import config_from_json
from realm_jax.weights.tensors import weights_file

_QUERY_LENGTH = 64


def embed_corpus(
    folder: pathlib.Path,
    corpus: str,
    retriever: str,
    questions: Sequence[str],
    *,
    document_length: int,
    num_queries: int,
) -> tuple[EmbeddingFiles, float]:
    """Embeds a prepared corpus and real questions, unless `folder` has the result.

    `retriever` is as in `load_towers`. Questions are taken in equal shares of JSON
    lines with a field `question`; documents are cut to `document_length` wordpieces.
    Returns the files, and blocks per second; 0 if they existed.
    """
    store = BlockStore.open(corpus)
    made_by = f"{pathlib.Path(retriever).name}, {document_length} wordpieces"
    source = f"{pathlib.Path(corpus).name} by {made_by}"
    # The name identifies the corpus, so that another one's file is not used.
    name = f"{store.fingerprint[:12]}_{made_by.replace(', ', '_').replace(' ', '_')}"
    blocks, queries = folder / f"{name}_blocks.npy", folder / f"{name}_queries.npy"
    tuning = folder / f"{name}_beginnings.npy"
    files = EmbeddingFiles(str(blocks), str(queries), source, str(tuning))
    if all(path.exists() for path in (blocks, queries, tuning)):
        return files, 0.0
    config, params = load_towers(retriever, store)
    for path, ids in [
        (queries, _question_ids(store, questions, num_queries)),
        # The queries that an index builder has.
        (tuning, beginnings_as_queries(store, num_queries)),
    ]:
        np.save(path, np.asarray(query_embedder(config)(params, ids), np.float32))
    began = time.perf_counter()
    embeddings = embed_blocks(
        document_embedder(config),
        params,
        store,
        np.arange(store.num_blocks),
        EmbedConfig(document_length),
    )
    speed = store.num_blocks / (time.perf_counter() - began)
    np.save(blocks, embeddings)
    return files, speed


def load_towers(folder: str, store: BlockStore) -> tuple[RetrieverConfig, PyTree]:
    """Loads a retriever for a corpus, and places it on the device.

    `folder` is the model directory of a pre-training run, whose newest published
    retriever is loaded, or a folder with the weights of a BERT: the towers that a run
    starts with (mean pooling, a random projection).
    """
    if weights_file(pathlib.Path(folder)) is not None:
        config = RetrieverConfig(config_from_json(folder), DIMENSION, pooling="mean")
        drawn = random_params(config)
        params = warm_start_params(drawn, folder, config, store.vocabulary)
        return config, jax.device_put(params["retriever"])
    published = open_store(folder)
    step = SnapshotSeries(published, RETRIEVER_SERIES).latest_step()
    if step is None:
        raise BadInputError(
            f"expected model.safetensors or a published retriever in {folder}, found "
            "neither; give weights, or the MODEL_DIR of a pre-training run"
        )
    trained = load_retriever(published, step)
    return trained.config, jax.device_put(trained.params)


def read_questions(path: str | pathlib.Path, count: int) -> list[str]:
    """Returns at most so many of a file's questions."""
    # Not splitlines: a question may contain other line separators.
    lines = pathlib.Path(path).read_text().strip().split("\n")
    # Spread over the file, because neighbours are often about one article.
    picked = np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int)
    return [json.loads(lines[line])["question"] for line in picked]


def _question_ids(
    store: BlockStore, files: Sequence[str], count: int
) -> Int[np.ndarray, "query length"]:
    share = -(-count // len(files))
    texts = [text for path in files for text in read_questions(path, share)]
    rows = [
        query_row(encoding.ids, _QUERY_LENGTH, store.vocabulary)
        for encoding in store.vocabulary.encode_batch(texts[:count])
    ]
    return np.stack(rows)
