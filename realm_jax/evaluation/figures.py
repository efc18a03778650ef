"""Draws curves as inline SVG, which takes colours and fonts from the page around it.

Matplotlib draws with placeholder colours, which are replaced by CSS variables, so that
the picture is readable on a light and on a dark page. Text remains text.
"""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from realm_jax.evaluation.findings import percent
from realm_jax.metrics.curves import Curve, measured, running_mean
from realm_jax.metrics.retrieval import Interval

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
_MAX_DIGITS = 6
# Beyond 0 and 1, so that a point there is drawn whole.
_MARGIN = 0.03
# The height of a line of text, as a share of an axis from 0 to 1.
_LINE_OF_TEXT = 0.1
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG = "http://www.w3.org/2000/svg"
# The page is HTML, whose parser knows these two prefixes and no other.
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclasses.dataclass(frozen=True)
class ValueFormat:
    """How the values of an axis are written.

    Attributes:
      digits: decimals of a value that stands alone; the ticks of an axis have as many
        as they need.
      factor: what values are multiplied by, such as 100 for percent.
      unit: written behind the number.
      signed: whether positive values have a plus, and zero no decimals.
      is_share: whether values lie between 0 and 1, so that no axis goes further.
    """

    digits: int = 2
    factor: float = 1.0
    unit: str = ""
    signed: bool = False
    is_share: bool = False

    def text(self, value: float, digits: int | None = None) -> str:
        """Returns a value as text, with `digits` decimals if they are given."""
        digits = self.digits if digits is None else digits
        number = round(self.factor * value, digits)
        if self.signed and number == 0:
            return f"0{self.unit}"
        sign = "+" if self.signed else ""
        return f"{number + 0.0:{sign},.{digits}f}{self.unit}".replace("-", "−")

    def digits_of(self, ticks: Sequence[float]) -> int:
        """Returns the decimals that write the ticks of an axis without rounding."""
        scaled = self.factor * np.asarray(ticks, np.float64)
        allowed = 0.01 * np.diff(scaled).min() if len(scaled) > 1 else np.inf
        for digits in range(_MAX_DIGITS):
            if np.abs(np.round(scaled, digits) - scaled).max(initial=0.0) <= allowed:
                return digits
        return _MAX_DIGITS


DECIMALS = ValueFormat()
PERCENT = ValueFormat(digits=1, factor=100.0, unit="%", is_share=True)


def line_chart(
    curve: Curve,
    label: str,
    *,
    value_format: ValueFormat = DECIMALS,
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
        _number_steps(axes, curve.steps)
        digits = max(value_format.digits, _number_values(axes, value_format))
        last = running_mean(curve.values)[-1] if smooth else curve.values[-1]
        axes.annotate(
            value_format.text(float(last), digits),
            (curve.steps[-1], last),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
        return _as_inline_svg(figure, f"{curve.stage}-{curve.metric}", label)


def recall_chart(
    name: str,
    points: Sequence[tuple[str, Interval]],
    references: Sequence[tuple[str, float]],
    label: str,
) -> str:
    """Draws a recall after each stage, with its interval, beside reference lines.

    Args:
      name: tells the ids of this chart from those of others on the page.
      points: stages in their order, each with its recall.
      references: names and recalls of what is drawn as a line across.
      label: description for screen readers.

    Returns:
      An `<svg>` element as `line_chart` does; empty if there are no points.
    """
    if not points:
        return ""
    intervals = [interval for _, interval in points]
    means = [interval.mean for interval in intervals]
    lows = [interval.mean - interval.low for interval in intervals]
    highs = [interval.high - interval.mean for interval in intervals]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        places = range(len(points))
        axes.errorbar(
            places, means, [lows, highs], color=_SERIES, linewidth=1.4, marker="o"
        )
        # Below the axis, where no line crosses the numbers.
        names = [f"{stage}\n{percent(interval.mean)}" for stage, interval in points]
        axes.set_xticks(places, names)
        axes.set_xlim(-0.4, len(points) - 0.6)
        axes.set_ylim(-_MARGIN, 1.0 + _MARGIN)
        shares = np.linspace(0.0, 1.0, 5)
        axes.set_yticks(shares, [PERCENT.text(share, 0) for share in shares])
        _draw_references(axes, references)
        return _as_inline_svg(figure, name, label)


def _draw_references(axes: Axes, references: Sequence[tuple[str, float]]) -> None:
    """Draws lines across, named behind the axes where the names do not overlap."""
    above = -np.inf
    for name, value in sorted(references, key=lambda reference: reference[1]):
        axes.axhline(value, color=_MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
        above = max(value, above + _LINE_OF_TEXT)
        axes.text(
            1.01,
            above,
            f"{name} {percent(value)}",
            transform=axes.get_yaxis_transform(),
            va="center",
            color=_MUTED,
        )


def _number_steps(axes: Axes, steps: Sequence[int]) -> None:
    if len(steps) == 1:
        axes.set_xticks(steps)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if len(steps) > 1:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _number_values(axes: Axes, value_format: ValueFormat) -> int:
    """Puts ticks on the vertical axis, and returns how many decimals they have."""
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    if value_format.is_share:
        low, high = max(low, -_MARGIN), min(high, 1.0 + _MARGIN)
        axes.set_ylim(low, high)
    ticks = np.asarray(MaxNLocator(4).tick_values(low, high))
    if value_format.is_share:
        # A tolerance for 1.0000000000000002.
        ticks = ticks[(ticks > -1e-9) & (ticks < 1.0 + 1e-9)]
    ticks = ticks[(low <= ticks) & (ticks <= high)]
    digits = value_format.digits_of(ticks.tolist())
    axes.set_yticks(ticks, [value_format.text(tick, digits) for tick in ticks])
    return digits


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
