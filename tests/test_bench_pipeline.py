"""What `bench.pipeline` reads from a profile."""

import json
import time
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import TraceAnnotation

from bench import pipeline, profile_trace
from bench.profile_trace import DONE_BY, MARK, Interval, Trace
from realm_jax.training.step_timing import Part
from tests.refused import refused


@jax.jit
def step(x):
    for _ in range(4):
        x = jnp.tanh(x @ x)
    return x


@jax.jit
def other(x):
    return x + 1


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Three executions of `step` between two marks, one of them before a search."""
    folder = tmp_path_factory.mktemp("profile")
    x = jnp.ones((200, 200))
    jax.block_until_ready((step(x), other(x)))
    jax.profiler.start_trace(str(folder))
    jax.block_until_ready(step(x))
    with TraceAnnotation(MARK):
        pass
    began = time.perf_counter()
    for _ in range(3):
        with TraceAnnotation("device"):
            jax.block_until_ready(step(x))
        with TraceAnnotation("search"):
            jax.block_until_ready(other(x))
            time.sleep(0.05)
            with TraceAnnotation("batch"):
                time.sleep(0.02)
    took = time.perf_counter() - began
    with TraceAnnotation(MARK):
        pass
    jax.profiler.stop_trace()
    [path] = folder.rglob("*.xplane.pb")
    return path, took


@pytest.mark.full
def test_a_profile_says_when_the_update_executed(profile):
    path, took = profile
    trace = profile_trace.read_trace(path)
    # Neither the one before the mark nor the other program.
    assert len(trace.executions) == 3
    assert trace.window.end - trace.window.start == pytest.approx(took * 1e9, rel=0.1)
    executing, found = profile_trace.shares(trace)
    assert 0 < executing < found["device"].thread
    # While the thread slept nothing executed.
    length = took * 1e9
    for name, slept in (("search", 0.15e9), ("batch", 0.06e9)):
        assert found[name].idle == found[name].thread >= 0.99 * slept / length
    assert found["search"].thread + found["batch"].thread < 1 - executing
    assert sum(share.thread for share in found.values()) == pytest.approx(1)
    assert sum(share.idle for share in found.values()) == pytest.approx(1 - executing)


@pytest.mark.full
def test_a_profile_without_marks_or_updates_is_refused(profile, tmp_path):
    path, _ = profile
    with refused("executions of jit_other_name"):
        profile_trace.read_trace(path, ["jit_other_name"])
    jax.profiler.start_trace(str(tmp_path))
    jax.profiler.stop_trace()
    [empty] = tmp_path.rglob("*.xplane.pb")
    with refused("expected two marks"):
        profile_trace.read_trace(empty)


TIMES = st.lists(st.integers(0, 40), min_size=2, max_size=2, unique=True).map(sorted)


@st.composite
def traces(draw):
    """Traces of whole ticks; activities lie within each other, or apart."""
    activities = []

    def fill(start, end, depth):
        while start < end and depth < 3 and draw(st.booleans()):
            here = draw(st.integers(start, end))
            there = draw(st.integers(here, end))
            activities.append(Interval(here, there, draw(st.sampled_from([*DONE_BY]))))
            fill(here, there, depth + 1)
            start = there

    fill(0, 40, 0)
    executions = [Interval(*times) for times in draw(st.lists(TIMES, max_size=4))]
    executions = executions or [Interval(3, 5)]
    return Trace(
        Interval(0, 40), executions, [a for a in activities if a.start < a.end]
    )


@given(trace=traces())
def test_shares_are_those_of_counting_ticks(trace):
    thread, idle = dict.fromkeys(DONE_BY, 0), dict.fromkeys(DONE_BY, 0)
    executing = 0
    for tick in range(40):
        name = "other"
        for each in trace.activities:  # Those within others come later.
            if each.start <= tick < each.end:
                name = each.name
        runs = any(each.start <= tick < each.end for each in trace.executions)
        executing += runs
        thread[name] += 1
        idle[name] += not runs
    found, shares = profile_trace.shares(trace)
    assert found == pytest.approx(executing / 40)
    for name, share in shares.items():
        assert share == pytest.approx((thread[name] / 40, idle[name] / 40))


def test_both_accounts_divide_the_time_alike():
    names = [f"{part.value}_seconds" for part in Part]
    lines = [
        dict(zip(names, seconds, strict=True))
        for seconds in ([1, 6, 2, 1, 0], [1, 8, 0, 0, 1])
    ]
    stopwatch = pipeline.stopwatch_shares(lines)
    assert stopwatch[Part.DEVICE] == 0.7
    shares = dict.fromkeys(DONE_BY, profile_trace.Share(0.0, 0.0)) | {
        "device": profile_trace.Share(0.7, 0.0),
        "batch": profile_trace.Share(0.1, 0.1),
        "other": profile_trace.Share(0.2, 0.1),
    }
    measured = pipeline.Measured(10, 30.0, 0.8, shares, stopwatch)
    assert measured.by_part()[Part.DEVICE] == 0.7
    assert measured.by_part()[Part.HOST] == pytest.approx(0.3)
    text = pipeline.markdown({"pretrain": measured}, "python -m bench.pipeline RUN")
    assert "| reads the batch | 10.00% | 10.00% |" in text
    assert "| together | 100.00% | 20.00% |" in text
    assert "| device | 70.00% | 70.00% |" in text


def test_a_run_without_the_stage_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.pipeline", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^2$"):
        pipeline.main()
    assert "expected the settings of pretrain" in capsys.readouterr().err


def test_a_run_with_one_index_waits_for_no_other():
    names = ("train_steps", "refresh_period", "max_staleness_steps")
    config = types.SimpleNamespace(**dict.fromkeys(names, 12))
    changes = pipeline.with_one_index(config, 35)
    assert changes == dict(zip(names, (35, 35, None), strict=True))
    assert pipeline.with_one_index(object(), 35) == {"train_steps": 35}


def test_recorded_files_are_read_from_here(tmp_path):
    """A launched process records the copies of gin files that it was given."""
    settings = tmp_path / "finetune" / "settings"
    settings.mkdir(parents=True)
    arguments = [
        "--gin_file=/elsewhere/bundle/gin/models/tiny.gin",
        "--gin_file=gin/hardware/cpu.gin",
        "--gin_file=/elsewhere/bundle/gin/runs/finetune.gin",
        "--gin.CORPUS=runs/elsewhere/corpus",
        "--gin.MODEL_DIR=runs/elsewhere/finetune",
        "--gin.WARM_START=runs/elsewhere/pretrain",
        "--gin.TASK=my_questions",
        "--gin.LOG_PERIOD=7",
    ]
    (settings / "finetune-0001.json").write_text(json.dumps({"arguments": arguments}))
    config = pipeline._config(tmp_path, "finetune", tmp_path / "anew")
    assert config.corpus == str(tmp_path / "corpus")
    assert config.warm_start == str(tmp_path / "pretrain")
    assert config.model_dir == str(tmp_path / "anew")
    assert (config.task, config.log_period) == ("my_questions", 7)
