"""A profile is where TensorBoard looks for it, of the steps it says."""

import contextlib
import logging

import jax
import pytest

from realm_jax.errors import StoppedError
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.training import profiling, warm_start
from realm_jax.training.loop import train_loop
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.tiny_world import NEVER
from tests.training.conftest import quick_loss
from tests.training.runs import run_to_end

pytestmark = pytest.mark.full


def run(world, folder, total_steps, *, first=0, before=lambda done: None):
    """Trains nothing, profiled; returns the names of what it left."""
    config = tiny_world.warm_start_config(
        world, folder, train_steps=total_steps, profile=True, checkpoint_period=10**6
    )
    with contextlib.closing(Stage(config, KnowledgeEncoder)) as stage:
        stage.step = first
        stage.state = stage.state.replace(step=stage.state.step + first)
        with train_loop(stage, quick_loss(), NEVER) as loop:
            for done in loop:
                before(done)
                loop.update({})
        store = stage.model_store
    return [name for name in store.list("profile") if name.endswith(".xplane.pb")]


def steps_in(data):
    """The steps that a profile shows, by the name TensorBoard knows them by."""
    profile = jax.profiler.ProfileData.from_serialized_xspace(data)
    return sorted(
        dict(event.stats)["step_num"]
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    )


@pytest.mark.parametrize(
    ("first", "total", "profiled"),
    [(100, 140, range(111, 121)), (0, 15, range(6, 16)), (7, 8, range(8, 9))],
)
def test_ten_steps_are_profiled_or_the_last(world, tmp_path, first, total, profiled):
    (name,) = run(world, tmp_path, total, first=first)
    folder = f"profile/plugins/profile/warm_start-step-{profiled[0]}"
    assert name.startswith(f"{folder}/0-")
    assert steps_in((tmp_path / name).read_bytes()) == list(profiled)


def test_one_that_is_stopped_leaves_what_there_is_or_says_that_it_is_nothing(
    world, tmp_path, caplog
):
    caplog.set_level(logging.INFO, profiling.LOG.name)

    def stop_at(step):
        def before(done):
            if done == step:
                raise StoppedError("stopped")

        return before

    assert run(world, tmp_path / "early", 40, before=stop_at(4)) == []
    assert "ended after step 4, before those" in caplog.text
    assert "(11 to 20)" in caplog.text
    (name,) = run(world, tmp_path / "later", 40, before=stop_at(12))
    assert set(steps_in((tmp_path / "later" / name).read_bytes())) >= {11, 12}


def test_one_that_fails_leaves_no_profiler_behind(world, tmp_path):
    def fail_at_twelve(done):
        assert done < 12

    with pytest.raises(AssertionError):
        run(world, tmp_path / "failed", 40, before=fail_at_twelve)
    assert not (tmp_path / "failed" / "profile").exists()
    assert run(world, tmp_path / "again", 3)


def test_a_stage_is_profiled_when_asked_to(world, tmp_path, caplog):
    caplog.set_level(logging.INFO, profiling.LOG.name)
    run_to_end(warm_start, world, tmp_path, profile=True)
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert path.parent.name == "warm_start-step-2"
    assert steps_in(path.read_bytes()) == [2, 3]
    (said,) = caplog.messages
    assert said.count(str(tmp_path / "profile")) == 2
    assert "steps 2 to 3" in said
    # A run that is done is not profiled, and does not fail.
    run_to_end(warm_start, world, tmp_path, profile=True)
    assert len(caplog.messages) == 1
