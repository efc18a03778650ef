import json

import jax
import jax.numpy as jnp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from realm_jax.evaluation.provenance import stage_times
from realm_jax.metrics import means as means_lib
from realm_jax.metrics.curves import health, read_curves
from realm_jax.metrics.means import mean_of
from realm_jax.metrics.metrics_file import MetricsFile, read_metrics
from realm_jax.storage import open_store
from realm_jax.training.tensorboard import EventFile
from tests.flipped import flipped


def test_means_are_of_terms_and_not_of_batches():
    left = {"loss": mean_of(jnp.asarray(6.0), 3.0), "none": mean_of(jnp.zeros(()), 0.0)}
    right = {
        "loss": mean_of(jnp.asarray(10.0), 1.0),
        "accuracy": mean_of(jnp.asarray(3.0), 4.0),
    }
    merged = jax.jit(means_lib.merge)(left, right)
    assert means_lib.compute(merged) == {"loss": 4.0, "accuracy": 0.75}


def test_a_resumed_run_repeats_no_step_and_leaves_other_stages_alone(tmp_path):
    lines = [
        {"step": step, "stage": stage, "loss": 0.0}
        for stage in ("warm_start", "pretrain")
        for step in (2, 4, 6)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 8, "sta')
    file = MetricsFile(str(tmp_path), "pretrain", 4)
    file.write(5, {"loss": 1.0})
    file.write(6, {"loss": 2.5, "index_step": 0})
    *_, last = read_metrics(str(tmp_path))
    assert last == {"step": 6, "stage": "pretrain", "loss": 2.5, "index_step": 0}
    found = [(line["stage"], line["step"]) for line in read_metrics(str(tmp_path))]
    of_pretrain = [("pretrain", step) for step in (2, 4, 5, 6)]
    assert found == [("warm_start", step) for step in (2, 4, 6)] + of_pretrain


def test_tensorboard_reads_them_and_drops_what_a_lost_run_had_shown(tmp_path):
    lost = EventFile(str(tmp_path), "pretrain", 0)
    for step in (1, 2, 3):
        lost.write(step, {"loss": 10.0 * step, "index_step": 0})
    EventFile(str(tmp_path), "pretrain", 1).write(2, {"loss": 0.5})
    found = EventAccumulator(str(tmp_path / "tensorboard" / "pretrain")).Reload()
    scalars = [(event.step, event.value) for event in found.Scalars("loss")]
    assert scalars == [(1, 10.0), (2, 0.5)]
    assert [event.step for event in found.Scalars("index_step")] == [1]


def test_a_bucket_has_the_whole_file(tmp_path, bucket):
    url = f"{bucket}/run"
    events = EventFile(url, "pretrain", 0)
    for step in (1, 2):
        events.write(step, {"loss": 1.0 / step})
    (name,) = open_store(url).list("tensorboard/pretrain")
    open_store(tmp_path).write(name, open_store(url).read(name))
    found = EventAccumulator(str((tmp_path / name).parent)).Reload()
    assert [event.value for event in found.Scalars("loss")] == [1.0, 0.5]


def test_a_flipped_bit_costs_its_own_line_at_most(tmp_path):
    lines = [
        {"step": step, "stage": "pretrain", "loss": 2.5, "steps_per_second": 2.0}
        for step in (10, 20, 30)
    ]
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    first, last = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1)
    for damaged in flipped(whole[first:last]):
        changed = whole[:first] + damaged + whole[last:]
        (tmp_path / "metrics.jsonl").write_bytes(changed)
        # Neither a restart nor a reader fails.
        MetricsFile(str(tmp_path), "pretrain", 30)
        found = list(read_metrics(str(tmp_path)))
        assert found[0] == lines[0]
        assert found[-1] == lines[2]
        assert len(found) <= 3
        health(read_curves([str(tmp_path)]))
        assert stage_times(str(tmp_path))[0].seconds > 0


def test_what_is_no_line_of_metrics_is_a_gap(tmp_path):
    for damaged in (
        "7",
        "null",
        '["step"]',
        '{"stage": "pretrain", "loss": 1.0}',
        '{"step": 4, "loss": 1.0}',
        '{"step": "4", "stage": "pretrain"}',
        '{"step": true, "stage": "pretrain"}',
        '{"step": 4, "stage": ["pretrain"]}',
        '{"step": 4, "stage": "pretrain", "loss": {}}',
    ):
        (tmp_path / "metrics.jsonl").write_text(damaged + "\n")
        assert list(read_metrics(str(tmp_path))) == []
        MetricsFile(str(tmp_path), "pretrain", 8).write(9, {"loss": 1.0})
        assert [line["step"] for line in read_metrics(str(tmp_path))] == [9]


def test_a_line_without_its_speed_counts_at_that_of_the_next(tmp_path):
    for speed in ("0", "-1", "null", '"fast"'):
        (tmp_path / "metrics.jsonl").write_text(
            f'{{"step": 10, "stage": "pretrain", "steps_per_second": {speed}}}\n'
            '{"step": 30, "stage": "pretrain", "steps_per_second": 3}\n'
        )
        (time,) = stage_times(str(tmp_path))
        assert (time.seconds, time.steps) == (10.0, 30)
