import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.metrics.curves import (
    Curve,
    Level,
    curves_from_lines,
    find_curve,
    health,
    index_versions,
    read_curves,
    running_mean,
)
from realm_jax.metrics.metrics_file import MetricsFile


def run(recall=None, utility=None, loss=3.0, refresh_period=20, last_refresh=400):
    """Metrics of a made-up pre-training: recall and utility are functions of 0..1."""
    lines, index_step, steps = [], 0, 400
    for step in range(10, steps + 1, 10):
        if step % refresh_period == 0 and step <= last_refresh:
            index_step = step
        line = {
            "step": step,
            "stage": "pretrain",
            "loss": loss,
            "index_step": index_step,
            "index_age_steps": step - index_step,
        }
        if utility:
            line["retrieval_utility"] = utility(step / steps)
        if recall and step == index_step:
            line["recall_at_5"] = recall(step / steps)
        lines.append(line)
    return curves_from_lines(lines)


def levels(curves):
    return [finding.level for finding in health(curves)]


def test_a_reader_that_knows_its_text_by_heart_is_told_from_one_that_cannot_read():
    """As after 180 updates on the sentences of twenty articles; else as with noise."""
    noise = run(lambda t: 1.0, lambda t: -0.02)
    (finding,) = [one for one in health(noise) if one.level is Level.ALARM]
    assert "never rose above zero" in finding.text
    known = run(lambda t: 1.0, lambda t: -0.02, loss=0.23)
    (finding,) = [one for one in health(known) if one.level is Level.ALARM]
    assert "by heart" in finding.text
    assert "0.23 nats" in finding.text


def test_collapse_is_an_alarm_that_says_what_happened_and_what_to_do():
    curves = run(
        lambda t: 0.52 + 0.4 * t if t < 0.25 else max(0.01, 0.62 - 2 * (t - 0.25)),
        lambda t: 0.5 if t < 0.3 else 0.0,
    )
    (finding,) = health(curves)
    assert finding.level is Level.ALARM
    assert "recall@5 fell from 62% at step 100 to 1% at step 400" in finding.text
    assert "utility fell from 0.50 to 0.00" in finding.text
    assert "ignore documents" in finding.text
    for cure in ("REFRESH_PERIOD", "learning rate", "LayerNorm", "warm-start"):
        assert cure in finding.advice


def test_what_counts_as_collapse():
    for case, (recall, utility, expected) in enumerate(
        (
            (lambda t: 0.6 if t < 0.5 else 0.1, None, Level.ALARM),
            (lambda t: 0.6 if t < 0.5 else 0.1, lambda t: 0.4, Level.ALARM),
            (None, lambda t: 0.4 if t < 0.5 else 0.0, Level.ALARM),
            (None, lambda t: 0.4 if t < 0.5 else -0.3, Level.ALARM),
            # The reader knows the text by heart: documents are found and not needed.
            (lambda t: 0.6, lambda t: 0.4 if t < 0.5 else 0.0, Level.WARNING),
            # The cold start: documents never helped.
            (lambda t: 0.1, lambda t: 0.0, Level.ALARM),
            (lambda t: 0.5 + 0.3 * t, lambda t: 0.4 * t, Level.GOOD),
            # A dip is no collapse, nor is noise around a low recall.
            (lambda t: 0.6 if t < 0.5 else 0.4, lambda t: 0.4, Level.GOOD),
            (lambda t: 0.06 if t < 0.5 else 0.01, lambda t: 0.4, Level.GOOD),
            (lambda t: 0.1 if 0.4 < t < 0.6 else 0.6, lambda t: 0.4, Level.GOOD),
        )
    ):
        assert levels(run(recall, utility)) == [expected], case


def test_an_index_that_is_no_longer_replaced_is_reported():
    kept = run(utility=lambda t: 0.4, refresh_period=40)
    dead = run(utility=lambda t: 0.4, refresh_period=40, last_refresh=160)
    assert levels(kept) == [Level.GOOD]
    (finding,) = health(dead)
    assert finding.level is Level.WARNING
    assert "240 steps old" in finding.text
    assert "every 40 steps" in finding.text


