import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.errors import BadInputError
from realm_jax.metrics.calibration import calibrate

predictions = st.lists(
    st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40
)


@given(predictions, st.integers(1, 12))
def test_the_error_is_that_of_a_loop_over_bins(rows, num_bins):
    total = 0.0
    edges = np.linspace(0, 1, num_bins + 1)
    for low, high in itertools.pairwise(edges):
        inside = [(p, y) for p, y in rows if low < p <= high or (p == 0 == low)]
        if inside:
            gap = sum(p for p, _ in inside) - sum(y for _, y in inside)
            total += abs(gap) / len(rows)
    confidence, correct = map(np.asarray, zip(*rows, strict=True))
    found = calibrate(confidence, correct, num_bins)
    assert found.error == pytest.approx(total)
    assert sum(b.accuracy.count for b in found.bins) == len(rows)
    assert found.confidence == pytest.approx(np.mean(confidence))


@pytest.mark.parametrize("confidence", [[], [1.1], [-0.1], [np.nan]])
def test_what_is_no_probability_is_bad_input(confidence):
    with pytest.raises(BadInputError, match="between 0 and 1"):
        calibrate(np.asarray(confidence), np.ones(len(confidence)))
