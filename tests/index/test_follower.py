import logging
import threading
from unittest import mock

import numpy as np
import pytest

from realm_jax.errors import NotReadyError
from realm_jax.index import follower as follower_module
from realm_jax.index import source as source_module
from realm_jax.index.follower import IndexFollower
from realm_jax.index.manifest import EMBEDDINGS, Expectation
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.index.source import LoadedIndex, Staleness
from realm_jax.storage import UnavailableStoreError
from tests.index.tiny_builder import IN_BOTH, flip_a_bit
from tests.waiting import PATIENCE, Clock, wait_until

CORPUS = "0123abcd"
EXPECTED = Expectation(CORPUS, dimension=4, count=10)


@pytest.fixture
def clock(monkeypatch):
    """The clock by which is waited for an index."""
    clock = Clock()
    monkeypatch.setattr(follower_module, "time", clock)
    return clock


def publish(series, step, corpus=CORPUS, dimension=4):
    writer = series.begin(step, corpus_fingerprint=corpus)
    writer.create_array(EMBEDDINGS, (10, dimension), "float32", 10)
    writer.write_rows(EMBEDDINGS, 0, np.full((10, dimension), step, np.float32))
    return writer.commit()


def loads(series, before=lambda manifest: None):
    """As `IndexSource.load_manifest`, with a searcher that shows what was read."""

    def load_manifest(manifest):
        series.verify(manifest, EXPECTED)
        before(manifest)
        return LoadedIndex(series.read_array(manifest, EMBEDDINGS), manifest)

    return load_manifest


def follow(series, *before, **options):
    return IndexFollower(series, loads(series, *before), poll_seconds=0.01, **options)


def let_it_look(follower):
    """Waits until the follower has looked for commits from now on.

    A look in progress may have begun before; the one after it has not.
    """
    seen = follower._looks
    wait_until(lambda: follower._looks >= seen + 2)


def take(follower):
    wait_until(follower.ready)
    return follower.take()


@IN_BOTH
def test_takes_each_index_once(series):
    with follow(series) as follower:
        assert not follower.ready()
        assert follower.take() is None
        manifest = publish(series, 5)
        index = take(follower)
        assert index.manifest == manifest
        np.testing.assert_array_equal(index.searcher, np.full((10, 4), 5.0))
        assert follower.take() is None
        publish(series, 6)
        assert take(follower).manifest.step == 6
    with follow(series, newer_than=6) as follower:
        let_it_look(follower)
        assert not follower.ready()
        publish(series, 7)
        assert take(follower).manifest.step == 7


def test_skips_to_the_newest(series):
    loaded = []
    for step in (1, 2, 10):
        publish(series, step)
    with follow(series, lambda manifest: loaded.append(manifest.step)) as follower:
        assert take(follower).manifest.step == 10
        publish(series, 11)
        wait_until(follower.ready)
        publish(series, 12)
        publish(series, 13)
        # One index is loaded ahead, and stays the one announced.
        let_it_look(follower)
        assert follower.ready_step == 11
        assert follower.take().manifest.step == 11
        assert take(follower).manifest.step == 13
    assert loaded == [10, 11, 13]


def test_take_does_not_wait_for_a_load(series):
    go_on, loading = threading.Event(), threading.Event()

    def wait(manifest):
        loading.set()
        assert go_on.wait(PATIENCE)

    publish(series, 1)
    with follow(series, wait) as follower:
        assert loading.wait(PATIENCE)
        assert follower.take() is None  # It goes on only after that.
        go_on.set()
        assert take(follower).manifest.step == 1


def test_refuses_once_and_goes_on(series, caplog):
    publish(series, 1)
    with caplog.at_level(logging.WARNING), follow(series) as follower:
        assert take(follower).manifest.step == 1
        for step, spoil, message in (
            (2, lambda: publish(series, 2, "ffff"), "corpus_fingerprint 0123abcd"),
            (4, lambda: publish(series, 4, dimension=5), "dimension 4"),
            (6, lambda: series.store.write("index/commits/6.json", b"?"), "6.json"),
        ):
            spoil()
            wait_until(lambda step=step: step in follower.refused)
            let_it_look(follower)
            assert not follower.ready()
            publish(series, step + 1)
            assert take(follower).manifest.step == step + 1
            assert message in follower.refused[step]
    assert list(follower.refused) == [2, 4, 6]
    warnings = [message for message in caplog.messages if "Refused" in message]
    for refusal, warning in zip(follower.refused.values(), warnings, strict=True):
        assert refusal in warning


def test_falls_back_to_the_newest_that_fits_and_a_refused_step_may_be_made_anew(series):
    publish(series, 1)
    flip_a_bit(series.store, publish(series, 2), EMBEDDINGS)
    with follow(series) as follower:
        assert take(follower).manifest.step == 1
        assert list(follower.refused) == [2]
        series.store.delete("index/commits/2.json")
        let_it_look(follower)
        publish(series, 2)
        assert take(follower).manifest.step == 2


def test_an_index_collected_while_it_is_read_is_not_refused(series, monkeypatch):
    publish(series, 1)
    verify = SnapshotSeries.verify

    def collect_first(self, manifest, expect=None):
        if manifest.step == 1:
            publish(series, 2)
            series.collect(keep=1)
        return verify(self, manifest, expect)

    monkeypatch.setattr(SnapshotSeries, "verify", collect_first)
    with follow(series) as follower:
        assert take(follower).manifest.step == 2
        assert follower.refused == {}


