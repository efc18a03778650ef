"""The index-builder job on a real block store, in a local model directory."""

import dataclasses
import logging
import threading
import time

import jax
import numpy as np
import pytest

from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.index import build, builder, heartbeat, reuse
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.retrievers import (
    RETRIEVER_SERIES,
    TrainedRetriever,
    load_retriever,
    publish_retriever,
)
from realm_jax.index.scann_assets import (
    RECALL,
    LowRecallError,
    ScannAssets,
    load_assets,
)
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.snapshots import (
    EMBEDDINGS,
    AlreadyCommittedError,
    DamagedSnapshotError,
    MismatchedSnapshotError,
    SnapshotSeries,
)
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.storage import open_store

WORDS = [f"word{number}" for number in range(40)]
VOCABULARY = WordPiece([*SPECIAL_PIECES, *WORDS])
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
    patience_seconds=30.0,
)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    generator = np.random.default_rng(0)

    def block(number):
        ids = generator.integers(len(SPECIAL_PIECES), VOCABULARY.size, 20)
        text = BlockText(f"title {number}", "body", str(number), [], [])
        return Block(ids[:2], ids[2 : 8 + number % 12], text)

    return write_blocks(
        tmp_path_factory.mktemp("corpus") / "blocks",
        map(block, range(NUM_BLOCKS)),
        vocabulary=VOCABULARY,
        chunk_length=24,
    )


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "model")


@pytest.fixture(scope="module")
def initial_params():
    # Of the right shapes; to initialise would be to compile.
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    init = Retriever(RETRIEVER).init
    shapes = jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]
    generator = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: generator.normal(0, 0.5, leaf.shape).astype(np.float32), shapes
    )


@pytest.fixture
def retriever_at(initial_params):
    """Makes a retriever whose parameters depend on its step."""

    def make(step, scale=1.0):
        factor = scale * (1 + step / 1000)
        params = jax.tree.map(lambda array: array * np.float32(factor), initial_params)
        return TrainedRetriever(step, RETRIEVER, params, VOCABULARY.fingerprint)

    return make


def publish(store, blocks, retriever):
    return publish_retriever(store, retriever, blocks.fingerprint)


def index_series(store):
    return SnapshotSeries(store, reuse.INDEX_SERIES)


def read_embeddings(store, step):
    series = index_series(store)
    manifest = series.read_manifest(step)
    series.verify(manifest)
    return series.read_array(manifest, EMBEDDINGS)


@jax.jit
def embed_one(params, ids, segment_ids):
    return Retriever(RETRIEVER).apply(
        {"params": params}, ids, segment_ids, method=Retriever.embed_documents
    )


def slow_embeddings(retriever, blocks):
    """Each document by itself, at the full length."""
    documents = [blocks.document_ids(np.array([b]), 24) for b in range(NUM_BLOCKS)]
    return np.concatenate([embed_one(retriever.params, *each) for each in documents])


def run_in_thread(store, blocks, config=CONFIG):
    stop = threading.Event()
    job = builder.IndexBuilder(store, blocks, config)
    thread = threading.Thread(target=job.run, args=(stop,), daemon=True)
    thread.start()
    return thread, stop


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_index_holds_every_block_embedded_by_the_published_retriever(
    store, blocks, retriever_at
):
    publish(store, blocks, retriever_at(7))
    loaded = load_retriever(store, 7)
    assert loaded.config == RETRIEVER
    manifest = builder.build_once(loaded, blocks, store, CONFIG)
    assert (manifest.step, manifest.count, manifest.dimension) == (7, NUM_BLOCKS, 8)
    assert manifest.corpus_fingerprint == blocks.fingerprint
    expected = slow_embeddings(retriever_at(7), blocks)
    np.testing.assert_allclose(read_embeddings(store, 7), expected, atol=2e-5)


