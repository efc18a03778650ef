"""The index-builder job on a real block store, in a local model directory."""

import dataclasses
import logging
import re
import threading
from unittest import mock

import numpy as np
import pytest

from realm_jax.errors import NotReadyError
from realm_jax.index import build, builder, heartbeat
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.manifest import (
    AlreadyCommittedError,
    DamagedSnapshotError,
    MismatchedSnapshotError,
)
from realm_jax.index.retrievers import load_retriever
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.storage import MissingObjectError, open_store
from tests.index.tiny_builder import (
    CONFIG,
    NUM_BLOCKS,
    RETRIEVER,
    assert_embedded,
    given,
    index_series,
    publish,
    read_embeddings,
    run_in_thread,
)
from tests.waiting import PATIENCE, Clock, wait_until


def test_a_stopped_build_resumes(store, blocks, retriever_at, monkeypatch):
    embedded, progress, stop = [], [], threading.Event()
    embed_shards = build.embed_shards

    def watched(embed, params, blocks, shards, config):
        for start, rows in embed_shards(embed, params, blocks, shards, config):
            embedded.append(start)
            yield start, rows

    def stop_after_two(done, num_blocks):
        progress.append((done, num_blocks))
        if done >= 10:
            stop.set()

    monkeypatch.setattr(build, "embed_shards", watched)
    publish(store, blocks, retriever_at(3))
    retriever = load_retriever(store, 3)
    assert retriever.config == RETRIEVER
    stopped = builder.build_once(
        retriever, blocks, store, CONFIG, stop=stop, on_progress=stop_after_two
    )
    assert stopped is None
    assert index_series(store).steps() == []
    assert progress == [(5, NUM_BLOCKS), (10, NUM_BLOCKS)]
    manifest = builder.build_once(retriever, blocks, store, CONFIG)
    assert embedded == [0, 5, 10, 15, 20]
    assert (manifest.step, manifest.count, manifest.dimension) == (3, NUM_BLOCKS, 8)
    assert manifest.corpus_fingerprint == blocks.fingerprint
    assert_embedded(store, retriever_at(3), blocks)
    other = open_store(store.url() + "-uninterrupted")
    builder.build_once(retriever, blocks, other, CONFIG)
    np.testing.assert_array_equal(read_embeddings(other, 3), read_embeddings(store, 3))


def test_a_job_that_dies_says_so(store, blocks, retriever_at):
    publish(store, blocks, retriever_at(3))
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        builder.IndexBuilder(store, blocks, CONFIG, interrupt).run(threading.Event())
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"


def test_nothing_of_another_retriever_is_used(store, blocks, retriever_at):
    stop = threading.Event()
    stop.set()
    other = retriever_at(3, scale=2.0)
    assert not builder.build_once(other, blocks, store, CONFIG, stop=stop)
    first = builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert_embedded(store, retriever_at(3), blocks)
    again = builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert again.attempt == first.attempt
    with pytest.raises(AlreadyCommittedError):
        builder.build_once(other, blocks, store, CONFIG)


def test_wrong_rows_are_never_committed(store, blocks, retriever_at, monkeypatch):
    embed_shards = build.embed_shards

    def shifted(*args):
        for start, rows in embed_shards(*args):
            yield start, np.roll(rows, 1, axis=0)

    monkeypatch.setattr(build, "embed_shards", shifted)
    with pytest.raises(DamagedSnapshotError, match=r"another embedding of block \d+"):
        builder.build_once(retriever_at(3), blocks, store, CONFIG)
    assert store.list(INDEX_SERIES) == []


def test_a_diverged_retriever_is_refused(store, blocks, retriever_at, caplog):
    publish(store, blocks, retriever_at(1, scale=np.nan))
    with caplog.at_level(logging.WARNING):
        thread, _ = run_in_thread(store, blocks)
        wait_until(lambda: "step 1" in caplog.text)
        publish(store, blocks, retriever_at(2))
        wait_until(lambda: index_series(store).steps() == [2])
        Heartbeat(store, builder.TRAINER_ROLE).beat(2, "finished")
        thread.join(PATIENCE)
    assert caplog.text.count("training has diverged") == 1
    status = read_heartbeat(store, builder.BUILDER_ROLE)
    assert status.state == "finished"
    assert status.extra["index_step"] == 2
    assert "training has diverged" in status.extra["refused"]["1"]


