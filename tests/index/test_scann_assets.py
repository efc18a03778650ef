"""What a builder makes for trainers that search with ScaNN."""

import dataclasses
import threading

import numpy as np
import pytest

from realm_jax.index import builder, scann_assets
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.scann_assets import RECALL, ScannAssets, load_assets
from realm_jax.index.scann_searcher import LowRecallError, ScannConfig
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.snapshots import DamagedSnapshotError
from tests.index.tiny_builder import (
    CONFIG,
    SCANN,
    index_series,
    publish,
    read_embeddings,
)


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
    store, blocks, retriever_at, monkeypatch
):
    config = dataclasses.replace(CONFIG, scann=ScannAssets(min_recall=1.0))
    monkeypatch.setattr(scann_assets, "share_found", lambda found, exact: 0.5)
    publish(store, blocks, retriever_at(1))
    with pytest.raises(LowRecallError, match=r"100% of the 8 best .* it finds 50\.0%"):
        builder.build_once(retriever_at(1), blocks, store, config)
    assert index_series(store).steps() == []
    assert not store.list("index/data")
    Heartbeat(store, builder.TRAINER_ROLE).beat(0, "running")
    job_config = dataclasses.replace(config, patience_seconds=0.2)
    job = builder.IndexBuilder(store, blocks, job_config)
    job.run(threading.Event())
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    assert "raise ScannConfig" in status.extra["refused"]["1"]


def test_the_choice_for_beginnings_of_blocks_is_loaded(store, blocks, retriever_at):
    tree = ScannConfig(brute_force_below=0, recall=0.8)
    scann = ScannAssets(tree, min_recall=0.5, num_queries=16)
    config = dataclasses.replace(CONFIG, scann=scann)
    manifest = builder.build_once(retriever_at(1), blocks, store, config)
    assert manifest.metadata[RECALL] >= scann.min_recall
    loaded = load_assets(index_series(store), manifest)
    # 23 blocks, so 8 leaves.
    assert 1 <= loaded.visit.leaves <= 8
    assert loaded.config == scann.config
    # Beginnings of blocks are asked for more than questions.
    assets = ScannAssets(ScannConfig(recall=0.95))
    assert 0.95 + 0.05 / 2 < assets.recall_of_beginnings() < 1
    # A recall out of reach publishes no index.
    tree = ScannConfig(brute_force_below=0, searched_share=0.01, recall=1.0)
    config = dataclasses.replace(CONFIG, scann=ScannAssets(tree, num_queries=16))
    with pytest.raises(LowRecallError, match=r"100\.0% .*lower ScannConfig\.recall"):
        builder.build_once(retriever_at(2), blocks, store, config)
    assert index_series(store).steps() == [1]
    assert not any("/2-" in name for name in store.list("index/data"))


def test_a_damaged_asset_is_refused_by_name(store, blocks, retriever_at):
    manifest = builder.build_once(retriever_at(1), blocks, store, SCANN)
    folder = f"index/data/1-{manifest.attempt}"
    for name in [n for n in manifest.files if n.startswith("scann/")]:
        data = store.read(f"{folder}/{name}")
        store.write(f"{folder}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedSnapshotError, match=name):
            load_assets(index_series(store), manifest)
        store.write(f"{folder}/{name}", data)