def test_a_stopped_build_resumes_with_the_shards_it_lacks(
    store, blocks, retriever_at, monkeypatch
):
    embedded = []
    embed_shards = build.embed_shards

    def watched(embed, params, blocks, shards, config):
        for start, rows in embed_shards(embed, params, blocks, shards, config):
            embedded.append(start)
            yield start, rows

    monkeypatch.setattr(build, "embed_shards", watched)
    stop = threading.Event()
    progress = []

    def stop_after_two(done, num_blocks):
        progress.append((done, num_blocks))
        if done >= 10:
            stop.set()

    retriever = retriever_at(3)
    stopped = builder.build_once(
        retriever, blocks, store, CONFIG, stop=stop, on_progress=stop_after_two
    )
    assert stopped is None
    assert index_series(store).steps() == []
    assert progress == [(5, NUM_BLOCKS), (10, NUM_BLOCKS)]

    assert builder.build_once(retriever, blocks, store, CONFIG) is not None
    assert embedded == [0, 5, 10, 15, 20]
    resumed = read_embeddings(store, 3)

    other = open_store(store.url() + "-uninterrupted")
    builder.build_once(retriever, blocks, other, CONFIG)
    np.testing.assert_array_equal(read_embeddings(other, 3), resumed)


def test_a_job_that_dies_says_so_and_leaves_what_can_be_resumed(
    store, blocks, retriever_at
):
    publish(store, blocks, retriever_at(3))

    def interrupt(done, num_blocks):
        if done == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder.IndexBuilder(store, blocks, CONFIG, interrupt).run(threading.Event())
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"
    progress = []
    builder.build_once(
        load_retriever(store, 3),
        blocks,
        store,
        CONFIG,
        on_progress=lambda done, num_blocks: progress.append(done),
    )
    assert progress == [15, 20, 23]


def test_an_attempt_of_another_retriever_is_not_continued(store, blocks, retriever_at):
    stop = threading.Event()
    stop.set()
    assert not builder.build_once(
        retriever_at(3, scale=2.0), blocks, store, CONFIG, stop=stop
    )
    builder.build_once(retriever_at(3), blocks, store, CONFIG)
    expected = slow_embeddings(retriever_at(3), blocks)
    np.testing.assert_allclose(read_embeddings(store, 3), expected, atol=2e-5)


def test_a_committed_index_is_returned_but_never_that_of_another_retriever(
    store, blocks, retriever_at
):
    first = builder.build_once(retriever_at(3), blocks, store, CONFIG)
    again = builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert again.attempt == first.attempt
    with pytest.raises(AlreadyCommittedError):
        builder.build_once(retriever_at(3, scale=2.0), blocks, store, CONFIG)


def test_what_was_written_wrong_is_never_committed(
    store, blocks, retriever_at, monkeypatch
):
    embed_shards = build.embed_shards

    def shifted(*args):
        for start, rows in embed_shards(*args):
            yield start, np.roll(rows, 1, axis=0)

    monkeypatch.setattr(build, "embed_shards", shifted)
    with pytest.raises(DamagedSnapshotError, match=r"another embedding of block \d+"):
        builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert store.list(reuse.INDEX_SERIES) == []


def test_a_retriever_that_diverged_is_refused_and_the_next_is_built(
    store, blocks, retriever_at, caplog
):
    publish(store, blocks, retriever_at(1, scale=np.nan))
    with caplog.at_level(logging.WARNING):
        thread, _ = run_in_thread(store, blocks)
        wait_until(lambda: "step 1" in caplog.text)
        publish(store, blocks, retriever_at(2))
        wait_until(lambda: index_series(store).steps() == [2])
        Heartbeat(store, builder.TRAINER_ROLE).beat(2, "finished")
        thread.join(20)
    assert caplog.text.count("training has diverged") == 1
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    assert status.state == "finished"
    assert status.extra["index_step"] == 2
    assert "training has diverged" in status.extra["refused"]["1"]


def test_a_damaged_retriever_is_refused_and_the_next_is_built(
    store, blocks, retriever_at
):
    manifest = publish(store, blocks, retriever_at(1))
    name = f"{RETRIEVER_SERIES}/data/1-{manifest.attempt}/params.safetensors"
    data = bytearray(store.read(name))
    data[-1] ^= 1
    store.write(name, bytes(data))
    thread, _ = run_in_thread(store, blocks)

    def refused():
        status = read_heartbeat(store, builder.BUILDER_ROLE)
        return status is not None and "1" in status.extra["refused"]

    wait_until(refused)
    publish(store, blocks, retriever_at(2))
    wait_until(lambda: index_series(store).steps() == [2])
    Heartbeat(store, builder.TRAINER_ROLE).beat(2, "failed")
    thread.join(20)
    assert not thread.is_alive()