def test_a_step_taken_again_is_built_again(store, blocks, retriever_at, monkeypatch):
    publish(store, blocks, retriever_at(5))
    load = builder.load_retriever

    def withdrawn_meanwhile(store, step):
        monkeypatch.setattr(builder, "load_retriever", load)
        store.delete(f"{RETRIEVER_SERIES}/commits/{step}.json")
        return load(store, step)

    monkeypatch.setattr(builder, "load_retriever", withdrawn_meanwhile)
    run_in_thread(store, blocks)
    wait_until(lambda: SnapshotSeries(store, RETRIEVER_SERIES).steps() == [])
    publish(store, blocks, retriever_at(5, scale=1.5))
    wait_until(lambda: index_series(store).steps() == [5])
    assert_embedded(store, retriever_at(5, scale=1.5), blocks)


def test_the_newest_and_the_last_retriever_are_built(store, blocks, retriever_at):
    Heartbeat(store, builder.TRAINER_ROLE).beat(0)
    for step in (1, 2, 3):
        publish(store, blocks, retriever_at(step))
    thread, _ = run_in_thread(store, blocks)
    wait_until(lambda: index_series(store).steps() == [3])
    publish(store, blocks, retriever_at(4))
    Heartbeat(store, builder.TRAINER_ROLE).beat(4, "finished")
    thread.join(PATIENCE)
    assert index_series(store).steps() == [3, 4]


