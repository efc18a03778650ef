"""Where the time goes: a clock that is made up, and runs that are slow on purpose."""

import contextlib
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.index.searchers import ScannSearcher
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.training import pretrain, stage
from realm_jax.training.checkpoints import Checkpointer
from realm_jax.training.index_client import IndexClient
from realm_jax.training.stage import Stage
from realm_jax.training.state import create_state
from realm_jax.training.step import FunctionLoss
from realm_jax.training.step_timing import Accounting, Part, Stopwatch
from tests.training.runs import run_to_end
from tests.waiting import Clock

# What happens: seconds pass, or a part with things that happen within it.
EVENTS = st.recursive(
    st.integers(0, 50),
    lambda within: st.tuples(st.sampled_from(list(Part)), st.lists(within, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.lists(st.lists(EVENTS, max_size=4), min_size=1, max_size=3))
def test_every_second_counts_once_for_the_innermost_part(lines):
    clock = Clock()
    stopwatch = Stopwatch(clock.monotonic)
    for events in lines:
        began, painted = clock.seconds, []

        def happen(event, part):
            if isinstance(event, int):
                clock.seconds += event
                painted.extend([part] * event)  # noqa: B023
                return
            inner, events = event
            with stopwatch.part(inner):
                for event in events:
                    happen(event, inner)

        for event in events:
            happen(event, Part.HOST)
        taken = stopwatch.take()
        assert taken == {part: painted.count(part) for part in Part}
        assert sum(taken.values()) == clock.seconds - began


def test_a_part_that_fails_ends_there():
    clock = Clock()
    stopwatch = Stopwatch(clock.monotonic)
    with contextlib.suppress(KeyError), stopwatch.part(Part.SEARCH):
        clock.seconds += 2
        raise KeyError
    clock.seconds += 3
    assert stopwatch.take()[Part.SEARCH] == 2
    assert stopwatch.take()[Part.HOST] == 0


@FunctionLoss
def product(params, inputs, key):
    return (inputs @ params["w"]).sum(), {}


def state_of(rows, columns):
    return create_state({"w": jnp.zeros((rows, columns))}, optax.sgd(0.1), seed=0)


def devices(kind, count):
    return [types.SimpleNamespace(device_kind=kind)] * count


def accounts(kind, count=1):
    """Ten updates of 16 examples in 5 seconds: a product of 16 x 32 x 8."""
    clock = Clock()
    accounting = Accounting(
        Stopwatch(clock.monotonic), product, 16, devices(kind, count)
    )
    for _ in range(10):
        accounting.see(state_of(32, 8), np.zeros((16, 32), np.float32))
        clock.seconds += 0.5
    return accounting.line(10)


def test_speed_is_work_over_wall_time():
    line = accounts("TPU v4", 4)
    assert line["steps_per_second"] == 2.0
    assert line["examples_per_second"] == 2.0 * 16
    assert line["host_seconds"] == 0.5
    # Forward once and backward twice; a v4 does 275 TFLOP/s (Google's figure).
    operations = 3 * 2 * 16 * 32 * 8
    assert line["model_tflops_per_second"] == pytest.approx(2.0 * operations / 1e12)
    utilization = 2.0 * operations / (4 * 275e12)
    assert line["model_flops_utilization"] == pytest.approx(utilization)
    # Nobody knows the peak of this one.
    line = accounts("cpu")
    assert "model_flops_utilization" not in line
    assert line["model_tflops_per_second"] > 0


def test_operations_are_counted_once_for_a_loss_and_its_shapes():
    traced = []

    @FunctionLoss
    def loss(params, inputs, key):
        traced.append(inputs.shape)
        return product(params, inputs, key)

    for batch in (2, 2, 4):
        accounting = Accounting(Stopwatch(), loss, batch, devices("cpu", 1))
        accounting.see(state_of(3, 5), np.zeros((batch, 3), np.float32))
        for _ in range(2):
            assert accounting.line(1)["model_tflops_per_second"] > 0
    assert traced == [(2, 3), (4, 3)]


def slowed(monkeypatch, clock, owner, name, seconds):
    fast = getattr(owner, name)

    def slow(*arguments, **others):
        clock.seconds += seconds
        return fast(*arguments, **others)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.full
def test_what_is_slow_shows_in_its_part(world, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stage, "Stopwatch", lambda: Stopwatch(clock.monotonic))
    for owner, name, seconds in (
        (ScannSearcher, "search", 1),
        (Stage, "batch", 2),
        (Checkpointer, "save", 4),
        (IndexClient, "build", 8),
    ):
        slowed(monkeypatch, clock, owner, name, seconds)
    changes = {"searcher": "scann", "search_ahead": False, "train_steps": 6}
    run_to_end(pretrain, world, tmp_path, **changes)
    lines = list(read_metrics(str(tmp_path)))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        step = line["step"]
        assert line["search_seconds"] == 1
        assert line["host_seconds"] == 2
        assert line["device_seconds"] == 0
        # The save after update 4.
        assert line["checkpoint_seconds"] == (4 if step == 5 else 0)
        # The index made before update 4, and the searches that measure it.
        if step == 4:
            assert line["swap_seconds"] > 8
        else:
            assert line["swap_seconds"] == 0
        parts = sum(line[f"{part.value}_seconds"] for part in Part)
        assert parts == pytest.approx(1 / line["steps_per_second"])


class Slow:
    """Three seconds pass until it is ready."""

    def __init__(self, clock):
        self.clock = clock

    def block_until_ready(self):
        self.clock.seconds += 3


def test_waiting_for_the_devices_is_theirs():
    clock = Clock()
    stopwatch = Stopwatch(clock.monotonic)
    with stopwatch.part(Part.SWAP):
        clock.seconds += 1
        stopwatch.wait_for({"x": Slow(clock)})
        clock.seconds += 1
    taken = stopwatch.take()
    assert taken == dict.fromkeys(Part, 0) | {Part.DEVICE: 3, Part.SWAP: 2}