def test_a_step_withdrawn_and_taken_again_is_built_again(
    store, blocks, retriever_at, monkeypatch
):
    publish(store, blocks, retriever_at(5))
    load = builder.load_retriever

    def withdrawn_meanwhile(store, step):
        monkeypatch.setattr(builder, "load_retriever", load)
        store.delete(f"{RETRIEVER_SERIES}/commits/{step}.json")
        return load(store, step)

    monkeypatch.setattr(builder, "load_retriever", withdrawn_meanwhile)
    thread, stop = run_in_thread(store, blocks)
    wait_until(lambda: SnapshotSeries(store, RETRIEVER_SERIES).steps() == [])
    publish(store, blocks, retriever_at(5, scale=1.5))
    wait_until(lambda: index_series(store).steps() == [5])
    stop.set()
    thread.join(20)
    expected = slow_embeddings(retriever_at(5, scale=1.5), blocks)
    np.testing.assert_allclose(read_embeddings(store, 5), expected, atol=2e-5)


def test_only_the_newest_retriever_is_built(store, blocks, retriever_at):
    for step in (1, 2, 3):
        publish(store, blocks, retriever_at(step))
    thread, _ = run_in_thread(store, blocks)
    wait_until(lambda: index_series(store).steps() == [3])
    Heartbeat(store, builder.TRAINER_ROLE).beat(3, "finished")
    thread.join(20)
    assert index_series(store).steps() == [3]


def test_what_the_trainer_published_before_it_ended_is_built(
    store, blocks, retriever_at
):
    Heartbeat(store, builder.TRAINER_ROLE).beat(0)
    thread, _ = run_in_thread(store, blocks)
    wait_until(lambda: read_heartbeat(store, builder.BUILDER_ROLE) is not None)
    publish(store, blocks, retriever_at(4))
    Heartbeat(store, builder.TRAINER_ROLE).beat(4, "finished")
    thread.join(20)
    assert index_series(store).steps() == [4]


def test_the_heartbeat_of_a_former_run_does_not_end_the_job(
    store, blocks, retriever_at
):
    Heartbeat(store, builder.TRAINER_ROLE).beat(9, "finished")
    thread, stop = run_in_thread(store, blocks)
    wait_until(lambda: read_heartbeat(store, builder.BUILDER_ROLE) is not None)
    publish(store, blocks, retriever_at(10))
    wait_until(lambda: index_series(store).steps() == [10])
    assert thread.is_alive()
    stop.set()
    thread.join(20)
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "finished"


def test_a_silent_trainer_ends_the_job_and_waiting_does_not_spin(
    store, blocks, monkeypatch
):
    looks = []
    read = heartbeat.read_heartbeat
    monkeypatch.setattr(
        heartbeat, "read_heartbeat", lambda *args: looks.append(args) or read(*args)
    )
    config = dataclasses.replace(CONFIG, poll_seconds=0.1, patience_seconds=0.5)
    builder.IndexBuilder(store, blocks, config).run(threading.Event())
    assert 3 <= len(looks) <= 10


def test_garbage_goes_but_not_what_the_trainer_names(store, blocks, retriever_at):
    Heartbeat(store, builder.TRAINER_ROLE).beat(5, index_step=1, kept_index_steps=[2])
    for step in range(1, 6):
        publish(store, blocks, retriever_at(step))
        builder.build_once(retriever_at(step), blocks, store, CONFIG)
    builder.collect_garbage(store, keep=1)
    assert index_series(store).steps() == [1, 2, 5]
    assert SnapshotSeries(store, RETRIEVER_SERIES).steps() == [5]
    read_embeddings(store, 1)


def test_a_retriever_of_another_vocabulary_ends_the_job(store, blocks, retriever_at):
    foreign = dataclasses.replace(retriever_at(1), vocabulary_fingerprint="f" * 64)
    publish(store, blocks, foreign)
    with pytest.raises(MismatchedSnapshotError, match="has ffffffffffff"):
        builder.IndexBuilder(store, blocks, CONFIG).run(threading.Event())
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"


def test_documents_longer_than_the_model_are_bad_input(store, blocks, retriever_at):
    config = dataclasses.replace(CONFIG, embed=EmbedConfig(document_length=33))
    with pytest.raises(MismatchedSnapshotError, match=r"33 positions.* 45 and 32"):
        builder.build_once(retriever_at(1), blocks, store, config)


