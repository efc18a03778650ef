import dataclasses
import functools
import itertools
import os
import threading
import types
from unittest import mock

import jax
import numpy as np
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.errors import NotReadyError, StoppedError
from realm_jax.index import follower, heartbeat
from realm_jax.index.builder import BUILDER_ROLE, TRAINER_ROLE, collect_garbage
from realm_jax.index.heartbeat import Heartbeat, Listener, read_heartbeat
from realm_jax.index.manifest import AlreadyCommittedError, MismatchedSnapshotError
from realm_jax.index.retrievers import load_retriever
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.index.source import IndexSource
from realm_jax.storage import UnavailableStoreError, open_store
from realm_jax.training import index_client
from realm_jax.training.index_client import IndexClient
from tests.tiny_world import EMBED, NEVER, assert_same_bits
from tests.training.runs import drawn_params, towers_of
from tests.waiting import PATIENCE, Clock, wait_until


def make_source(store, corpus):
    return IndexSource(store, corpus, towers_of(corpus), EMBED, "device")


@pytest.fixture(scope="module")
def params(corpus):
    return jax.device_get(drawn_params(corpus)["retriever"])


@pytest.fixture
def source(tmp_path, corpus):
    return make_source(open_store(tmp_path / "model"), corpus)


@pytest.fixture
def client(source):
    return IndexClient(source, NEVER)


@pytest.fixture(autouse=True)
def _polls_often(monkeypatch):
    often = functools.partial(follower.IndexFollower, poll_seconds=0.01)
    monkeypatch.setattr(index_client, "IndexFollower", often)


@pytest.fixture
def clock(monkeypatch):
    """The clock of client and heartbeats."""
    clock = Clock()
    for module in (index_client, heartbeat):
        monkeypatch.setattr(module, "time", clock)
    return clock


def louder(params):
    return jax.tree.map(lambda x: 2 * x, params)


def steps(source, name=INDEX_SERIES):
    return SnapshotSeries(source.model_store, name).steps()


def test_an_index_is_built_once_and_loaded_for_a_retriever_of_its_size(source, params):
    assert source.load(3) is None
    built = source.build(3, params)
    assert source.build(3, params).manifest == built.manifest
    with pytest.raises(AlreadyCommittedError, match="another run"):
        source.build(3, louder(params))
    assert steps(source) == [3]
    assert source.load(3).manifest == built.manifest
    wider = dataclasses.replace(source.config, projection_size=16)
    with pytest.raises(MismatchedSnapshotError, match="16"):
        dataclasses.replace(source, config=wider).load(3)


def test_another_corpus_has_indexes_of_its_own(source, params, other_world):
    source.build(0, params)
    of_other = make_source(source.model_store, BlockStore.open(other_world.corpus))
    assert of_other.load(0) is None
    of_other.build(0, params)
    for one in (source, of_other):
        assert one.load(0).manifest.corpus_fingerprint == one.corpus.fingerprint


def test_a_retriever_is_published_once_by_one_run(source, client, params):
    client.publish(4, params)
    client.publish(4, params)
    with pytest.raises(AlreadyCommittedError, match="another MODEL_DIR"):
        client.publish(4, louder(params))
    assert steps(source, RETRIEVER_SERIES) == [4]
    assert_same_bits(load_retriever(source.model_store, 4).params, params)


def test_later_snapshots_are_forgotten_in_both_series(source, client, params):
    for step in (2, 4):
        client.publish(step, params)
        client.build(step, params)
    client.forget_after(3)
    assert steps(source) == [2]
    assert steps(source, RETRIEVER_SERIES) == [2]


def test_garbage_is_not_what_checkpoints_resume_with(source, client, params):
    client.build(0, params)
    client.use(0)
    client.keep((0,))
    for step in (1, 2, 3):
        client.build(step, params)
    assert steps(source) == [0, 2, 3]


