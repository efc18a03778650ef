"""Trainer and builder killed many times: no wrong index is loaded, nothing is lost.

SOAK_SEED chooses the moments, and SOAK_ROLLING_SEED those of rolling runs.
"""

import dataclasses
import os
import signal
import time

import numpy as np
import pytest

from realm_jax.index.manifest import EMBEDDINGS
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import (
    HELD_OUT_UTILITY,
    all_details,
    best_step,
)
from tests.soak.jobs import Run
from tests.soak.supervisor import Kills, faults, run_through, run_to_the_end
from tests.tiny_world import assert_same_bits, read_item

SEED = int(os.environ.get("SOAK_SEED", "0"))
ROLLING_SEED = int(os.environ.get("SOAK_ROLLING_SEED", "0"))
LOCAL = pytest.mark.parametrize("make_run", ["local"], indirect=True)


@pytest.fixture(params=["local", "gs"])
def make_run(request, tmp_path, world):
    """Makes runs that differ in their name and mode alone."""
    root = str(tmp_path)
    if request.param == "gs":
        root = f"{request.getfixturevalue('bucket')}/{tmp_path.name}"

    def make(name, **options):
        return Run(f"{root}/{name}", tmp_path / f"{name}-logs", world.corpus, **options)

    return make


def check_async(run, checker):
    assert checker.check_loaded() >= 3
    found = checker.steps()
    period = run.checkpoint_period
    # The newest two, the best of all, and what they resume with.
    *older, before, last = found["checkpoints"]
    assert last == run.steps
    details = all_details(open_store(run.model_dir))
    assert older in ([], [best_step(details)])
    if before != run.steps - period:
        # Saved between two periods: the best when a new index was measured there.
        assert run.steps - period < before
        assert HELD_OUT_UTILITY in details[before]
    assert found["retriever"][-1] == found["index"][-1] == run.steps
    assert len(found["retriever"]) <= 2
    assert len(found["index"]) <= 5
    assert checker.leftovers() == []


def check_blocking(run, checker, twin, of_twin):
    # Retrievers are not published here: what was loaded must be what the twin loaded.
    expected = dict(_loaded(twin))
    assert len(expected) >= 3
    for step, rows in _loaded(run):
        np.testing.assert_array_equal(rows, expected[step])
    # One that was asked to stop has a checkpoint of that step.
    assert checker.steps()["checkpoints"][-1] == run.steps
    assert checker.leftovers() == of_twin.leftovers() == []
    assert_same_bits(_last_state(run), _last_state(twin))
    one, other = (
        SnapshotSeries(open_store(each.model_dir), "index") for each in (run, twin)
    )
    both = set(one.steps()) & set(other.steps())
    assert len(both) >= 2
    for step in both:
        np.testing.assert_array_equal(
            one.read_array(one.read_manifest(step), EMBEDDINGS),
            other.read_array(other.read_manifest(step), EMBEDDINGS),
        )


def _loaded(run):
    for path in run.loaded.glob("*.npy"):
        yield int(path.stem.split("-")[2]), np.load(path)


def _last_state(run, *more):
    store = open_store(run.model_dir)
    return [read_item(store, run.steps, item) for item in ("params", "rest", *more)]


@pytest.mark.full
@LOCAL
def test_a_few_kills(make_run, fork_server):
    run = make_run("killed", steps=20)
    kills = Kills(SEED, builder=2, trainer=1)
    check_async(run, run_to_the_end(run, fork_server, kills))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_seventy_kills(make_run, fork_server):
    run = make_run("killed", steps=200, period=4)
    kills = Kills(SEED, builder=50, trainer=20)
    check_async(run, run_to_the_end(run, fork_server, kills))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_four_builders_beside_one_trainer(make_run, fork_server):
    run = make_run("crowded", steps=60, period=4)
    kills = Kills(SEED, builder=2, trainer=2)
    check_async(run, run_to_the_end(run, fork_server, kills, num_builders=4))
    assert "Traceback" not in (run.scratch / "build-index.log").read_text()


def check_faults(make_run, fork_server, count, **options):
    run, twin = (make_run(name, mode="blocking", **options) for name in ("hit", "twin"))
    injected = faults(SEED, count, run)
    assert len({fault.signal for fault in injected}) == 2
    began = time.monotonic()
    checker = run_through(run, fork_server, injected)
    seconds = time.monotonic() - began
    print(f"\n{count} faults, {run.processes} processes: {seconds:.0f} s")
    check_blocking(run, checker, twin, run_through(twin, fork_server))


@pytest.mark.full
@LOCAL
def test_two_strikes_at_two_processes_change_no_bit(make_run, fork_server):
    options = {"steps": 12, "period": 5, "checkpoint_period": 4}
    check_faults(make_run, fork_server, 2, processes=2, **options)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("processes", [1, 2])
def test_thirty_faults_change_no_bit(make_run, fork_server, processes):
    options = {"steps": 100, "period": 5, "checkpoint_period": 4}
    check_faults(make_run, fork_server, 30, processes=processes, **options)


def check_rolling(make_run, fork_server, count, **options):
    """The index is part of the state: curve and state end as those of the twin."""
    # A line for each update: a run that resumes begins another line than its twin.
    options |= {"mode": "rolling", "log_period": 1}
    run, twin = (make_run(name, **options) for name in ("hit", "twin"))
    injected = faults(ROLLING_SEED, count, run)
    run_through(run, fork_server, [kill(fault) for fault in injected])
    run_through(twin, fork_server)
    assert_same_bits(*(curve(each) for each in (run, twin)))
    assert_same_bits(_last_state(run, "index"), _last_state(twin, "index"))


def kill(fault):
    return dataclasses.replace(fault, signal=int(signal.SIGKILL))


def curve(run):
    """Loss and age of the index, by step."""
    lines = {line["step"]: line for line in read_metrics(run.model_dir)}
    assert list(lines) == list(range(1, run.steps + 1))
    names = ("loss", "retrieval_utility", "index_step", "index_age_steps")
    return {step: [line[name] for name in names] for step, line in lines.items()}


@pytest.mark.full
@LOCAL
def test_a_rolling_run_that_is_killed_has_its_twins_curve(make_run, fork_server):
    check_rolling(make_run, fork_server, 1, steps=12, period=5, checkpoint_period=4)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thirty_kills_of_a_rolling_run_change_no_bit(make_run, fork_server):
    options = {"steps": 100, "period": 7, "checkpoint_period": 4}
    check_rolling(make_run, fork_server, 30, **options)