def test_a_loss_that_is_not_a_number_is_an_alarm_before_anything_else():
    curves = [
        *run(utility=lambda t: 0.4, refresh_period=40, last_refresh=160),
        Curve("finetune", "loss", (5, 10, 15), (2.0, float("nan"), float("inf"))),
    ]
    assert levels(curves) == [Level.ALARM, Level.WARNING]
    assert "finetune is not a number from step 10" in health(curves)[0].text
    # Without pre-training there is nothing to say.
    assert health([Curve("warm_start", "loss", (1, 2), (3.0, 2.0))]) == health([]) == []


def test_curves_are_sorted_and_the_last_line_of_a_step_counts():
    curves = curves_from_lines(
        [
            {"stage": "pretrain", "step": 20, "loss": 2.0},
            {"stage": "pretrain", "step": 10, "loss": 3.0, "note": "text"},
            {"stage": "finetune", "step": 10, "loss": 9.0},
            {"stage": "pretrain", "step": 20, "loss": 1.0},
            {"stage": "pretrain", "step": 30, "loss": None},
        ]
    )
    found = find_curve(curves, "pretrain", "loss")
    assert found.steps == (10, 20, 30)
    np.testing.assert_array_equal(found.values, [3.0, 1.0, np.nan])
    assert find_curve(curves, "finetune", "loss").values == (9.0,)
    assert find_curve(curves, "finetune", "accuracy").steps == ()
    assert len(curves) == 2


def test_curves_of_several_folders_are_read_together(tmp_path):
    for stage, loss in (("warm_start", 5.0), ("pretrain", 4.0)):
        MetricsFile(str(tmp_path / stage), stage, 0).write(10, {"loss": loss})
    curves = read_curves([str(tmp_path / "warm_start"), str(tmp_path / "pretrain")])
    assert [dataclasses.astuple(curve) for curve in curves] == [
        ("warm_start", "loss", (10,), (5.0,)),
        ("pretrain", "loss", (10,), (4.0,)),
    ]
    assert read_curves([str(tmp_path / "nothing")]) == ()


def test_index_versions_say_how_old_each_became():
    lines = [
        {"step": 10, "index_step": 0, "index_age_steps": 10, "index_age_seconds": 3},
        {"step": 20, "index_step": 0, "index_age_steps": 20, "index_age_seconds": 6},
        {"step": 30, "index_step": 20, "index_age_steps": 10, "recall_at_5": 0.5},
    ]
    versions = index_versions(
        curves_from_lines({"stage": "pretrain", **line} for line in lines)
    )
    assert [dataclasses.astuple(version) for version in versions] == [
        (0, 10, 20.0, 6.0, None),
        (20, 30, 10.0, None, 0.5),
    ]


@given(st.lists(st.floats(-5, 5) | st.just(float("nan")), max_size=120))
def test_running_mean_equals_a_loop(values):
    half = len(values) // 40
    expected = []
    for row in range(len(values)):
        window = values[max(row - half, 0) : row + half + 1]
        kept = [value for value in window if np.isfinite(value)]
        expected.append(sum(kept) / len(kept) if kept else float("nan"))
    np.testing.assert_allclose(running_mean(values), expected, atol=1e-9)


def test_a_collapse_is_seen_through_the_noise_of_a_short_run():
    """Utilities of a real collapse: the last point alone is above the bound."""
    values = (0.27, 0.013, 0.01, -0.006, 0.012, -0.006, 0.005, 0.005, 0.002, 0.004)
    values += (-0.002, -0.001, -0.001, 0.0115)
    steps = tuple(range(20, 20 * len(values) + 1, 20))
    (finding,) = health([Curve("pretrain", "retrieval_utility", steps, values)])
    assert finding.level is Level.ALARM
    assert "Collapse" in finding.text
