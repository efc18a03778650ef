import re

import numpy as np

from realm_jax.evaluation.figures import (
    DECIMALS,
    PERCENT,
    ValueFormat,
    line_chart,
    recall_chart,
)
from realm_jax.metrics.curves import Curve
from realm_jax.metrics.retrieval import Interval


def texts_of(svg):
    """Every text of a picture with its height on the page, in the order drawn."""
    found = re.findall(r"<text([^>]*)>([^<]*)</text>", svg)
    return [(text, height_of(attributes)) for attributes, text in found]


def height_of(attributes):
    moved = re.search(r"translate\([-\d.]+ ([-\d.]+)\)", attributes)
    return float(moved[1] if moved else re.search(r' y="([-\d.]+)"', attributes)[1])


def numbers_of_axis(svg, unit):
    """Numbers of the vertical axis with their heights, without that of the curve."""
    numbers = []
    for text, height in texts_of(svg):
        if re.fullmatch(rf"[+−]?[\d,.]+{unit}", text):
            bare = text.removesuffix(unit).replace("−", "-").replace(",", "")
            numbers.append((float(bare), height))
    steps = len([1 for number, height in numbers if height == numbers[0][1]])
    # Steps come first and stand in a row; the value at the end comes last.
    return numbers[steps if not unit else 0 : -1]


def test_the_numbers_of_an_axis_are_where_they_say():
    """Evenly spaced numbers at evenly spaced heights: none is rounded into another."""
    for values, value_format in (
        ((0.4655, 0.458, 0.4612), PERCENT),
        ((0.101, 0.1012, 0.1015), PERCENT),
        ((0.2, 0.9, 0.6), PERCENT),
        ((0.99,), PERCENT),
        ((1.0, 0.992, 0.996), PERCENT),
        ((3.0012, 3.0031, 3.002), DECIMALS),
        ((0.8, 1.9, 1.4), ValueFormat(digits=0)),
        ((120_000.0, 180_000.0), ValueFormat(digits=0)),
        ((-0.013, 0.004, 0.002), ValueFormat(signed=True)),
    ):
        steps = tuple(range(1, len(values) + 1))
        curve = Curve("pretrain", "x", steps, values)
        svg = line_chart(curve, "label", value_format=value_format, smooth=False)
        shown, heights = zip(*numbers_of_axis(svg, value_format.unit), strict=True)
        assert len(set(shown)) == len(shown) >= 2
        np.testing.assert_allclose(np.diff(shown, 2), 0.0, atol=1e-9)
        np.testing.assert_allclose(np.diff(heights, 2), 0.0, atol=1e-3)
        if value_format.is_share:
            assert 0.0 <= min(shown) <= max(shown) <= 100.0


def test_zero_is_written_without_a_sign():
    nats = ValueFormat(signed=True)
    assert [nats.text(value) for value in (0.0, -0.001, 0.25, -1.5)] == [
        "0",
        "0",
        "+0.25",
        "−1.50",
    ]
    assert ValueFormat(digits=0).text(-0.2) == "0"


def test_a_curve_without_values_is_not_drawn():
    assert line_chart(Curve("pretrain", "x", (1,), (float("nan"),)), "label") == ""
    assert recall_chart("x", [], [("BM25", 0.5)], "label") == ""


def test_recall_is_drawn_beside_what_needs_no_training():
    points = [
        ("warm start", Interval(0.9, 0.85, 0.95, 100)),
        ("REALM", Interval(0.95, 0.9, 1.0, 100)),
    ]
    references = [("BM25", 0.93), ("random blocks", 0.001), ("another", 0.94)]
    texts = texts_of(recall_chart("x", points, references, "label"))
    heights = dict(texts)
    for shown in ("90.0%", "95.0%", "BM25 93.0%", "random blocks 0.1%"):
        assert shown in heights
    # Heights grow downwards; names of lines that are close do not overlap.
    assert heights["random blocks 0.1%"] > heights["BM25 93.0%"]
    assert heights["BM25 93.0%"] - heights["another 94.0%"] > 9
