"""Draws curves as inline SVG, which takes colours and fonts from the page around it.

Matplotlib draws with placeholder colours, which are replaced by CSS variables, so that
the picture is readable on a light and on a dark page. Text remains text.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from realm_jax.metrics.curves import Curve, measured, running_mean

_INK, _MUTED, _GRID, _SERIES = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--line)",
    _SERIES: "var(--series)",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
}
_SIZE_INCHES = (4.8, 2.1)
_MARKED_POINTS = 12
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG = "http://www.w3.org/2000/svg"
# The page is HTML, whose parser knows these two prefixes and no other.
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def line_chart(
    curve: Curve,
    label: str,
    *,
    value_format: Callable[[float], str] = "{:.2f}".format,
    smooth: bool = True,
    include_zero: bool = False,
    swaps: Sequence[int] = (),
) -> str:
    """Draws one curve over steps.

    Args:
      curve: the curve; infinite values and NaN are left out.
      label: description of the curve for screen readers.
      value_format: formats values.
      smooth: whether to draw a running mean over a pale line of the values.
      include_zero: whether the axis includes zero, which is then marked.
      swaps: steps at which a new index came into use, drawn as ticks at the top.

    Returns:
      An `<svg>` element for a page that defines the variables --ink, --muted, --line
      and --series; empty if there is nothing to draw.
    """
    curve = measured(curve)
    if not curve.steps:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        if include_zero:
            axes.axhline(0.0, color=_MUTED, linewidth=0.9)
        _draw_curve(axes, curve, smooth)
        for step in swaps:
            axes.axvline(step, 0.95, 1.0, color=_MUTED, linewidth=1.0)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: value_format(y)))
        axes.margins(y=0.12)
        last = running_mean(curve.values)[-1] if smooth else curve.values[-1]
        axes.annotate(
            value_format(last),
            (curve.steps[-1], last),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
        return _as_inline_svg(figure, f"{curve.stage}-{curve.metric}", label)


def _draw_curve(axes: Axes, curve: Curve, smooth: bool) -> None:
    steps, values = np.asarray(curve.steps), np.asarray(curve.values)
    if smooth:
        axes.plot(steps, values, color=_SERIES, linewidth=0.8, alpha=0.35)
        values = running_mean(values)
    marker = "o" if len(steps) <= _MARKED_POINTS and not smooth else ""
    axes.plot(steps, values, color=_SERIES, linewidth=1.8, marker=marker, markersize=4)
    if len(steps) == 1:
        axes.plot(steps, values, color=_SERIES, marker="o", markersize=5)


def _as_inline_svg(figure: Figure, name: str, label: str) -> str:
    buffer = io.StringIO()
    # The salt keeps the ids of the charts of one page apart.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = ElementTree.fromstring(buffer.getvalue())
    svg.attrib |= {"role": "img", "aria-label": label}
    # The page sets the size.
    del svg.attrib["width"], svg.attrib["height"]
    for group in svg.iter(f"{{{_SVG}}}g"):
        # Groups are numbered alike in every chart, and nothing refers to them.
        group.attrib.pop("id", None)
    text = ElementTree.tostring(svg, encoding="unicode")
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    return text
