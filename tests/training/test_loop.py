"""The order of what surrounds an update, and when metrics are written."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest

from realm_jax.errors import StoppedError
from realm_jax.metrics.means import mean_of
from realm_jax.metrics.metrics_file import MetricsFile, read_metrics
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.storage import open_store
from realm_jax.training import loop
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.stage import Stage
from realm_jax.training.step_timing import Accounting, Stopwatch
from tests import tiny_world
from tests.training.conftest import quick_loss


class Recorder:
    """A loop of updates that change nothing, and writes down what was called when."""

    def __init__(self, stop_at=None, stop_in_inputs_of=None):
        self.events = []
        self.stop = threading.Event()
        self.stop_at, self.stop_in_inputs_of = stop_at, stop_in_inputs_of

    def report(self, step, total, values, what=""):
        self.events.append(("line" if values else "progress", step))
        if step == self.stop_at:
            self.stop.set()

    def details(self):
        self.events.append(("save", self.stage.step))
        return {}

    def train(self, world, folder, **changes):
        changes = {"checkpoint_period": 1, "log_period": 1} | changes
        config = tiny_world.warm_start_config(world, folder, **changes)
        stage = self.stage = Stage(config, KnowledgeEncoder, report=self.report)
        with contextlib.closing(stage), self.loop(stage) as turns:
            for done in turns:
                assert done == stage.step == int(stage.state.step)
                if done == self.stop_in_inputs_of:
                    raise StoppedError("stopped")
                self.events.append(("inputs", done))
                turns.update({})
                turns.log()
                turns.save_if_due()
        assert stage.step == int(stage.state.step)
        return stage.step

    def loop(self, stage):
        return loop.train_loop(stage, quick_loss(), self.stop, self.details)


def turn(done):
    return [("inputs", done), ("line", done + 1), ("save", done + 1)]


def test_the_order_of_a_turn_is_fixed_and_a_run_goes_on_where_it_was(world, tmp_path):
    first, again, after = Recorder(stop_at=2), Recorder(), Recorder()
    assert first.train(world, tmp_path, train_steps=4) == 2
    assert first.events == [*turn(0), *turn(1)]
    assert again.train(world, tmp_path, train_steps=4) == 4
    assert again.events == [*turn(2), *turn(3)]
    assert after.train(world, tmp_path, train_steps=4) == 4
    assert after.events == []


@pytest.mark.parametrize("stops", [{"stop_at": 2}, {"stop_in_inputs_of": 2}], ids=str)
def test_a_stop_between_two_checkpoints_keeps_what_was_learned(world, tmp_path, stops):
    recorder = Recorder(**stops)
    assert recorder.train(world, tmp_path, train_steps=9, checkpoint_period=5) == 2
    assert recorder.events[-2:] == [("line", 2), ("save", 2)]
    assert finished_steps(open_store(tmp_path)) == [2]


def test_nothing_is_done_or_saved_when_stopped_before(world, tmp_path):
    recorder = Recorder()
    recorder.stop.set()
    assert recorder.train(world, tmp_path) == 0
    assert recorder.events == []
    assert finished_steps(open_store(tmp_path)) == []


def log_losses(tmp_path, losses):
    """A line is due after every fourth update; that of the third is asked for."""
    reports = []
    log = loop.MetricsLog(
        [MetricsFile(str(tmp_path), "pretrain", 0)],
        lambda *line: reports.append(line),
        Accounting(Stopwatch(), None, 1, jax.devices()),
        every=4,
        total_steps=len(losses),
    )
    for step, (total, count) in enumerate(losses, start=1):
        metrics = {"loss": mean_of(jnp.asarray(total), count)}
        # What is not finished yet would not be counted.
        log.add(jax.block_until_ready(metrics))
        if log.is_due(step) or step == 3:
            log.write(step, {"index_step": step - 1})
        else:
            log.show_progress(step)
    return list(read_metrics(str(tmp_path))), reports


def test_a_line_is_the_mean_since_the_line_before_and_the_last_step_has_one(tmp_path):
    losses = [(1.0, 1.0), (9.0, 3.0), (5.0, 1.0), (7.0, 2.0), (4.0, 1.0)]
    lines, reports = log_losses(tmp_path, losses)
    assert [line["index_step"] for line in lines] == [2, 3, 4]
    found = {line["step"]: line["loss"] for line in lines}
    assert found == {3: 15 / 5, 4: 7 / 2, 5: 4.0}
    assert all(line["steps_per_second"] > 0 for line in lines)
    said = [(step, total, bool(values)) for step, total, values in reports]
    assert said == [(step, 5, step in (3, 4, 5)) for step in range(1, 6)]
