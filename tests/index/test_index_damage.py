"""Every file that a builder and a trainer write, damaged in turn.

Whatever is damaged is refused by its name, and what is in use serves on.
SOAK_DAMAGE_SEED chooses the bits, and how much is cut off.
"""

import itertools
import logging
import os
import random

import numpy as np
import pytest

from realm_jax.index import builder
from realm_jax.index.follower import IndexFollower
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError, Expectation
from realm_jax.index.retrievers import load_retriever
from realm_jax.index.scann_assets import load_assets
from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.index.source import LoadedIndex
from tests.index import tiny_builder
from tests.index.tiny_builder import (
    CONFIG,
    IN_BOTH,
    SCANN,
    index_series,
    publish,
    run_in_thread,
)
from tests.waiting import PATIENCE, wait_until

RNG = random.Random(int(os.environ.get("SOAK_DAMAGE_SEED", "0")))


def flip(store, name):
    data = bytearray(store.read(name))
    data[RNG.randrange(len(data))] ^= 1 << RNG.randrange(8)
    store.write(name, bytes(data))


def truncate(store, name):
    data = store.read(name)
    store.write(name, data[: RNG.randrange(len(data))])


def remove(store, name):
    store.delete(name)


DAMAGES = (flip, truncate, remove)


def follow(series, blocks):
    expected = Expectation(blocks.fingerprint, dimension=8, count=blocks.num_blocks)

    def load_manifest(manifest):
        series.verify(manifest, expected)
        searcher = load_assets(series, manifest)
        assert searcher is not None
        series.read_array(manifest, EMBEDDINGS)
        return LoadedIndex(searcher, manifest)

    return IndexFollower(series, load_manifest, poll_seconds=0.01, newer_than=1)


def test_every_file_of_an_index_is_refused_by_name(store, blocks, retriever_at):
    builder.build_once(retriever_at(1), blocks, store, CONFIG)
    manifest = builder.build_once(retriever_at(2), blocks, store, SCANN)
    series = index_series(store)
    folder = f"index/data/2-{manifest.attempt}"
    commit = "index/commits/2.json"
    names = [*(f"{folder}/{name}" for name in manifest.files), commit]
    written = {n for n in store.list() if n.startswith((folder, commit))}
    assert written - set(names) == {n for n in written if "/progress/" in n}
    for part in ("embeddings/zarr.json", "block_hashes/c/4/0", "scann/"):
        assert any(part in name for name in names)
    for name, damage in itertools.product(names, DAMAGES):
        sound = store.read(name)
        damage(store, name)
        with follow(series, blocks) as follower:
            if (name, damage) == (commit, remove):
                # Without its commit there is no snapshot.
                wait_until(lambda f=follower: f._looks >= 2)
                assert follower.refused == {}
            else:
                wait_until(lambda f=follower: f.refused)
                assert store.url(name) in follower.refused[2]
                assert "\n" not in follower.refused[2]
            # The trainer keeps index 1.
            assert follower.take() is None
        store.write(name, sound)
    with follow(series, blocks) as follower:
        assert follower.wait_for_first(PATIENCE).manifest == manifest
        assert follower.refused == {}


def test_an_index_whose_commit_cannot_be_read_is_made_anew_from_its_rows(
    store, blocks, retriever_at, embedded, monkeypatch, caplog
):
    """The trainer that could not use it is given one, however old its rows are."""
    monkeypatch.setattr(SnapshotSeries, "_idle_seconds", lambda *_: 1e6)
    publish(store, blocks, retriever_at(2))
    lost = builder.build_once(retriever_at(2), blocks, store, SCANN)
    series, commit = index_series(store), "index/commits/2.json"
    rows = series.read_array(lost, EMBEDDINGS)
    flip(store, commit)
    embedded.clear()
    with follow(series, blocks) as follower, caplog.at_level(logging.WARNING):
        wait_until(lambda: follower.refused)
        thread, stop = run_in_thread(store, blocks, SCANN)
        taken = follower.wait_for_first(PATIENCE)
        stop.set()
        thread.join(PATIENCE)
    assert taken.manifest.attempt != lost.attempt
    np.testing.assert_array_equal(series.read_array(taken.manifest, EMBEDDINGS), rows)
    # None to be written, and those of the sample that is compared.
    assert embedded == [0, SCANN.sampled_blocks]
    (withdrawn,) = (line for line in caplog.messages if "is withdrawn" in line)
    assert store.url(commit) in withdrawn
    # Another builder that saw the damage, too, comes too late to do harm.
    assert not series.withdraw_damaged(2)
    assert series.read_manifest(2) == taken.manifest