def test_parameters_of_another_shape_are_named(store, blocks, retriever_at):
    retriever = retriever_at(1)
    smaller = dataclasses.replace(RETRIEVER, projection_size=4)
    publish(store, blocks, dataclasses.replace(retriever, config=smaller))
    with pytest.raises(
        MismatchedSnapshotError, match=r"projection/bias of shape \(4,\)"
    ):
        load_retriever(store, 1)


def test_publishing_a_step_again_keeps_the_first(store, blocks, retriever_at):
    first = publish(store, blocks, retriever_at(1))
    again = publish(store, blocks, retriever_at(1))
    assert again.attempt == first.attempt
    foreign = dataclasses.replace(retriever_at(1), vocabulary_fingerprint="f" * 64)
    for other in (foreign, retriever_at(1, scale=1.5)):
        with pytest.raises(AlreadyCommittedError):
            publish(store, blocks, other)


@pytest.mark.parametrize("republished", [False, True])
def test_a_retriever_withdrawn_while_it_is_embedded_gets_no_index(
    store, blocks, retriever_at, republished
):
    publish(store, blocks, retriever_at(4))
    stop = threading.Event()

    def withdraw(done, total):
        if done < total or stop.is_set():
            return
        stop.set()
        SnapshotSeries(store, RETRIEVER_SERIES).forget_after(3)
        if republished:
            publish(store, blocks, retriever_at(4, scale=1.5))

    builder.IndexBuilder(store, blocks, CONFIG, withdraw).run(stop)
    assert stop.is_set()
    assert index_series(store).steps() == []


def test_the_index_of_another_retriever_is_dropped_and_made_anew(
    store, blocks, retriever_at
):
    builder.build_once(retriever_at(4, scale=1.5), blocks, store, CONFIG)
    publish(store, blocks, retriever_at(4))
    thread, stop = run_in_thread(store, blocks)
    wanted = retriever_at(4).params_crc32c()

    def is_right():
        steps = index_series(store).steps()
        return steps == [4] and (
            index_series(store).read_manifest(4).metadata["retriever_crc32c"] == wanted
        )

    wait_until(is_right)
    stop.set()
    thread.join(20)


SCANN = dataclasses.replace(CONFIG, scann=ScannAssets(num_queries=8))


def test_scann_is_trained_judged_and_loaded_as_it_was(store, blocks, retriever_at):
    manifest = builder.build_once(retriever_at(1), blocks, store, SCANN)
    series = index_series(store)
    assert manifest.metadata[RECALL] == 1.0
    assert series.read_manifest(1).metadata[RECALL] == 1.0
    series.verify(manifest)
    loaded = load_assets(series, manifest)
    embeddings = read_embeddings(store, 1)
    queries = embeddings[::5] + np.float32(0.01)
    found = loaded.search(queries, 4)
    expected = DeviceSearcher(embeddings).search(queries, 4)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(loaded.sample(), DeviceSearcher(embeddings).sample())
    # A second call finds it there.
    again = builder.build_once(retriever_at(1), blocks, store, SCANN)
    assert again.attempt == manifest.attempt
    assert (
        load_assets(series, builder.build_once(retriever_at(2), blocks, store, CONFIG))
        is None
    )


def test_an_index_in_which_scann_finds_too_little_is_not_published(
    store, blocks, retriever_at
):
    config = dataclasses.replace(CONFIG, scann=ScannAssets(min_recall=1.1))
    publish(store, blocks, retriever_at(1))
    with pytest.raises(LowRecallError, match=r"110% of the 8 best .* it finds 100\.0%"):
        builder.build_once(retriever_at(1), blocks, store, config)
    assert index_series(store).steps() == []
    assert not store.list("index/data")
    Heartbeat(store, builder.TRAINER_ROLE).beat(0, "running")
    job_config = dataclasses.replace(config, patience_seconds=0.2)
    job = builder.IndexBuilder(store, blocks, job_config)
    job.run(threading.Event())
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    assert "raise ScannConfig" in status.extra["refused"]["1"]


def test_a_damaged_asset_is_refused_by_name(store, blocks, retriever_at):
    manifest = builder.build_once(retriever_at(1), blocks, store, SCANN)
    folder = f"index/data/1-{manifest.attempt}"
    for name in [n for n in manifest.files if n.startswith("scann/")]:
        data = store.read(f"{folder}/{name}")
        store.write(f"{folder}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedSnapshotError, match=name):
            load_assets(index_series(store), manifest)
        store.write(f"{folder}/{name}", data)
