import dataclasses

import jax
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.metrics.means import mean_of
from realm_jax.training import pretrain
from realm_jax.training.step import FunctionLoss
from tests import tiny_world
from tests.training.runs import run_to_end, stop_run


@pytest.fixture(scope="session")
def other_world(tmp_path_factory):
    """The same vocabulary and so the same model, but other blocks."""
    config = dataclasses.replace(tiny_world.WORLD, seed=1)
    return tiny_world.make(tmp_path_factory.mktemp("other_world"), config)


@pytest.fixture(scope="session")
def corpus(world):
    return BlockStore.open(world.corpus)


@pytest.fixture(scope="module", autouse=True)
def _traced_once(traced_once):
    """Every module here runs stages."""


@pytest.fixture(scope="session")
def uninterrupted(world, tmp_path_factory):
    """Model directory of a blocking run that nothing disturbed."""
    model_dir = tmp_path_factory.mktemp("uninterrupted")
    # Made before any module begins; its bits are compared with those of others.
    with tiny_world.traced_once():
        run_to_end(pretrain, world, model_dir, questions=world.questions)
    return model_dir


@pytest.fixture(scope="session")
def stopped(world, tmp_path_factory):
    """Model directory of the same run, asked to stop after five steps."""
    model_dir = tmp_path_factory.mktemp("stopped")
    config = tiny_world.pretrain_config(world, model_dir, questions=world.questions)
    with tiny_world.traced_once():
        stop_run(pretrain, config, 5)
    return model_dir


def quick_loss(*models):
    """A loss whose updates change nothing, and are quick to compile."""
    return FunctionLoss(_nothing)


def _nothing(params, inputs, key):
    zero = 0.0 * sum(leaf.sum() for leaf in jax.tree.leaves(params))
    return zero, {"loss": mean_of(zero, 1.0)}


@pytest.fixture
def quick_updates(monkeypatch):
    """Has a stage train with `quick_loss` instead of its loss of this name."""
    return lambda stage, name: monkeypatch.setattr(stage, name, quick_loss)
