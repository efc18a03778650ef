"""A block store of words, a retriever of one layer, and a builder that polls often."""

import dataclasses
import functools
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.index import builder
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.retrievers import publish_retriever
from realm_jax.index.scann_assets import ScannAssets
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from tests import tiny_run
from tests.waiting import PATIENCE

IN_A_BUCKET = pytest.mark.parametrize("store", ["gs"], indirect=True)
IN_BOTH = pytest.mark.parametrize("store", ["local", "gs"], indirect=True)

VOCABULARY = WordPiece([*SPECIAL_PIECES, *(f"word{number}" for number in range(40))])
RETRIEVER = RetrieverConfig(
    BertConfig(
        vocab_size=VOCABULARY.size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        mlp_size=32,
        max_positions=32,
        initializer_range=0.5,
    ),
    projection_size=8,
)
NUM_BLOCKS = 23
CONFIG = builder.BuilderConfig(
    embed=EmbedConfig(document_length=24, batch_size=4, shard_blocks=5),
    poll_seconds=0.01,
    patience_seconds=PATIENCE,
)
SCANN = dataclasses.replace(CONFIG, scann=ScannAssets(num_queries=8))


def publish(store, blocks, retriever):
    return publish_retriever(store, retriever, blocks.fingerprint)


def index_series(store):
    return SnapshotSeries(store, INDEX_SERIES)


def read_embeddings(store, step):
    series = index_series(store)
    manifest = series.read_manifest(step)
    series.verify(manifest)
    return series.read_array(manifest, EMBEDDINGS)


def assert_embedded(store, retriever, blocks):
    found = read_embeddings(store, retriever.step)
    np.testing.assert_allclose(found, slow_embeddings(retriever, blocks), atol=2e-5)


def assert_one_sound_index(store, retriever, blocks):
    """Only the index of this retriever is left, and of other attempts nothing is."""
    step = retriever.step
    assert index_series(store).steps() == [step]
    assert_embedded(store, retriever, blocks)
    attempt = index_series(store).read_manifest(step).attempt
    folders = {name.split("/")[2] for name in store.list("index/data")}
    assert folders == {f"{step}-{attempt}"}


def random_params(config, seed=1):
    """Parameters of the right shapes; to initialise would be to compile."""
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    init = Retriever(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: generator.normal(0, 0.5, leaf.shape).astype(np.float32), shapes
    )


@functools.partial(jax.jit, static_argnames="config")
def embed_one(config, params, ids, segment_ids):
    return Retriever(config).apply(
        {"params": params}, ids, segment_ids, method=Retriever.embed_documents
    )


def one_by_one(config, params, store, block_ids, length):
    """Each document by itself, at the full length."""
    documents = [store.document_ids(np.array([b]), length) for b in block_ids]
    return np.concatenate([embed_one(config, params, *each) for each in documents])


def slow_embeddings(retriever, blocks, length=24):
    """The embedding of each block of a store."""
    all_of_them = range(blocks.num_blocks)
    return one_by_one(retriever.config, retriever.params, blocks, all_of_them, length)


_running = []


def run_in_thread(store, blocks, config=CONFIG):
    """Starts a builder; `end_builders` ends it, if nothing has done so before."""
    stop = threading.Event()
    job = builder.IndexBuilder(store, blocks, config)
    thread = threading.Thread(target=job.run, args=(stop,), daemon=True)
    thread.start()
    _running.append((thread, stop))
    return thread, stop


# Slow enough to be stopped anywhere: between two shards, and amid one.
_PROGRAM = """
import sys, threading, time
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import IndexBuilder
from realm_jax.storage import open_store
from tests.index.tiny_builder import CONFIG

store, blocks = open_store(sys.argv[1]), BlockStore.open(sys.argv[2])
job = IndexBuilder(store, blocks, CONFIG, lambda done, total: time.sleep(0.02))
sys.exit(0 if job.run(threading.Event()) else 1)
"""


def start_builder(store, blocks, **options):
    """Starts a builder in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, store.url(), str(blocks.directory)],
        cwd=tiny_run.ROOT,
        env=tiny_run.environment(),
        **options,
    )


def end_builders():
    """Ends what `run_in_thread` has started: none may outlive its test."""
    ended, _running[:] = _running[:], []
    for _, stop in ended:
        stop.set()
    for thread, _ in ended:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def given(retriever, *donors, **changes):
    """The retriever, with other model directories whose rows may be of use."""
    return dataclasses.replace(retriever, donors=donors, **changes)


def flip_a_bit(store, manifest, array):
    """Damages a file of an array of an index."""
    name = next(n for n in manifest.files if n.startswith(f"{array}/c/"))
    path = f"index/data/{manifest.step}-{manifest.attempt}/{name}"
    data = store.read(path)
    store.write(path, data[:-1] + bytes([data[-1] ^ 1]))
