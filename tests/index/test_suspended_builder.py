"""A builder that is suspended while another one's collection takes its attempt.

SOAK_STOP_SEED chooses the moments.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from realm_jax.index import builder
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.index.manifest import DamagedSnapshotError
from realm_jax.storage import MissingObjectError
from tests import tiny_run
from tests.index.tiny_builder import (
    index_series,
    publish,
    read_embeddings,
    slow_embeddings,
)
from tests.waiting import wait_until

SEED = int(os.environ.get("SOAK_STOP_SEED", "0"))

# Slow enough to be stopped anywhere: between two shards, and amid one.
BUILDER = """
import sys, threading, time
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import IndexBuilder
from realm_jax.storage import open_store
from tests.index.tiny_builder import CONFIG

job = IndexBuilder(
    open_store(sys.argv[1]),
    BlockStore.open(sys.argv[2]),
    CONFIG,
    on_progress=lambda done, total: time.sleep(0.02),
)
sys.exit(0 if job.run(threading.Event()) else 1)
"""


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
    program = [sys.executable, "-c", BUILDER, store.url(), str(blocks.directory)]
    taken = []
    with (
        log.open("w") as said,
        subprocess.Popen(
            program, cwd=tiny_run.ROOT, env=tiny_run.environment(), stderr=said
        ) as process,
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
            assert process.wait(60) == 0, log.read_text()[-4000:]
        finally:
            process.kill()
    # Else no round has tried what this is about.
    assert sum(map(len, taken)) > rounds / 3
    assert "Traceback" not in log.read_text()
    index_series(store).collect(keep=1)
    last = index_series(store).read_manifest(rounds).attempt
    assert attempts(store, rounds) == {f"{rounds}-{last}"}


@pytest.mark.full
def test_a_suspended_builder_begins_anew(model_store, blocks, retriever_at, tmp_path):
    check_rounds(model_store, blocks, retriever_at, tmp_path / "log", 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_builder_that_is_suspended_eighty_times(
    model_store, blocks, retriever_at, tmp_path
):
    check_rounds(model_store, blocks, retriever_at, tmp_path / "log", 80)
