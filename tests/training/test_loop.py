import threading

import jax
import jax.numpy as jnp
import optax
import pytest

from realm_jax.errors import StoppedError
from realm_jax.metrics.means import mean_of
from realm_jax.metrics.metrics_file import MetricsFile, read_metrics
from realm_jax.training import loop
from realm_jax.training.state import create_state
from realm_jax.training.step_timing import Accounting, Stopwatch


def start(step=0):
    state = create_state({"w": jnp.zeros(())}, optax.sgd(0.1), seed=0)
    return state.replace(step=jnp.asarray(step, jnp.int32))


class Recorder:
    """Step, inputs and hooks that write down who was called when."""

    def __init__(self, stop_at=None, stop_in_inputs_of=None):
        self.events = []
        self.stop = threading.Event()
        self.stop_at, self.stop_in_inputs_of = stop_at, stop_in_inputs_of

    def step(self, state, inputs):
        self.events.append(("step", inputs))
        total = mean_of(jnp.asarray(float(inputs)), 1.0)
        return state.replace(step=state.step + 1), {"loss": total}

    def inputs_at(self, done, state):
        assert done == int(state.step)
        if done == self.stop_in_inputs_of:
            raise StoppedError("stopped")
        self.events.append(("inputs", done))
        return done

    def hook(self, name):
        def call(step, state, metrics):
            assert step == int(state.step)
            self.events.append((name, step))
            if step == self.stop_at:
                self.stop.set()

        return call

    def train(self, state, total_steps, hooks=("log", "save")):
        return loop.train(
            state,
            self.step,
            self.inputs_at,
            total_steps=total_steps,
            hooks=[self.hook(name) for name in hooks],
            stop=self.stop,
            stopwatch=Stopwatch(),
        )


def test_the_order_of_a_step_never_changes():
    recorder = Recorder()
    state = recorder.train(start(step=3), total_steps=5)
    assert int(state.step) == 5
    assert recorder.events == [
        *[("inputs", 3), ("step", 3), ("log", 4), ("save", 4)],
        *[("inputs", 4), ("step", 4), ("log", 5), ("save", 5)],
    ]


@pytest.mark.parametrize("stops", [{"stop_at": 2}, {"stop_in_inputs_of": 2}], ids=str)
def test_a_stop_keeps_what_was_learned_with_all_hooks(stops):
    recorder = Recorder(**stops)
    state = recorder.train(start(), total_steps=9)
    assert int(state.step) == 2
    assert recorder.events[-1] == ("save", 2)


def test_nothing_happens_when_all_is_done_or_stopped_before():
    done, stopped = Recorder(), Recorder()
    stopped.stop.set()
    done.train(start(step=5), total_steps=5)
    stopped.train(start(), total_steps=5)
    assert done.events == stopped.events == []


def test_every_calls_at_multiples_only():
    called = []
    hook = loop.every(3, lambda step, state: called.append(step))
    for step in range(1, 8):
        hook(step, start(), {})
    assert called == [3, 6]


def log_losses(tmp_path, losses, *, every, extra=lambda step: {}, due=lambda: False):
    reports = []
    log = loop.LogMetrics(
        [MetricsFile(str(tmp_path), "pretrain", 0)],
        lambda *line: reports.append(line),
        Accounting(Stopwatch(), None, 1, jax.devices()),
        every=every,
        total_steps=len(losses),
        extra=extra,
        due=due,
    )
    for step, (total, count) in enumerate(losses, start=1):
        metrics = {"loss": mean_of(jnp.asarray(total), count)}
        # What is not finished yet would not be counted.
        log(step, start(), jax.block_until_ready(metrics))
    return list(read_metrics(str(tmp_path))), reports


def test_a_line_is_the_mean_since_the_line_before_and_the_last_step_has_one(tmp_path):
    losses = [(1.0, 1.0), (9.0, 3.0), (5.0, 1.0), (7.0, 2.0), (4.0, 1.0)]
    lines, reports = log_losses(
        tmp_path, losses, every=2, extra=lambda step: {"index_step": step - 1}
    )
    assert [line["index_step"] for line in lines] == [1, 3, 4]
    assert [(line["step"], line["loss"]) for line in lines] == [
        (2, pytest.approx(10 / 4)),
        (4, pytest.approx(12 / 3)),
        (5, pytest.approx(4.0)),
    ]
    assert all(line["steps_per_second"] > 0 for line in lines)
    assert [(step, total, bool(values)) for step, total, values in reports] == [
        (1, 5, False),
        (2, 5, True),
        (3, 5, False),
        (4, 5, True),
        (5, 5, True),
    ]


def test_a_line_that_is_due_between_two_is_the_mean_of_what_is_new(tmp_path):
    due = iter([False, True, False, False])
    lines, _ = log_losses(
        tmp_path,
        [(1.0, 1.0), (3.0, 1.0), (5.0, 1.0), (7.0, 1.0), (9.0, 1.0)],
        every=4,
        due=lambda: next(due),
    )
    assert [(line["step"], line["loss"]) for line in lines] == [
        (2, pytest.approx(2.0)),
        (4, pytest.approx(6.0)),
        (5, pytest.approx(9.0)),
    ]
