import re

import numpy as np

from realm_jax.evaluation.charts import charts_by_stage, recall_charts
from realm_jax.evaluation.comparisons import Comparison, ComparisonRow
from realm_jax.metrics.curves import Curve
from realm_jax.metrics.retrieval import Interval


def texts_of(svg):
    """Every text of a picture with its height on the page, in the order drawn."""
    found = re.findall(r"<text([^>]*)>([^<]*)</text>", svg)
    return [(text, height_of(attributes)) for attributes, text in found]


def height_of(attributes):
    moved = re.search(r"translate\([-\d.]+ ([-\d.]+)\)", attributes)
    return float(moved[1] if moved else re.search(r' y="([-\d.]+)"', attributes)[1])


def charts_of(metric, values):
    curve = Curve("pretrain", metric, tuple(range(1, len(values) + 1)), values)
    return charts_by_stage([curve], "questions").get("pretrain", [])


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
    for metric, unit, values in (
        ("recall_at_5", "%", (0.4655, 0.458, 0.4612)),
        ("recall_at_5", "%", (0.101, 0.1012, 0.1015)),
        ("held_out_accuracy", "%", (0.2, 0.9, 0.6)),
        ("recall_at_5", "%", (0.99,)),
        ("recall_at_5", "%", (1.0, 0.992, 0.996)),
        ("loss", "", (3.0012, 3.0031, 3.002)),
        ("index_age_steps", "", (0.8, 1.9, 1.4)),
        ("index_age_steps", "", (120_000.0, 180_000.0)),
        ("retrieval_utility", "", (-0.013, 0.004, 0.002)),
    ):
        [chart] = charts_of(metric, values)
        shown, heights = zip(*numbers_of_axis(chart.svg, unit), strict=True)
        assert len(set(shown)) == len(shown) >= 2
        np.testing.assert_allclose(np.diff(shown, 2), 0.0, atol=1e-9)
        np.testing.assert_allclose(np.diff(heights, 2), 0.0, atol=1e-3)
        if unit == "%":
            assert 0.0 <= min(shown) <= max(shown) <= 100.0


def test_what_was_not_measured_is_not_drawn():
    assert charts_of("loss", (float("nan"),)) == []
    assert charts_of("of_no_chart", (1.0,)) == []
    assert recall_charts(Comparison([ComparisonRow("After REALM", {})]), "x") == []


def test_recall_is_drawn_beside_what_needs_no_training():
    def rows(**recalls):
        return [
            ComparisonRow(label, dict.fromkeys(("recall@1", "recall@5"), interval))
            for label, interval in recalls.items()
        ]

    stages = {
        "After the warm start": Interval(0.9, 0.85, 0.95, 100),
        "After REALM": Interval(0.95, 0.9, 1.0, 100),
    }
    references = {
        name: Interval(recall, recall, recall, 100)
        for name, recall in (("BM25", 0.93), ("random blocks", 0.001), ("other", 0.94))
    }
    compared = Comparison(rows(**stages), baselines=rows(**references))
    [_, chart] = recall_charts(compared, "questions")
    heights = dict(texts_of(chart.svg))
    for shown in ("90.0%", "95.0%", "BM25 93.0%", "random blocks 0.1%"):
        assert shown in heights
    # Heights grow downwards; names of lines that are close do not overlap.
    assert heights["random blocks 0.1%"] > heights["BM25 93.0%"]
    assert heights["BM25 93.0%"] - heights["other 94.0%"] > 9
