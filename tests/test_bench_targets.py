"""The table of `make bench`; the benches themselves have tests of their own."""

import sys

import pytest

from bench import targets
from bench.targets import Figure, Inputs
from realm_jax.errors import BadInputError


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
    with pytest.raises(BadInputError, match=r"bench\.train_step.*exit code 2: error:"):
        inputs.run("train_step", "--lengths=real", f"--peers={sys.executable}")