def test_the_first_index_of_a_run_that_goes_on_from_another_stage_is_kept(
    source, params, tmp_path
):
    """It is of the retriever that the stage before ended with."""
    after = dataclasses.replace(source, donors=[str(tmp_path / "before")])
    with IndexClient(after, NEVER) as client:
        client.build(0, params)
        client.use(0)
        for step in (1, 2, 3):
            client.build(step, params)
            client.use(step)
            client.keep((1, step))
    assert steps(source) == [0, 1, 2, 3]
    # Also when the run was done before, and is only started again.
    with IndexClient(after, NEVER) as client:
        client.finish(3, params)
    SnapshotSeries(source.model_store, INDEX_SERIES).forget(1)
    collect_garbage(source.model_store, keep=2)
    assert steps(source) == [0, 2, 3]


def test_a_published_retriever_says_where_its_index_may_be_copied_from(
    source, params, monkeypatch, tmp_path
):
    """As places that a builder with another working directory finds."""
    monkeypatch.chdir(tmp_path)
    after = dataclasses.replace(source, donors=["runs/before", "gs://mine/before"])
    IndexClient(after, NEVER).publish(0, params)
    expected = (str(tmp_path / "runs/before"), "gs://mine/before")
    assert load_retriever(source.model_store, 0).donors == expected


def test_the_last_word_is_finished_only_if_all_was_done(source, params):
    def said():
        return read_heartbeat(source.model_store, TRAINER_ROLE)

    # A resumed trainer never says that it is at the beginning.
    with IndexClient(source, NEVER, step=70) as client:
        client.use(0)
        client.keep((0,))
        assert (said().state, said().step) == ("running", 70)
        assert said().extra["index_step"] == 0
        client.beat(75)
    assert said().state == "failed"
    with IndexClient(source, NEVER) as client:
        client.finish(80, params)
    assert (said().state, said().step) == ("finished", 80)
    assert steps(source, RETRIEVER_SERIES) == [80]
    with pytest.raises(RuntimeError, match="boom"), IndexClient(source, NEVER):
        raise RuntimeError("boom")
    assert said().state == "failed"


def test_a_store_that_is_away_neither_ends_training_nor_hides_an_error(
    source, clock, client, monkeypatch, caplog
):
    client._builder = Listener(source.model_store, BUILDER_ROLE)
    client.beat(1)
    clock.seconds += 100
    away = mock.Mock(side_effect=UnavailableStoreError("503"))
    with monkeypatch.context() as patched:
        for method in ("read", "write"):
            patched.setattr(source.model_store, method, away)
        client.beat(2)
        # One to write, one to listen to the builder; neither at the next update.
        assert away.call_count == 2
        client.beat(3)
        assert away.call_count == 2
        clock.seconds += 100
        client.beat(4)
        assert away.call_count == 4
    clock.seconds += 100
    client.beat(5)
    assert read_heartbeat(source.model_store, TRAINER_ROLE).step == 5
    monkeypatch.setattr(source.model_store, "write", away)
    with pytest.raises(RuntimeError, match="boom"), client:
        raise RuntimeError("boom")
    assert "503" in caplog.text


def test_what_another_job_commits_and_is_not_refused_is_to_come_and_taken(
    source, client, params
):
    with client:
        assert client.take() is None
        client.publish(2, params)
        client.follow(newer_than=0)
        source.build(0, params)
        assert not client.has_newer()
        source.build(2, params)
        assert client.has_newer()
        assert client.wait(PATIENCE).manifest.step == 2
        assert not client.has_newer()
        source.build(4, louder(params))  # It is of nothing that was published.
        wait_until(lambda: not client.has_newer())
        assert client.take() is None
    # After a resume it is an index from before that.
    with IndexClient(source, NEVER) as client:
        client.forget_after(3)
        client.follow(newer_than=0)
        assert client.wait(PATIENCE).manifest.step == 2


