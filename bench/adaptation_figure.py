"""Draws what adapting an encoder gains, from the tables of `bench.adaptation`.

    python -m bench.adaptation_figure docs/adapt.md --output docs/figures/adaptation.svg

A panel is a text, a row a way to adapt the encoder: the change of nDCG@10 from the
encoder as it was, with its interval. What lies further to the left than the panel has
its figure at the edge.
"""

import pathlib
import re
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.adaptation import LABELS, REALM, TAUGHT
from bench.command import make_parser, one_line_errors
from realm_jax.errors import BadInputError

_OURS, _OTHERS = "#1a6fb4", "#8a8a8a"
_LEFT = -8.0
_TABLE = re.compile(r"<!-- bench: adaptation-(\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_CHANGE = re.compile(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]")
_QUERIES = re.compile(r"^\| (\d+) queries", re.MULTILINE)


class Change(NamedTuple):
    """A change of nDCG@10 and its interval, in points."""

    mean: float
    low: float
    high: float


class Panel(NamedTuple):
    """A text: its name on the page, how many queries it has, changes by method."""

    name: str
    queries: int
    changes: dict[str, Change]


def read_panels(page: pathlib.Path) -> list[Panel]:
    """Returns what the tables of a page say, in its order."""
    try:
        text = page.read_text()
    except OSError as error:
        raise BadInputError(
            f"expected a page with tables in {page}, got none ({error.strerror})"
        ) from error
    panels = []
    for name, found in _TABLE.findall(text):
        queries = _QUERIES.search(found)
        if queries is None:
            continue
        rows = [line.strip("| ").split(" | ") for line in found.splitlines()]
        changes = {
            row[0]: Change(*map(float, change.groups()))
            for row in rows
            if len(row) > 2 and (change := _CHANGE.fullmatch(row[2]))
        }
        panels.append(Panel(name, int(queries[1]), changes))
    if not panels:
        raise BadInputError(
            f"expected tables of bench.adaptation in {page}, got none; run it first"
        )
    return panels


def draw(panels: list[Panel]) -> Figure:
    """Returns a figure with a panel for each text, side by side."""
    figure = Figure((2.0 + 1.9 * len(panels), 2.6), layout="constrained")
    methods = [
        label
        for label in LABELS.values()
        if any(label in panel.changes for panel in panels)
    ]
    every = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(every[0], panels, strict=True):
        _draw_panel(axes, panel, methods)
    first = every[0][0]
    first.set_yticks(range(len(methods)), methods)
    first.set_ylim(len(methods) - 0.5, -0.5)
    first.set_xlim(left=_LEFT)
    figure.supxlabel("change of nDCG@10 from the encoder as it was, points", fontsize=8)
    return figure


def _draw_panel(axes: Axes, panel: Panel, methods: list[str]) -> None:
    axes.axvline(0, color="0.7", linewidth=0.8)
    for place, method in enumerate(methods):
        if (change := panel.changes.get(method)) is None:
            continue
        colour = _OURS if method in (LABELS[TAUGHT], LABELS[REALM]) else _OTHERS
        if change.high < _LEFT:
            axes.annotate(
                f"◀ {change.mean:+.0f}", (_LEFT, place), color=colour, va="center"
            ).set_fontsize(8)
            continue
        axes.plot((change.low, change.high), (place, place), color=colour)
        axes.plot(change.mean, place, "o", color=colour, markersize=5)
    axes.set_title(f"{panel.name}, {panel.queries} queries", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=8, left=False)


def main() -> None:
    """Reads the page and writes the figure."""
    parser = make_parser(__doc__)
    parser.add_argument("page", type=pathlib.Path, help="with the tables")
    parser.add_argument("--output", required=True, help="SVG or PNG file to write")
    flags = parser.parse_args()
    draw(read_panels(flags.page)).savefig(flags.output)


if __name__ == "__main__":
    with one_line_errors():
        main()
