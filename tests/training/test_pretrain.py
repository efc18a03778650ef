import shutil
import threading

import numpy as np
import pytest

from realm_jax.cli.main import guard
from realm_jax.errors import StoppedError
from realm_jax.index.builder import TRAINER_ROLE, BuilderConfig, IndexBuilder
from realm_jax.index.follower import IndexFollower
from realm_jax.index.heartbeat import read_heartbeat
from realm_jax.index.manifest import DamagedSnapshotError
from realm_jax.index.snapshots import INDEX_SERIES, RETRIEVER_SERIES, SnapshotSeries
from realm_jax.manifests import seal, unseal
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training import index_client, lease, pretrain
from realm_jax.training.checkpoint_manifests import all_details, finished_steps
from tests import tiny_world
from tests.flipped import flip
from tests.refused import refused
from tests.tiny_world import EMBED, NEVER, assert_same_bits, poisoned, silent
from tests.training.runs import (
    arrays_of,
    kill_run,
    lines_of,
    params_of,
    state_of,
    stop_run,
)
from tests.training.test_lease import foreign_holder
from tests.waiting import PATIENCE, wait_until


def config_of(world, folder, **changes):
    return tiny_world.pretrain_config(
        world, folder, questions=world.questions, **changes
    )


def states_of(folder):
    """The arrays of every checkpoint, by step."""
    return {step: state_of(folder, step) for step in finished_steps(open_store(folder))}


def test_blocking_refreshes_on_time_and_says_so(uninterrupted):
    lines = list(read_metrics(str(uninterrupted)))
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["index_step"] for line in lines] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert [line["index_age_steps"] for line in lines] == [1, 2, 3, 1, 2, 3, 1, 2]
    measured = [line["step"] for line in lines if "recall_at_5" in line]
    assert measured == [1, 4, 7]
    assert all(np.isfinite(line["loss"]) for line in lines)
    for line in lines:
        assert {type(value) for value in line.values()} <= {int, float, str}
    store = open_store(uninterrupted)
    assert read_heartbeat(store, TRAINER_ROLE).state == "finished"
    assert max(all_details(store).items())[1]["index_step"] == 6
    assert SnapshotSeries(store, INDEX_SERIES).steps() == [3, 6]


def test_killed_and_resumed_it_is_the_same_run(world, uninterrupted, tmp_path):
    # Behind a checkpoint (4) and behind an index (6) that comes after it.
    kill_run(pretrain, config_of(world, tmp_path), 7)
    assert finished_steps(open_store(tmp_path)) == [4]
    assert pretrain.run(config_of(world, tmp_path), silent, NEVER)
    one, two = states_of(tmp_path), states_of(uninterrupted)
    assert one.keys() == two.keys() == {4, 8}
    assert_same_bits(one, two)
    found, expected = lines_of(tmp_path), lines_of(uninterrupted)
    # A run that starts again measures its first index again.
    assert "recall_at_5" not in expected[5]
    del found[5]["recall_at_5"]
    assert found == expected