def test_an_index_of_a_lost_run_or_another_length_is_refused_until_it_is_made_anew(
    source, client, params, caplog
):
    source.build(6, louder(params))  # Of steps this run has not taken.
    source.build(4, louder(params))  # Of another retriever of the same step.
    shorter = dataclasses.replace(source, embed=EMBED.at_length(9))
    with client:
        client.publish(4, params)
        client.follow(newer_than=-1)
        wait_until(lambda: "Refused the index of step 4" in caplog.text)
        with pytest.raises(NotReadyError, match=r"step 6 .*step 4 is of another"):
            client.wait(0.0)
        source.series.forget_after(-1)
        caplog.clear()
        shorter.build(4, params)
        wait_until(lambda: "Refused the index of step 4" in caplog.text)
        with pytest.raises(NotReadyError, match="same document_length"):
            client.wait(0.0)
        source.series.forget_after(-1)
        source.build(4, params)
        assert client.wait(PATIENCE).manifest.step == 4


def test_a_trainer_that_waits_for_its_index_gives_signs_of_life(
    source, clock, client, monkeypatch
):
    said = []

    def look():
        """A second passes whenever it is asked how long it is to wait on."""
        found = read_heartbeat(source.model_store, TRAINER_ROLE)
        said.append(found and found.time)
        clock.seconds += 1
        return clock.seconds

    monkeypatch.setattr(follower, "time", types.SimpleNamespace(monotonic=look))
    with client:
        client.follow(newer_than=-1)
        with pytest.raises(NotReadyError, match="none came"):
            client.wait(20.0)
    times = sorted(set(said) - {None})
    assert len(times) >= 9
    assert set(np.diff(times)) == {2}


def test_asked_to_stop_it_waits_no_longer(source):
    stop = threading.Event()
    stop.set()
    with IndexClient(source, stop) as client:
        client.follow(newer_than=-1)
        with pytest.raises(StoppedError):
            client.wait(PATIENCE)


def test_patience_begins_with_the_first_sign_of_life_of_a_builder(
    source, clock, client, monkeypatch
):
    """Its slice may be queued for longer than a builder may be silent."""
    monkeypatch.setattr(follower, "time", Clock(tick=1.0))
    Heartbeat(source.model_store, BUILDER_ROLE).beat(3)  # Of a run long ago.
    with client:
        client.follow(newer_than=-1)
        clock.seconds += 1000
        with pytest.raises(NotReadyError, match=r"none came within 20 s") as e:
            client.wait(20.0)
    said = "no index builder has given a sign of life, last heard of 1000 s ago"
    assert said in str(e.value)


def test_it_is_waited_for_as_long_as_blocks_are_embedded(source, client, monkeypatch):
    """That is as long as the follower is told of progress: see its own tests."""

    def told(self, seconds, problem, stop, progress):
        problem()
        return progress()

    monkeypatch.setattr(follower.IndexFollower, "wait_for_first", told)
    builder, seen = Heartbeat(source.model_store, BUILDER_ROLE), []
    with client:
        client.follow(newer_than=-1)
        for step, done in ((2, 1), (2, 2), (2, 2), (3, 2)):
            builder.beat(step, activity="embedding", blocks_done=done, num_blocks=999)
            seen.append(client.wait(15.0))
    same = [one == other for one, other in itertools.pairwise(seen)]
    assert same == [False, True, False]


def test_a_builder_that_fell_silent_is_named(source, clock, client, caplog):
    def beat_after(*pauses):
        for pause in pauses:
            clock.seconds += pause
            client.beat(1)

    builder = Heartbeat(source.model_store, BUILDER_ROLE)
    builder.beat(0, "failed")  # Of a run long ago.
    with client:
        client.follow(newer_than=-1)
        beat_after(0)
        assert not caplog.messages
        builder.beat(7)
        beat_after(10, 300)
        assert not caplog.messages
        beat_after(10, 10)
        (warning,) = caplog.messages
        assert f"process {os.getpid()} on" in warning
        assert "running) is silent at step 7, last heard of 310 s ago" in warning
        with pytest.raises(NotReadyError, match=r"has ended without.*silent at step 7"):
            client.wait(PATIENCE)
        builder.beat(8)
        beat_after(10, 310)
        assert len(caplog.messages) == 2
