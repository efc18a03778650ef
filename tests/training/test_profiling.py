"""A profile is where TensorBoard looks for it, of the steps it says."""

import logging
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from realm_jax.errors import StoppedError
from realm_jax.storage import open_store
from realm_jax.training import profiling, warm_start
from realm_jax.training.loop import train
from realm_jax.training.profiling import Profiler
from realm_jax.training.state import create_state
from realm_jax.training.step_timing import Stopwatch
from tests import tiny_world
from tests.tiny_world import NEVER, silent

pytestmark = pytest.mark.full


@jax.jit
def step(state, inputs):
    return state.replace(step=state.step + 1), {}


def run(url, total_steps, *, first=0, inputs_at=lambda done, state: 0):
    """Trains nothing, profiled; returns the names of what it left."""
    state = create_state({"w": jnp.zeros(())}, optax.sgd(0.1), seed=0)
    state = state.replace(step=jnp.asarray(first, jnp.int32))
    store, stopwatch = open_store(url), Stopwatch()
    with Profiler(store, "stage", first, total_steps, stopwatch) as profiler:
        train(
            state,
            step,
            inputs_at,
            total_steps=total_steps,
            hooks=[profiler],
            stop=NEVER,
            stopwatch=stopwatch,
        )
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
def test_ten_steps_are_profiled_or_the_last_there_are(tmp_path, first, total, profiled):
    (name,) = run(tmp_path, total, first=first)
    folder = f"profile/plugins/profile/stage-step-{profiled[0]}"
    assert name.startswith(f"{folder}/0-")
    assert steps_in((tmp_path / name).read_bytes()) == list(profiled)


def test_a_bucket_gets_a_copy(bucket):
    (name,) = run(f"{bucket}/profiled", 3)
    assert steps_in(open_store(f"{bucket}/profiled").read(name)) == [2, 3]


def test_one_that_is_stopped_leaves_what_there_is_or_says_that_it_is_nothing(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO, profiling.LOG.name)

    def stop_at(step):
        def inputs_at(done, state):
            if done == step:
                raise StoppedError("stopped")
            return 0

        return inputs_at

    assert run(tmp_path, 40, inputs_at=stop_at(4)) == []
    assert "ended after step 4, before those" in caplog.text
    assert "(11 to 20)" in caplog.text
    (name,) = run(tmp_path, 40, inputs_at=stop_at(12))
    assert set(steps_in((tmp_path / name).read_bytes())) >= {11, 12}


def test_one_that_fails_leaves_no_profiler_behind(tmp_path):
    def fail_at_twelve(done, state):
        assert done < 12
        return 0

    with pytest.raises(AssertionError):
        run(tmp_path / "failed", 40, inputs_at=fail_at_twelve)
    assert not (tmp_path / "failed" / "profile").exists()
    assert run(tmp_path / "again", 3)


def test_a_stage_is_profiled_when_asked_to(world, tmp_path, caplog):
    caplog.set_level(logging.INFO, profiling.LOG.name)
    config = tiny_world.warm_start_config(world, tmp_path, profile=True)
    assert warm_start.run(config, silent, NEVER)
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert path.parent.name == "warm_start-step-2"
    assert steps_in(path.read_bytes()) == [2, 3]
    (said,) = caplog.messages
    assert said.count(str(tmp_path / "profile")) == 2
    assert "steps 2 to 3" in said
    # A run that is done is not profiled, and does not fail.
    assert warm_start.run(config, silent, NEVER)
    assert len(caplog.messages) == 1
    assert pathlib.Path(tmp_path, "metrics.jsonl").exists()