def test_a_stop_leaves_a_checkpoint_that_goes_on_with_the_index_of_each(
    world, stopped, uninterrupted, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    store = open_store(folder)
    assert finished_steps(store) == [4, 5]
    assert max(all_details(store).items())[1]["index_step"] == 3
    assert read_heartbeat(store, TRAINER_ROLE).state == "failed"
    # As if the checkpoint before were of another index.
    manifest = unseal(store.read("checkpoints/4.json"))
    manifest["details"]["index_step"] = 0
    store.write("checkpoints/4.json", seal(manifest))
    kept = []

    def report(step, total, values, what=""):
        if what:
            return
        extra = read_heartbeat(store, TRAINER_ROLE).extra
        kept.append((step, extra["kept_index_steps"]))

    assert pretrain.run(config_of(world, folder), report, NEVER)
    assert kept[0] == (6, [0, 3])
    assert_same_bits(state_of(folder, 8), state_of(uninterrupted, 8))


def test_a_stop_while_embedding_leaves_no_index_and_no_checkpoint(world, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        pretrain.run(config_of(world, tmp_path), silent, stop)
    store = open_store(tmp_path)
    assert finished_steps(store) == []
    assert SnapshotSeries(store, INDEX_SERIES).steps() == []
    assert store.list("index/data")  # The shard that the next run goes on from.


@pytest.mark.full
def test_what_was_found_ahead_is_read_after_a_resume_too(world, tmp_path):
    """Between two checkpoints, where stopping makes one."""
    whole, parts, beside = (
        config_of(world, tmp_path / name, searcher="scann", **changes)
        for name, changes in {
            "whole": {},
            "parts": {},
            "beside": {"search_ahead": False, "train_steps": 4},
        }.items()
    )
    assert pretrain.run(whole, silent, NEVER)
    stop_run(pretrain, parts, 5)
    assert pretrain.run(parts, silent, NEVER)
    assert_same_bits(params_of(whole.model_dir), params_of(parts.model_dir))
    # It is not what a search at its own step finds, but for the first.
    assert pretrain.run(beside, silent, NEVER)
    ahead, live = (lines_of(config.model_dir) for config in (whole, beside))
    same = [ahead[step]["loss"] == live[step]["loss"] for step in range(1, 5)]
    assert same[0]
    assert not all(same)


def test_a_damaged_index_is_refused_by_name(world, stopped, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    (shard, *_) = (folder / "index/data").glob("*3-*/embeddings/c/*/*")
    flip(shard, 7)
    before = states_of(folder)
    with pytest.raises(
        DamagedSnapshotError, match=r"embeddings/c/.* made anew"
    ) as told:
        pretrain.run(config_of(world, folder), silent, NEVER)
    assert shard.relative_to(folder).as_posix() in str(told.value)
    assert_same_bits(states_of(folder), before)


def test_async_takes_what_a_builder_makes(world, corpus, tmp_path, monkeypatch):
    store = open_store(tmp_path)
    indexes = SnapshotSeries(store, INDEX_SERIES)
    followers = []

    def follower(*arguments, **options):
        followers.append(IndexFollower(*arguments, poll_seconds=0.01, **options))
        return followers[-1]

    monkeypatch.setattr(index_client, "IndexFollower", follower)

    def let_the_builder_catch_up(step, total, values, what=""):
        if step == 5 and values["index_step"] < 3:
            wait_until(followers[0].ready)

    config = config_of(world, tmp_path, refresh_mode="async", wait_seconds=PATIENCE)
    config_of_builder = BuilderConfig(embed=EMBED, keep=9, poll_seconds=0.05)
    builder = IndexBuilder(store, corpus, config_of_builder)
    thread = threading.Thread(target=builder.run, args=(NEVER,), daemon=True)
    thread.start()
    assert pretrain.run(config, let_the_builder_catch_up, NEVER)
    # It ends with its trainer.
    thread.join(PATIENCE)
    assert not thread.is_alive()
    lines = list(read_metrics(str(tmp_path)))
    used = [line["index_step"] for line in lines]
    assert used[0] == 0
    assert used[5] >= 3
    assert used == sorted(used)
    assert set(used) <= {0, 3, 6}
    for line in lines:
        assert line["index_age_steps"] == line["step"] - line["index_step"]
        assert line["index_age_seconds"] >= 0
    swaps = [i for i in range(1, 8) if used[i] != used[i - 1]]
    assert [i for i in range(8) if "recall_at_5" in lines[i]] == [0, *swaps]
    # What was trained last is embedded last, for what comes after.
    assert indexes.latest_step() == 8
    assert read_heartbeat(store, TRAINER_ROLE).extra["index_step"] == used[-1]


def test_async_without_a_builder_gives_up_in_one_line(world, tmp_path, capsys):
    config = config_of(world, tmp_path, refresh_mode="async", wait_seconds=0.1)
    # 75 is the code of sysexits.h for a failure that may pass.
    assert guard(lambda stop: pretrain.run(config, silent, stop)) == 75
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "look at the log of the index builder" in line


def test_settings_that_do_not_go_together_are_refused(world):
    frozen = ("retriever/document_tower",)
    from_index = {"frozen": frozen, "embeddings_from_index": True}
    query_tower = {"frozen": ("retriever/query_tower",)}
    written_back = {"refresh_mode": "off", "write_back": True}
    rolling, scann = {"refresh_mode": "rolling"}, {"searcher": "scann"}
    for settings, said in (
        ({"num_candidates": 1}, "NUM_CANDIDATES"),
        ({"num_candidates": 2, "own_block": True}, "at least 3"),
        (from_index | query_tower, 'expected "retriever/document_tower"'),
        (from_index | scann, 'expected SEARCHER="device"'),
        (rolling | scann, 'expected SEARCHER="device"'),
        (written_back | scann, 'expected SEARCHER="device"'),
        (from_index | rolling, "got 'device' with REFRESH_MODE='rolling'"),
    ):
        with refused(said):
            config_of(world, "nowhere", **settings)


def files_of_trainers(folder):
    """Contents by name, but for attempts, leases, and what the builder says."""
    store = open_store(folder)
    others = ("lease/", "jobs/index_builder", "index/data/", "retriever/data/")
    names = [name for name in store.list() if not name.startswith(others)]
    return {name: store.read(name) for name in names}


@pytest.mark.parametrize(
    ("mode", "log_period"),
    [
        pytest.param("async", 1, marks=pytest.mark.full),
        ("async", 100),
        ("blocking", 100),
    ],
)
def test_a_trainer_that_was_replaced_leaves_its_successors_files_alone(
    world, corpus, tmp_path, monkeypatch, mode, log_period
):
    """At the next line of metrics, and at a publication or an index before that."""
    # A successor comes only after silence, so that no sign of life is recent.
    monkeypatch.setattr(lease, "_BEAT_SECONDS", 1e4)
    found = []

    def replace(step, total, values, what=""):
        # Without a line it is the number of updates that are finished.
        if step < 2 or found or what:
            return
        foreign_holder(tmp_path, '{"beat": 0}')
        for name in ("metrics.jsonl", "jobs/trainer.json"):
            open_store(tmp_path).write(name, b"of the successor")
        found.append(files_of_trainers(tmp_path))

    periods = {"log_period": log_period, "checkpoint_period": 100}
    config = tiny_world.pretrain_config(world, tmp_path, refresh_mode=mode, **periods)
    with (
        tiny_world.builder_beside(config, corpus),
        refused(r"elsewhere.* has taken over"),
    ):
        pretrain.run(config, replace, NEVER)
    assert files_of_trainers(tmp_path) == found[0]


@pytest.mark.parametrize(
    "mode",
    [
        "blocking",
        *(pytest.param(m, marks=pytest.mark.full) for m in ("async", "rolling")),
    ],
)
def test_nothing_of_a_nan_is_kept_and_the_run_goes_on_before_it(
    world, corpus, uninterrupted, tmp_path, capsys, mode
):
    """Update 5 of 8 is bad; the next line of metrics would come at the end."""
    config = tiny_world.pretrain_config(
        world, tmp_path, refresh_mode=mode, log_period=100
    )
    with poisoned(5), tiny_world.builder_beside(config, corpus):
        assert guard(lambda stop: pretrain.run(config, silent, stop)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: expected finite")
    assert "gradient_norm of nan at update 5" in line
    assert "SKIP_NONFINITE_UPDATES=1" in line
    store = open_store(tmp_path)
    assert finished_steps(store) == [4]
    assert all(np.isfinite(array).all() for array in arrays_of(tmp_path))
    for series in (RETRIEVER_SERIES, INDEX_SERIES):
        assert max(SnapshotSeries(store, series).steps(), default=0) <= 3
    seen = []
    with tiny_world.builder_beside(config, corpus):
        assert pretrain.run(config, lambda step, *_: seen.append(step), NEVER)
    assert finished_steps(store) == [4, 8]
    assert all(np.isfinite(array).all() for array in arrays_of(tmp_path))
    if mode == "blocking":
        assert_same_bits(params_of(uninterrupted), params_of(tmp_path))