def refuses(store, step, name):
    """Whether the builder says of a retriever that this file of it is damaged."""
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    return status is not None and name in status.extra["refused"].get(str(step), "")


def build_until_refused(store, blocks, name):
    store.delete(f"jobs/{builder.BUILDER_ROLE}.json")
    thread, stop = run_in_thread(store, blocks)
    wait_until(lambda: refuses(store, 2, name))
    stop.set()
    thread.join(PATIENCE)


def test_every_file_of_a_retriever_is_refused_by_name(store, blocks, retriever_at):
    manifest = publish(store, blocks, retriever_at(2))
    commit = f"{RETRIEVER_SERIES}/commits/2.json"
    names = [commit]
    names += [f"retriever/data/2-{manifest.attempt}/{n}" for n in manifest.files]
    assert len(names) == 2
    for name, damage in itertools.product(names, DAMAGES):
        sound = store.read(name)
        damage(store, name)
        # Without its commit the retriever is not there, so nothing is refused.
        wanted = "" if (name, damage) == (commit, remove) else store.url(name)
        if wanted:
            with pytest.raises(DamagedSnapshotError) as caught:
                load_retriever(store, 2)
            assert wanted in str(caught.value)
        build_until_refused(store, blocks, wanted)
        assert index_series(store).steps() == []
        store.write(name, sound)
    found = load_retriever(store, 2)
    assert found.params_crc32c() == retriever_at(2).params_crc32c()


@pytest.mark.soak
@IN_BOTH
def test_a_job_refuses_every_damaged_retriever(store, donor, blocks, retriever_at):
    """A process of its own, to which one damaged retriever after the other comes."""
    ways = [flip] * 20 + [truncate] * 5
    with tiny_builder.start_builder(store, blocks) as job:
        try:
            for step, way in enumerate([*ways, *ways], start=1):
                # The builder waits for a trainer that is alive only.
                Heartbeat(store, "trainer").beat(step)
                manifest = publish(donor, blocks, retriever_at(step))
                commit = f"retriever/commits/{step}.json"
                folder = f"retriever/data/{step}-{manifest.attempt}"
                names = [f"{folder}/{name}" for name in manifest.files]
                damaged = commit if step <= len(ways) else RNG.choice(names)
                way(donor, damaged)
                for name in (*names, commit):
                    store.write(name, donor.read(name))
                wanted = step, store.url(damaged)
                wait_until(lambda wanted=wanted: refuses(store, *wanted))
            assert job.poll() is None
            publish(store, blocks, retriever_at(step + 1))
            wait_until(lambda: index_series(store).steps() == [step + 1])
        finally:
            job.kill()


def test_a_retriever_may_be_damaged_after_its_index(store, blocks, retriever_at):
    publish(store, blocks, retriever_at(1))
    builder.build_once(retriever_at(1), blocks, store, CONFIG)
    flip(store, f"{RETRIEVER_SERIES}/commits/1.json")
    made = index_series(store).read_manifest(1)
    run_in_thread(store, blocks)
    publish(store, blocks, retriever_at(2))
    wait_until(lambda: 2 in index_series(store).steps())
    assert SnapshotSeries(store, RETRIEVER_SERIES).latest_step() == 2
    assert index_series(store).read_manifest(1) == made
