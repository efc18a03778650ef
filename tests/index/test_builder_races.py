"""Several builders at one step, answers that are lost, and builders that are suspended.

Each builder has a client of its own, as each process has. SOAK_STOP_SEED chooses the
moments at which one is suspended.
"""

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from realm_jax.index import builder
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.manifest import DamagedSnapshotError
from realm_jax.storage import MissingObjectError, open_store
from tests.index import tiny_builder
from tests.index.tiny_builder import (
    CONFIG,
    IN_BOTH,
    SCANN,
    assert_one_sound_index,
    index_series,
    publish,
    read_embeddings,
    slow_embeddings,
)
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.full

NUM_BUILDERS = 4


class AtOnce:
    """A store in which all builders reach the commit before one is made."""

    def __init__(self, store, barrier):
        self._store = store
        self._barrier = barrier

    def create(self, name, data):
        if name.startswith("index/commits/"):
            self._barrier.wait(60)
        self._store.create(name, data)

    def __getattr__(self, name):
        return getattr(self._store, name)


def race(stores, blocks, config):
    """Runs a builder on each store until the trainer is done; all must end well."""
    errors = []

    def run(store):
        try:
            builder.IndexBuilder(store, blocks, config).run(threading.Event())
        except BaseException as error:
            errors.append(error)

    Heartbeat(stores[0], builder.TRAINER_ROLE).beat(0)
    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    wait_until(lambda: errors or index_series(stores[0]).steps())
    won = index_series(stores[0]).read_manifest(3)
    Heartbeat(stores[0], builder.TRAINER_ROLE).beat(3, "finished")
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert errors == []
    return won


@IN_BOTH
def test_four_builders_make_one_commit_and_all_end_well(store, blocks, retriever_at):
    publish(store, blocks, retriever_at(3))
    barrier = threading.Barrier(NUM_BUILDERS)
    stores = [AtOnce(open_store(store.url()), barrier) for _ in range(NUM_BUILDERS)]
    won = race(stores, blocks, SCANN)
    assert_one_sound_index(store, retriever_at(3), blocks)
    assert index_series(store).read_manifest(3) == won


@IN_BOTH
def test_a_second_builder_has_an_attempt_of_its_own(store, blocks, retriever_at):
    overtaken = []

    def stats(manifest):
        return store.stats(f"index/data/3-{manifest.attempt}")

    def overtake(done, total):
        if done == total:
            won = builder.build_once(retriever_at(3), blocks, store, SCANN)
            overtaken.append((won, stats(won)))

    late = builder.build_once(
        retriever_at(3), blocks, store, SCANN, on_progress=overtake
    )
    # The first found the step committed, and took that. Nothing in it was written
    # again, were it with the same bytes.
    assert [(late, stats(late))] == overtaken


@pytest.mark.parametrize("kind", ["create", "write", "chunk", "delete"])
def test_lost_answers_lose_nothing(proxy, bucket, tmp_path, blocks, retriever_at, kind):
    store = open_store(f"{bucket}/{tmp_path.name}")
    rng = random.Random(1)
    proxy.loses = lambda request: request.kind == kind and rng.random() < 0.3
    for step in (2, 3):
        publish(store, blocks, retriever_at(step))
        builder.build_once(retriever_at(step), blocks, store, CONFIG)
        builder.collect_garbage(store, keep=1)
    assert proxy.lost
    assert {request.kind for request in proxy.lost} == {kind}
    assert_one_sound_index(store, retriever_at(3), blocks)


SEED = int(os.environ.get("SOAK_STOP_SEED", "0"))


def attempts(store, step):
    names = store.list("index/data")
    return {name.split("/")[2] for name in names if f"data/{step}-" in name}


def suspend_and_collect(process, store, step, seconds):
    """Returns the attempts that were taken from the builder while it was stopped."""
    wait_until(lambda: attempts(store, step))
    time.sleep(seconds)
    process.send_signal(signal.SIGSTOP)
    try:
        before = attempts(store, step)
        # Of another builder, an hour later.
        index_series(store).collect(keep=2, attempt_age_seconds=0.0)
        return before - attempts(store, step)
    finally:
        process.send_signal(signal.SIGCONT)


def wait_for_rows(store, step, process):
    """Returns the rows of a step's index once it is whole, None if its builder ends.

    One that was committed as it was collected is withdrawn, and made anew.
    """
    rows = []

    def are_read():
        with contextlib.suppress(MissingObjectError, DamagedSnapshotError):
            rows.append(read_embeddings(store, step))
        return rows or process.poll() is not None

    wait_until(are_read)
    return rows[0] if rows else None


def check_rounds(store, blocks, retriever_at, log, rounds):
    rng = random.Random(SEED)
    trainer = Heartbeat(store, builder.TRAINER_ROLE)
    trainer.beat(0)
    taken = []
    with (
        log.open("w") as said,
        tiny_builder.start_builder(store, blocks, stderr=said) as process,
    ):
        try:
            for step in range(1, rounds + 1):
                publish(store, blocks, retriever_at(step))
                trainer.beat(step, index_step=step - 1)
                moment = rng.uniform(0.0, 0.15)
                taken.append(suspend_and_collect(process, store, step, moment))
                rows = wait_for_rows(store, step, process)
                assert process.poll() is None, log.read_text()[-4000:]
                expected = slow_embeddings(retriever_at(step), blocks)
                np.testing.assert_allclose(rows, expected, atol=2e-5)
            trainer.beat(rounds, "finished")
            assert process.wait() == 0, log.read_text()[-4000:]
        finally:
            process.kill()
    # Else no round has tried what this is about.
    assert sum(map(len, taken)) > rounds / 3
    assert "Traceback" not in log.read_text()
    index_series(store).collect(keep=1)
    last = index_series(store).read_manifest(rounds).attempt
    assert attempts(store, rounds) == {f"{rounds}-{last}"}


@IN_BOTH
def test_a_suspended_builder_begins_anew(store, blocks, retriever_at, tmp_path):
    check_rounds(store, blocks, retriever_at, tmp_path / "log", 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@IN_BOTH
def test_a_builder_is_suspended_eighty_times(store, blocks, retriever_at, tmp_path):
    check_rounds(store, blocks, retriever_at, tmp_path / "log", 80)
