"""Trainers and builders of several processes do what a single one does."""

import functools
import json

import numpy as np
import pytest

from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import groups, tiny_world
from tests.training.hosts_program import arguments, smooth
from tests.training.runs import params_of, run_to_end, stop_run

pytestmark = pytest.mark.full


def losses(model_dir):
    return [line["loss"] for line in read_metrics(str(model_dir))]


def held_out(model_dir):
    """What was measured on held-out sentences, wherever it was."""
    found = [
        (line["step"], value)
        for line in read_metrics(str(model_dir))
        for name, value in line.items()
        if name.startswith("held_out_") and not name.endswith("_seconds")
    ]
    assert found
    return found


def work(model_dir):
    """Padding, and operations of an update, over all processes."""
    lines = list(read_metrics(str(model_dir)))
    tflops = [x["model_tflops_per_second"] / x["steps_per_second"] for x in lines]
    return [x["padding_share"] for x in lines], [1e12 * one for one in tflops]


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """(searcher, steps) -> the same run by one process on one device."""

    @functools.cache
    def run(searcher, steps):
        folder = tmp_path_factory.mktemp("alone")
        settings = {"searcher": searcher, "batch_size": 8, "train_steps": steps}
        settings |= {"optimizer": smooth, "held_out_examples": 12}
        run_to_end(pretrain, world, folder, questions=world.questions, **settings)
        return folder

    return run


@pytest.mark.parametrize(
    ("num_processes", "devices", "mesh", "searcher", "steps"),
    [
        (2, 2, {"data": 1, "fsdp": 2, "model": 2}, "device", 8),
        (2, 1, {}, "scann", 20),
        (1, 8, {"data": 1, "fsdp": 8}, "device", 20),
        # Each process stands for a slice, which only `data` leaves.
        (2, 4, {"data": 2, "fsdp": 2, "model": 2, "slices": 2}, "device", 20),
        (4, 2, {"data": 4, "fsdp": 2}, "device", 20),
    ],
)
def test_processes_train_as_one_does(
    world, alone, tmp_path, num_processes, devices, mesh, searcher, steps
):
    settings = {"searcher": searcher, "batch_size": 8, "train_steps": steps}
    settings |= {"mesh": mesh, "held_out_examples": 12, "profile": steps == 8}
    train = arguments(world, tmp_path, **settings)
    with groups.started(train, num_processes, devices) as group:
        group.wait()
    expected = alone(searcher, steps)
    np.testing.assert_allclose(losses(tmp_path), losses(expected), rtol=1e-5)
    np.testing.assert_allclose(work(tmp_path), work(expected), rtol=1e-2)
    measured = held_out(tmp_path), held_out(expected)
    np.testing.assert_allclose(*measured, rtol=1e-3, atol=1e-5)
    profiles = tmp_path.glob("profile/plugins/profile/pretrain-step-2/*.xplane.pb")
    writers = {path.name.partition("-")[0] for path in profiles}
    assert writers == ({"0", "1"} if steps == 8 else set())
    store = open_store(tmp_path)
    # The best one is the same, and those that it left room for.
    assert finished_steps(store) == finished_steps(open_store(expected))
    assert finished_steps(store)[-1] == steps
    params = params_of(expected), params_of(tmp_path)
    tiny_world.assert_close(*params, rtol=1e-5, atol=1e-5)
    used = [
        [line["index_step"] for line in read_metrics(str(path))]
        for path in (expected, tmp_path)
    ]
    assert used[0] == used[1] == [step - step % 3 for step in range(steps)]


def test_all_processes_swap_at_the_same_step(world, tmp_path):
    # It waits for the builders: there are several indexes however slow they are.
    settings = {"refresh_mode": "async", "max_staleness_steps": 9}
    settings |= {"train_steps": 30, "checkpoint_period": 30}
    train = arguments(world, tmp_path, **settings)
    build = arguments(world, tmp_path, "build-index")
    with (
        groups.started(train, num_processes=2) as trainers,
        groups.started(build, num_processes=2) as builders,
    ):
        trainers.wait()
        builders.wait()
    seen = [
        (tmp_path / f"index_of_steps-{number}.jsonl").read_text() for number in (0, 1)
    ]
    assert seen[0] == seen[1]
    used = [json.loads(line)[1] for line in seen[0].splitlines()]
    assert len(used) == 30
    assert len(set(used)) > 2
    assert used == sorted(used)
    committed = SnapshotSeries(open_store(tmp_path), INDEX_SERIES).steps()
    assert set(used) <= set(committed)
    assert committed[-1] == 30


def test_a_gradient_that_is_not_finite_ends_all_after_the_same_update(world, tmp_path):
    with groups.started(arguments(world, tmp_path, bad=[5]), num_processes=2) as job:
        codes, said = job.codes(), job.said()
    assert all(codes), said
    assert all("gradient_norm of nan at update 5;" in log for log in said), said
    assert finished_steps(open_store(tmp_path)) == [4]


@pytest.mark.parametrize(
    ("settings", "ages"),
    [
        ({"refresh_mode": "off", "write_back": True}, [1, 2, 3, 4, 5, 6, 7, 8]),
        # Rows of a frozen tower do not depend on when they were embedded, as they do
        # where slices are others.
        (
            {"refresh_mode": "rolling", "frozen": ["retriever/document_tower"]},
            [1, 2, 3, 3, 4, 5, 3, 3],
        ),
    ],
    ids=["written back", "rolling"],
)
def test_an_index_in_the_state_goes_on_on_another_number_of_devices(
    world, tmp_path, settings, ages
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {**settings, "batch_size": 8}
    given = {"optimizer": smooth, **changes}
    run_to_end(pretrain, world, whole, **given)
    stop_run(pretrain, tiny_world.pretrain_config(world, parts, **given), 4)
    assert finished_steps(open_store(parts)) == [4]
    train = arguments(world, parts, **changes)
    with groups.started(train, num_processes=1, devices=2) as group:
        group.wait()
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    assert [line["index_age_steps"] for line in read_metrics(str(parts))] == ages


def test_processes_renew_the_index_of_fine_tuning_as_one_does(world, tmp_path):
    """In a period of one update, for which slices depend on no number of devices."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    changes = {"refresh_mode": "rolling", "refresh_period": 1, "num_embedded": 2}
    changes |= {"batch_size": 8, "train_steps": 4}
    given = {"questions": world.questions, "optimizer": smooth}
    run_to_end(finetune, world, alone, **given, **changes)
    train = arguments(world, together, "finetune", **changes)
    with groups.started(train, num_processes=2, devices=2) as group:
        group.wait()
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    params = params_of(alone), params_of(together)
    tiny_world.assert_close(*params, rtol=1e-5, atol=1e-5)
