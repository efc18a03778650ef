"""The table of `make bench`, and what its processes say."""

import sys

import pytest

from bench import processes, targets
from bench.targets import Figure, Inputs
from realm_jax.errors import BadInputError
from tests.refused import refused


def test_a_ratio_of_one_meets_a_target_from_either_side():
    assert Figure("speed", 3.0, 2.0).ratio == 1.5
    assert Figure("memory", 1.5, 1.2, at_most=True).ratio == pytest.approx(0.8)
    row = targets.row(Figure("memory", 1.5, 1.2, at_most=True))
    assert row == ["memory", "1.5", "at most 1.2", "0.80"]
    # Of a count that should be 0 there is no ratio.
    assert targets.row(Figure("errors", 0, 0, at_most=True))[-1] == ""


def test_a_bench_that_fails_is_a_row_that_says_why(tmp_path, capsys):
    def of_one(inputs):
        yield Figure("one", 1.0, 1.0)

    def of_other(inputs):
        raise BadInputError("expected a thing, got none")
        yield

    inputs = Inputs(tmp_path, tmp_path, tmp_path, tmp_path)
    figures = list(targets.measure(inputs, [of_other, of_one]))
    assert [figure.value for figure in figures] == [None, 1.0]
    text = targets.markdown(figures)
    assert "| other | expected a thing, got none |" in text
    assert "| one | 1 | at least 1 | 1.00 |" in text


@pytest.mark.full
def test_a_failing_program_is_one_line(tmp_path):
    inputs = Inputs(tmp_path, tmp_path, tmp_path, tmp_path)
    with refused(r"bench\.train_step.*exit code 2: error:"):
        inputs.run("train_step", "--lengths=real", f"--peers={sys.executable}")


@pytest.mark.process("what fails is a program, of a bare Python")
def test_what_fails_is_said_in_one_line(monkeypatch, tmp_path):
    with refused("make peers"):
        processes.require_peers(tmp_path / "python")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with refused("make bench"):
        processes.require_peers(tmp_path)
    with refused(r"exit code 1.*no such thing"):
        processes.run_json(["python3", "-c", "raise SystemExit('no such thing')"])


def test_repetitions_become_a_median_with_its_range():
    runs = [{"seconds": [3.0, 1.0], "peak_gib": 2.0}, {"seconds": [2.0], "peak_gib": 3}]
    expected = {"seconds": 2.0, "least": 1.0, "most": 3.0, "peak_gib": 3}
    assert processes.medians(runs) == expected