def test_a_store_that_is_away_is_asked_again(series, monkeypatch):
    publish(series, 1)
    steps = SnapshotSeries.steps
    calls = []

    def away_at_first(self):
        calls.append(self)
        if len(calls) < 3:
            raise UnavailableStoreError("try later")
        return steps(self)

    monkeypatch.setattr(SnapshotSeries, "steps", away_at_first)
    with follow(series) as follower:
        assert take(follower).manifest.step == 1
    assert len(calls) >= 3


def test_a_failure_of_load_reaches_the_trainer(series):
    publish(series, 1)
    with follow(series, lambda manifest: 1 // 0) as follower:
        with pytest.raises(ZeroDivisionError, match="by zero"):
            follower.wait_for_first(PATIENCE)
        with pytest.raises(ZeroDivisionError, match="by zero"):
            follower.take()


def test_waits_no_longer_than_told_nor_for_a_dead_builder(series):
    flip_a_bit(series.store, publish(series, 1), EMBEDDINGS)
    with follow(series) as follower:
        wait_until(lambda: follower.refused)
        with pytest.raises(NotReadyError, match=r"within 0\.1 s; refused: .*c/0/0"):
            follower.wait_for_first(0.1)
        with pytest.raises(NotReadyError, match="index builder has ended"):
            follower.wait_for_first(PATIENCE, problem=lambda: "gone")


def test_a_builder_that_was_not_heard_of_is_not_taken_to_be_gone(series, clock):
    def progress():
        if follower._looks >= 10:
            clock.seconds += 1.1

    with (
        follow(series) as follower,
        pytest.raises(NotReadyError, match=r"none came within 1 s.* not there$"),
    ):
        follower.wait_for_first(1.0, problem=lambda: "not there", progress=progress)


def test_waits_as_long_as_the_builder_gets_on(series, clock):
    asked = []

    def progress():
        clock.seconds += 0.4
        asked.append(clock.seconds)
        if len(asked) == 10:
            publish(series, 1)
        return len(asked)

    with follow(series) as follower:
        found = follower.wait_for_first(0.5, progress=progress)
    assert found.manifest.step == 1
    assert asked[-1] - asked[0] > 3


def test_finds_what_a_builder_committed_last_of_all(series):
    def problem():
        if not series.steps():  # Asked again while the follower has not looked yet.
            publish(series, 1)  # And ends.
        return "gone"

    with follow(series) as follower:
        assert follower.wait_for_first(PATIENCE, problem).manifest.step == 1


def test_stops_at_once_though_it_polls_rarely(series):
    follower = IndexFollower(series, loads(series), poll_seconds=3600).start()
    wait_until(lambda: follower._looks)
    follower.stop(PATIENCE)
    follower.stop(PATIENCE)
    assert not follower._thread.is_alive()


def test_does_not_spin(series, monkeypatch):
    follower, seconds = IndexFollower(series, loads(series), poll_seconds=17.0), []
    wait = follower._stop.wait

    def short(timeout=None):
        seconds.append(timeout)
        return wait(0.001)

    monkeypatch.setattr(follower._stop, "wait", short)
    counted = {"autospec": True, "side_effect": SnapshotSeries.steps}
    with mock.patch.object(SnapshotSeries, "steps", **counted) as steps, follower:
        wait_until(lambda: len(seconds) >= 5)
    assert seconds == [17.0] * steps.call_count


def test_staleness_counts_from_the_encoder(series, monkeypatch):
    manifest, clock = publish(series, 100), Clock()
    clock.seconds = manifest.began + 12.0
    monkeypatch.setattr(source_module, "time", clock)
    expected = Staleness(steps=30, seconds=pytest.approx(12.0))
    assert LoadedIndex(None, manifest).staleness(130) == expected


def test_another_process_keeps_what_is_agreed_on_until_it_takes_it(series, monkeypatch):
    """The first process may have taken it, and loaded a newer one, long before."""
    of_first = {}
    monkeypatch.setattr(follower_module.multihost, "is_first", lambda: False)
    monkeypatch.setattr(
        follower_module.multihost,
        "posted",
        lambda name: {0: of_first[name]} if name in of_first else {},
    )
    versions = [(m.step, m.attempt) for m in (publish(series, 1), publish(series, 2))]
    follower = IndexFollower(series, loads(series))
    of_first["index_loaded"] = versions[0]
    follower._look()
    of_first["index_loaded"] = versions[1]
    follower._look()
    assert follower.ready_step == 1
    assert follower.take().manifest.step == 1
    follower._look()
    assert follower.ready_step == 2
    # What the first has dropped will not be taken by any.
    of_first["index_refused"] = (versions[1], "damaged elsewhere")
    follower._look()
    assert follower.ready_step is None


@pytest.mark.parametrize("next_step", [1, 2])
def test_what_one_process_could_not_load_is_dropped(series, monkeypatch, next_step):
    """The builder may collect or replace it between the loads of two processes."""
    notes, process = {}, 0

    def post(name, value):
        notes.setdefault(name, {})[process] = value

    multihost = follower_module.multihost
    monkeypatch.setattr(multihost, "is_first", lambda: process == 0)
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost, "post", post)
    monkeypatch.setattr(multihost, "posted", lambda name: dict(notes.get(name, {})))
    monkeypatch.setattr(multihost, "from_first", lambda value: value)
    followers = [IndexFollower(series, loads(series)) for _ in range(2)]
    publish(series, 1)
    followers[0]._look()
    series.forget(1)
    published = publish(series, next_step)
    taken = []
    for _ in range(4):
        for process, follower in enumerate(followers):
            follower._look()
            if process == 0:
                taken.append(follower.take())
    assert [index.manifest for index in taken if index is not None] == [published]
    assert followers[1].take().manifest == published