@pytest.mark.parametrize(("state", "built"), [("finished", [5]), ("running", [4, 5])])
def test_an_index_of_no_use_is_given_up(store, blocks, retriever_at, state, built):
    """The trainer ends while the index before its last one is being made."""
    trainer = Heartbeat(store, builder.TRAINER_ROLE)
    publish(store, blocks, retriever_at(4))
    shards = []

    def end(done, total):
        shards.append(done)
        if len(shards) == 1:
            publish(store, blocks, retriever_at(5))
            trainer.beat(5, state)
        elif index_series(store).steps()[-1:] == [5] or done == total:
            trainer.beat(5, "finished")

    assert builder.IndexBuilder(store, blocks, CONFIG, end).run(threading.Event())
    assert index_series(store).steps() == built
    per_index = -(-blocks.num_blocks // CONFIG.embed.shard_blocks)
    assert len(shards) == (per_index + 1 if state == "finished" else 2 * per_index)


PATIENT = dataclasses.replace(
    CONFIG, poll_seconds=1.0, patience_seconds=5.0, wait_seconds=10.0
)


class Pauses(threading.Event):
    """A stop that comes far too late; its waits are seconds of a clock, and noted."""

    def __init__(self):
        super().__init__()
        self.clock = Clock(tick=0.001)
        self.seconds = []

    def wait(self, timeout=0.0):
        self.seconds.append(timeout)
        self.clock.seconds += timeout
        if len(self.seconds) == 50:
            self.set()
        return self.is_set()


@pytest.fixture
def pauses(monkeypatch):
    """With the clock of builder and heartbeats."""
    pauses = Pauses()
    for module in (builder, heartbeat):
        monkeypatch.setattr(module, "time", pauses.clock)
    return pauses


def not_finished(store, how):
    """Expects a builder to end as one that is to be started again."""
    message = f"the trainer in {store.url()} to finish, but it {how}; start it, and "
    return pytest.raises(NotReadyError, match=re.escape(message))


def test_a_silent_trainer_ends_the_job_and_waiting_does_not_spin(store, blocks, pauses):
    job = builder.IndexBuilder(store, blocks, PATIENT)
    Heartbeat(store, builder.TRAINER_ROLE).beat(0)
    with not_finished(store, "was not heard of for 5 s"):
        job.run(pauses)
    assert pauses.seconds == [1.0] * 5
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"


def test_a_trainer_that_failed_may_come_back(store, blocks, retriever_at, pauses):
    """It may be started again, such as after exit code 75, and go on."""
    trainer = Heartbeat(store, builder.TRAINER_ROLE)
    publish(store, blocks, retriever_at(1))
    job = builder.IndexBuilder(store, blocks, PATIENT)
    trainer.beat(1, "failed")
    with not_finished(store, "failed"):
        job.run(pauses)
    assert index_series(store).steps() == [1]
    assert pauses.seconds == []
    job = builder.IndexBuilder(store, blocks, PATIENT)
    publish(store, blocks, retriever_at(2))
    trainer.beat(2, "finished")
    assert job.run(pauses)
    assert index_series(store).steps() == [1, 2]


def test_a_trainer_that_never_came_is_waited_for_longer(store, blocks, pauses):
    Heartbeat(store, builder.TRAINER_ROLE).beat(0, "finished")  # Of a former run.
    message = r"none gave a sign of life within 10 s; .*raise BuilderConfig\.wait_sec"
    with pytest.raises(NotReadyError, match=message):
        builder.IndexBuilder(store, blocks, PATIENT).run(pauses)
    assert pauses.seconds == [1.0] * 10
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"


def test_patience_begins_with_the_first_retriever(
    store, blocks, retriever_at, pauses, monkeypatch
):
    wait = pauses.wait

    def publish_late(timeout=None):
        if len(pauses.seconds) == 8:
            publish(store, blocks, retriever_at(1))
        return wait(timeout)

    monkeypatch.setattr(pauses, "wait", publish_late)
    with not_finished(store, "was not heard of for 5 s"):
        builder.IndexBuilder(store, blocks, PATIENT).run(pauses)
    assert index_series(store).steps() == [1]
    # In the ninth pause it was published, and five passed after it was found.
    assert pauses.seconds == [1.0] * (9 + 5)


def test_garbage_of_a_killed_builder_is_collected(store, blocks, retriever_at):
    for step in range(1, 5):
        publish(store, blocks, retriever_at(step))
        builder.build_once(retriever_at(step), blocks, store, CONFIG)
    Heartbeat(store, builder.TRAINER_ROLE).beat(4, index_step=1)
    config = dataclasses.replace(CONFIG, patience_seconds=0.1)
    with not_finished(store, "was not heard of for 0.1 s"):
        builder.IndexBuilder(store, blocks, config).run(threading.Event())
    assert index_series(store).steps() == [1, 3, 4]
    assert SnapshotSeries(store, RETRIEVER_SERIES).steps() == [3, 4]
    read_embeddings(store, 1)


def test_a_retriever_that_does_not_fit_is_refused(store, blocks, retriever_at):
    retriever = retriever_at(1)
    config = dataclasses.replace(CONFIG, embed=EmbedConfig(document_length=33))
    with pytest.raises(MismatchedSnapshotError, match=r"33 positions.* 45 and 32"):
        builder.build_once(retriever, blocks, store, config)
    smaller = dataclasses.replace(RETRIEVER, projection_size=4)
    publish(store, blocks, dataclasses.replace(retriever, config=smaller))
    with pytest.raises(
        MismatchedSnapshotError, match=r"projection/bias of shape \(4,\)"
    ):
        load_retriever(store, 1)
    foreign = dataclasses.replace(retriever_at(2), vocabulary_fingerprint="f" * 64)
    publish(store, blocks, foreign)
    with pytest.raises(MismatchedSnapshotError, match="has ffffffffffff"):
        builder.IndexBuilder(store, blocks, CONFIG).run(threading.Event())
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "failed"


def test_publishing_a_step_again_keeps_the_first(store, blocks, retriever_at):
    first = publish(store, blocks, given(retriever_at(1), "/runs/before"))
    assert publish(store, blocks, given(retriever_at(1), "/moved/before")) == first
    assert load_retriever(store, 1).donors == ("/runs/before",)
    foreign = dataclasses.replace(retriever_at(1), vocabulary_fingerprint="f" * 64)
    for other in (foreign, retriever_at(1, scale=1.5)):
        with pytest.raises(AlreadyCommittedError):
            publish(store, blocks, other)


@pytest.mark.parametrize("republished", [False, True])
def test_a_withdrawn_retriever_gets_no_index(store, blocks, retriever_at, republished):
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
    assert read_heartbeat(store, builder.BUILDER_ROLE).state == "finished"


def test_the_index_of_another_retriever_is_made_anew(store, blocks, retriever_at):
    builder.build_once(retriever_at(4, scale=1.5), blocks, store, CONFIG)
    publish(store, blocks, retriever_at(4))
    run_in_thread(store, blocks)
    wanted = retriever_at(4).params_crc32c()

    def is_right():
        try:
            manifest = index_series(store).read_manifest(4)
        except MissingObjectError:
            return False  # Dropped, and not made anew yet.
        return manifest.metadata["retriever_crc32c"] == wanted

    wait_until(is_right)
    assert index_series(store).steps() == [4]
