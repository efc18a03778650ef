"""A gradient that is not finite: what is kept, what is said, how a run goes on."""

import dataclasses

import jax
import numpy as np
import pytest

from realm_jax.index.snapshots import RETRIEVER_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain, stage, warm_start
from realm_jax.training.checkpoint_manifests import finished_steps
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import NEVER, poisoned, silent
from tests.training.runs import arrays_of


def check_skipping(run, config):
    """Of eight updates 5 and 7 are bad; at first one may be skipped, then two."""
    config = dataclasses.replace(config, skip_nonfinite_updates=1)
    more = dataclasses.replace(config, skip_nonfinite_updates=2)
    stop, report = tiny_world.stop_after(6)
    with poisoned(5, 7):
        assert not run(config, report, stop)
        with refused(r"at most 1 .* number 2 at update 7"):
            run(config, silent, NEVER)
        # It ends with the line of metrics that shows it.
        lines = list(read_metrics(config.model_dir))
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
        assert finished_steps(open_store(config.model_dir)) == [4, 6]
        assert run(more, silent, NEVER)
    lines = list(read_metrics(config.model_dir))
    assert [line["step"] for line in lines if line["skipped_updates"]] == [5, 7]
    assert ["loss" in line for line in lines] == [s not in (5, 7) for s in range(1, 9)]
    assert all(np.isfinite(array).all() for array in arrays_of(config.model_dir))


def test_updates_that_may_be_skipped_are_over_all_starts_of_a_run(
    world, tmp_path, quick_updates
):
    quick_updates(warm_start, "WarmStartLoss")
    config = tiny_world.warm_start_config(
        world, tmp_path, train_steps=8, checkpoint_period=4
    )
    check_skipping(warm_start.run, config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "write_back"), [("blocking", False), ("rolling", True)]
)
def test_updates_of_realm_may_be_skipped_too(world, tmp_path, mode, write_back):
    config = tiny_world.pretrain_config(
        world, tmp_path, refresh_mode=mode, write_back=write_back
    )
    check_skipping(pretrain.run, config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "config_of"),
    [
        (warm_start.run, tiny_world.warm_start_config),
        (finetune.run, tiny_world.finetune_config),
    ],
)
def test_the_other_stages_keep_no_nan_either(world, tmp_path, run, config_of):
    config = config_of(world, tmp_path, checkpoint_period=1, log_period=100)
    with poisoned(3), refused("at update 3;"):
        run(config, silent, NEVER)
    assert finished_steps(open_store(tmp_path)) == [1, 2]
    assert all(np.isfinite(array).all() for array in arrays_of(tmp_path))


def test_parameters_that_begin_as_nan_are_refused_by_name(world, tmp_path, monkeypatch):
    """As a run of an earlier version could leave them."""

    def damaged(params, *others):
        return jax.tree.map(lambda leaf: leaf * np.nan, params)

    monkeypatch.setattr(stage, "starting_params", damaged)
    config = tiny_world.pretrain_config(world, tmp_path)
    with refused(r"after 0 updates, got NaN .*params/"):
        pretrain.run(config, silent, NEVER)
    assert SnapshotSeries(open_store(tmp_path), RETRIEVER_SERIES).steps() == []
